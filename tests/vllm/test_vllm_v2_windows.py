"""Windowed drafts on model runner V2, which serves `layerskip` on GPUs: in Triton's interpreter, also with passes that
run as CUDA graphs do and are read back once per round."""

from __future__ import annotations

import pytest
from test_vllm_v2 import serve
from vllm_cases import TINY, greedy_case, token_prompts
from windowed_reference import Reference

from freedraft.recipe import Window
from tests.support.models import continuations, save, tiny_model
from tests.support.prompts import random_ids

PAGE, K, TOKENS = 16, 3, 24
WINDOW = Window(16, 24)


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_drafts_are_those_of_a_masked_reference(tmp_path, graphs):
    model = save(tiny_model("Llama", seed=11, num_hidden_layers=2, **TINY), tmp_path / "model")
    prompts = random_ids((90, 45, 70), TINY["vocab_size"])
    options = {"method": "layerskip", "num_speculative_tokens": K, "lookahead": "fixed"}
    noted = {"drafts": True, "graphs": graphs, "graph_sizes": [1, 2], "skip_tokenizer_init": True, "attention": "flash"}
    sizes = {"max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 64, "block_size": PAGE}
    options |= {"window": WINDOW.tokens, "sinks": WINDOW.sinks}
    cases = {"greedy": greedy_case(token_prompts(prompts), TOKENS)}
    found = serve(model, cases=cases, speculative_config=options, **noted, **sizes)
    assert found["greedy"] == continuations(model, prompts, TOKENS)
    engine = found["engine"]
    assert engine["v2"] and engine["async"] and not engine["failures"]
    drafts = [(tokens, drafted) for tokens, drafted in engine["drafts"] if drafted]
    assert min(len(tokens) for tokens, _ in drafts) > WINDOW.tokens, "nothing is left out of what is shorter"
    Reference(model, PAGE).judge(drafts, WINDOW)
    if graphs:  # passes for all three requests are larger than the largest graph
        assert 20 < sum(engine["replays"]) < sum(engine["reads"]) and max(engine["reads"]) == K
