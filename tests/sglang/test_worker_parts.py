"""Pieces of the worker against slow, obvious versions: rows of `req_to_token` for windows, links of trees, candidates
of a pass; and models that are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freedraft.recipe import Window
from tests.support.random_trees import random_batch


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("attended", [None, 150])
def test_rows_hold_the_slots_that_a_window_leaves(page_size, attended):
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from freedraft.engines.sglang.draft_model import WindowRows

    pool = ReqToTokenPool(5, 300, "cpu", False)
    pool.req_to_token[1:] = torch.randperm(5 * 300).view(5, 300)
    before, window, drafts = pool.req_to_token.clone(), Window(20, 50), 6
    extra = WindowRows(pool, page_size)
    assert set(pool.free_slots).isdisjoint(extra.rows.tolist()) and len(extra.rows) == 5
    requests, roots = torch.tensor([3, 1, 5]), np.array([290, 45, 140])
    left_out = extra.write(requests, roots, window, drafts, attended)
    assert torch.equal(pool.req_to_token[: 5 + 1], before), "rows of requests stay as they are"
    for row, taken, root, out in zip(extra.rows, requests.tolist(), roots.tolist(), left_out.tolist(), strict=False):
        sinks = 0 if attended is not None and root + drafts > attended else window.sinks
        sink_end = -(-sinks // page_size) * page_size
        start = max(sink_end, (root + 1 - window.newest) // page_size * page_size)
        places = (
            [*range(min(sink_end, root + drafts)), *range(start, root + drafts)]
            if start > sink_end
            else [*range(root + drafts)]
        )
        assert len(places) == root + drafts - out
        assert pool.req_to_token[row, : len(places)].tolist() == before[taken, places].tolist()


def test_tree_links():
    from freedraft.engines.sglang.verify import tree_links

    rng = np.random.default_rng(1)
    for _ in range(30):
        tree = random_batch(rng, 3, 9, 50)
        child, sibling = tree_links(tree)
        for b in range(3):
            n = int(tree.counts[b])
            for i in range(9):
                below = [j for j in range(n) if tree.parents[b, j] == i and i < n]
                after = [j for j in range(i + 1, n) if i and tree.parents[b, j] == tree.parents[b, i]]
                assert child[b, i] == (below[0] if below else -1)
                assert sibling[b, i] == (after[0] if after and i < n else -1)


def test_other_architectures_are_refused():
    from freedraft.config import ConfigError
    from freedraft.engines.sglang.passes import check_structure

    def bare(cls, **attributes):
        made = cls.__new__(cls)
        made.__dict__.update(attributes)
        return made

    from sglang.srt.models import gemma2, llama, qwen2, qwen2_moe

    linear = type("Linear", (), {"input_scale": None})()
    norm = type("Norm", (), {"_quant_linear": linear})()

    def stack(layer=llama.LlamaDecoderLayer, mlp=llama.LlamaMLP):
        made = bare(layer, mlp=bare(mlp), input_layernorm=norm, post_attention_layernorm=norm)
        return bare(llama.LlamaForCausalLM, model=bare(llama.LlamaModel, layers=[made]))

    def refused(model, why):
        with pytest.raises(ConfigError, match=why):
            check_structure(model)

    check_structure(stack())
    check_structure(stack(mlp=qwen2.Qwen2MLP))
    for other in (gemma2.Gemma2ForCausalLM, qwen2_moe.Qwen2MoeForCausalLM):
        refused(bare(other, model=None), f"cannot skip layers of {other.__name__}")
    refused(stack(layer=gemma2.Gemma2DecoderLayer), "layers are of type Gemma2DecoderLayer")
    refused(stack(mlp=qwen2_moe.Qwen2MoeSparseMoeBlock), "MLPs are of type Qwen2MoeSparseMoeBlock")
    linear.input_scale = 1.0
    refused(stack(), "norms quantise")


def test_candidates_of_a_pass():
    """The best tokens, their probabilities and the entropy, against numpy."""
    import torch

    from freedraft.draft_model import PassOutputs
    from freedraft.engines.draft_round import most_likely, on_host

    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(1)) * 3
    p = torch.softmax(logits.double(), -1).numpy()
    for wanted in (1, 4, 10):
        outputs = PassOutputs(wanted, entropy=True)
        made = on_host(most_likely(logits, outputs), outputs)
        known = min(wanted, 7)
        order = np.argsort(-p, 1)[:, :known]
        assert made.tokens.shape == made.probabilities.shape == (3, wanted)
        assert (made.tokens[:, :known] == order).all()
        assert made.probabilities[:, :known] == pytest.approx(np.take_along_axis(p, order, 1), rel=1e-5)
        assert (made.probabilities[:, known:] == 0).all()
        assert made.entropy == pytest.approx(-(p * np.log(p)).sum(1), rel=1e-5)
    forbidden = logits.clone()
    forbidden[:, 2] = -torch.inf
    assert most_likely(forbidden, PassOutputs(1, entropy=True)).isfinite().all()
