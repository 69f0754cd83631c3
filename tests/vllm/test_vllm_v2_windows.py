"""Windowed drafts on model runner V2, which serves `layerskip` on GPUs: in Triton's interpreter, with passes that run
as CUDA graphs do, or without where there is none so large, and are read back once per round."""

from __future__ import annotations

from test_vllm_v2 import serve
from vllm_cases import TINY, greedy_case, token_prompts, two_skip_sets
from windowed_reference import Reference

from freedraft.recipe import Window
from tests.support.models import continuations, save, tiny_model
from tests.support.prompts import random_ids

PAGE, K, TOKENS = 16, 3, 24
WINDOW = Window(16, 24)


def test_drafts_are_those_of_a_masked_reference(tmp_path):
    """A replay computes with the tensors and the forward context of the capture, for each skip set."""
    model = save(tiny_model("Llama", seed=11, num_hidden_layers=2, **TINY), tmp_path / "model")
    ids = random_ids((90, 45, 70), TINY["vocab_size"])
    prompts, options = token_prompts(ids), two_skip_sets(model, tmp_path, window=WINDOW.tokens, sinks=WINDOW.sinks)
    noted = {"drafts": True, "graphs": True, "graph_sizes": [1, 2], "skip_tokenizer_init": True, "attention": "flash"}
    sizes = {"max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 64, "block_size": PAGE}
    cases = {"greedy": greedy_case(prompts, TOKENS, skip_set="empty")}
    cases["aborted"] = greedy_case(prompts[:2], TOKENS, skip_set="some", abort=5)
    found = serve(model, cases=cases, speculative_config=options, **noted, **sizes)
    expected = continuations(model, ids, TOKENS)
    assert found["greedy"] == expected and found["aborted"] == expected[:2]
    engine = found["engine"]
    assert engine["v2"] and engine["async"] and not engine["failures"]
    drafts = [(tokens, drafted) for tokens, drafted in engine["by case"]["greedy"]["drafts"] if drafted]
    assert min(len(tokens) for tokens, _ in drafts) > WINDOW.tokens, "nothing is left out of what is shorter"
    Reference(model, PAGE).judge(drafts, WINDOW)
    # Passes for all three requests are larger than the largest graph.
    assert len(engine["replays"]) == 2 and min(engine["replays"]) > 5
    assert 20 < sum(engine["replays"]) < sum(engine["reads"]) and engine["reads"].count(K) > len(engine["reads"]) / 2
