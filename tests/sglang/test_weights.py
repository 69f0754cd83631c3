"""New weights in a running engine, as between the epochs of reinforcement learning."""

import time

import pytest
from safetensors.torch import load_file

from tests.support import prompts
from tests.support.models import continuations, save, tiny_model

from .conftest import GREEDY, ids, read_counts, sglang_engine

TOKENS = GREEDY["max_new_tokens"]
IDS = prompts.random_ids([12] * 4, 1000, first=2, seed=5)
pytestmark = pytest.mark.extended


def test_answers_are_of_the_new_weights_and_what_was_learnt_stays(tiny, demo_model, tmp_path):
    other = save(tiny_model(seed=4, vocab_size=49152, max_position_embeddings=2048), tmp_path / "other", demo_model)
    expected = [continuations(model, IDS, TOKENS) for model in (tiny, other)]
    assert expected[0] != expected[1]
    accepted = []
    counts, env = tmp_path / "counts.json", {"FREEDRAFT_LIVE": "memory"}
    with sglang_engine(tiny, counts, env, skip_tokenizer_init=True, speculative_algorithm="SSSD") as engine:
        for model, right in ((tiny, expected[0]), (other, expected[1]), (tiny, expected[0]), (other, expected[1])):
            time.sleep(3)  # until the scheduler is idle, else it ends
            engine.release_memory_occupation(["kv_cache"])  # which is kept on a CPU
            engine.resume_memory_occupation(["kv_cache"])
            if len(accepted) < 3:
                assert engine.update_weights_from_disk(str(model))[0]
            else:  # as a trainer in this process
                engine.begin_weight_update()
                assert engine.update_weights_from_tensor([*load_file(model / "model.safetensors").items()])[0]
                engine.end_weight_update()
            assert ids(engine.generate(input_ids=IDS, sampling_params=GREEDY)) == right
            accepted.append(read_counts(counts)["accepted"])
    assert accepted[2] - accepted[1] > 2 * TOKENS > accepted[0] and accepted[3] - accepted[2] > 2 * TOKENS
