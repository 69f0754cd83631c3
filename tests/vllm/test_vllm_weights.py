"""New weights in a running engine, as between the epochs of reinforcement learning."""

import pytest
from safetensors.torch import load_file
from vllm_cases import TINY, parameters, token_prompts
from vllm_engines import engine, runner_of, settle, spied

from tests.support import prompts
from tests.support.models import continuations, save
from tests.support.models import tiny_model as make_tiny

TOKENS, IDS = 30, prompts.random_ids([12] * 4, 24, first=2, seed=5)
pytestmark = pytest.mark.extended


def test_answers_are_of_the_new_weights_and_what_was_learnt_stays(tiny_model, tmp_path):
    asked = parameters(TOKENS, ignore_eos=True, detokenize=False)
    other = save(make_tiny(seed=8, **TINY), tmp_path / "other")
    expected = [continuations(model, IDS, TOKENS) for model in (tiny_model, other)]
    assert expected[0] != expected[1]
    settings = {"skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 256}
    accepted = []
    with engine(tiny_model, speculative_config={"method": "sssd", "policy": "fixed"}, **settings) as llm:
        models = [(tiny_model, expected[0]), (other, expected[1])] * 2
        for model, right in models:
            llm.sleep(level=2)  # memory is kept on a CPU
            llm.wake_up(tags=["weights"])
            if len(accepted) < 3:
                llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
            else:  # as a trainer that sends tensors
                llm.collective_rpc("reload_weights", args=([*load_file(model / "model.safetensors").items()],))
            llm.wake_up(tags=["kv_cache"])
            llm.reset_prefix_cache()
            accepted.append(0)

            def count(step, _):
                accepted[-1] += int(step.accepted.sum())

            with spied(runner_of(llm).drafter, count):
                outputs = llm.generate(token_prompts(IDS), asked, use_tqdm=False)
                settle(llm)
            assert [list(output.outputs[0].token_ids) for output in outputs] == right
    assert min(accepted[2:]) > 3 * TOKENS > accepted[0]
