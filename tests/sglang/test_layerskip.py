"""Layer skip through a real engine: the same tokens as the model gives by itself, and no committed KV touched."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sglang.conftest import GREEDY, ids, read_counts
from tests.sglang.layerskip_tools import SETS, ask, checked_engine, logged, make_model, prompts
from tests.support.models import continuations


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """One engine for most of the tests: trees or chains, four skip sets, overlap scheduling."""
    folder = make_model(tmp_path_factory.mktemp("llama"), "Llama")
    changed = {"FREEDRAFT_LOOKAHEAD": "fixed", "FREEDRAFT_LENGTH": "3"}
    with checked_engine(folder, "empty weak mixed first", changed, speculative_num_draft_tokens=8) as engine:
        engine.expected = continuations(folder, prompts(), GREEDY["max_new_tokens"])
        yield engine
    assert read_counts(engine.counts)["finished"] > 0


@pytest.mark.parametrize("shape", ["chain", "nodes"])
def test_empty_skip_set_accepts_all(llama, shape):
    """The draft model is the model: whatever is wrong with a draft pass shows here. Passes as verifications of one node
    are those that CUDA graphs are captured of."""
    before = logged(llama)
    assert ids(ask(llama, prompts(), f"set0-{shape}")) == llama.expected
    assert ids([ask(llama, [p], "set0")[0] for p in prompts()[:4]]) == llama.expected[:4]
    log = logged(llama)
    drafted, accepted = (log[name] - before[name] for name in ("drafted by set 0", "accepted of set 0"))
    assert drafted == accepted > 200


@pytest.mark.parametrize("shape", ["tree", "chain"])
@pytest.mark.parametrize("batch", [1, 4])
def test_same_tokens(llama, shape, batch):
    before = logged(llama)
    given = prompts()
    for number in (1, 2, 3) if batch == 4 else (2,):
        got = []
        for start in range(0, len(given), batch):
            got += ids(ask(llama, given[start : start + batch], f"set{number}-{shape}"))
        assert got == llama.expected, f"skip set {number}"
    log = logged(llama)
    assert log["rounds"] > before["rounds"]
    assert (log["branches"] > before["branches"]) == (shape == "tree")
    if batch == 4:
        assert log["batch 4"] > before["batch 4"]
        share = log["accepted of set 1"] / log["drafted by set 1"]
        assert 0.3 < share < 1, "with the weak layers skipped, most drafts are right and some are wrong"


def test_four_skip_sets_in_a_batch(llama):
    """Chosen by the requests, by name; one that there is not means the first."""
    wanted = [*SETS, "unknown"]
    sampling = [{**GREEDY, "custom_params": {"skip_set": wanted[i % 5]}} for i in range(len(prompts()))]
    for word in ("choosing", "choosing-nodes"):
        assert ids(ask(llama, prompts(), word, sampling)) == llama.expected
    assert logged(llama)["sets in a batch"] == 4


def test_committed_kv_is_what_it_is_without_drafting(llama):
    """The same trees verified once after draft passes and once without any: the KV of all committed tokens is the same
    bit for bit, at every step."""
    for skip in ("set2-tree", "set1-chain"):
        hashes = []
        for word in (f"{skip}-as{skip[3]}", f"replay-as{skip[3]}"):
            # As soon as the engine is done with the last request, which it may be after the answer.
            flushed = llama.loop.run_until_complete(llama.tokenizer_manager.flush_cache(timeout_s=60))
            assert flushed.success, flushed.message
            (got,) = ask(llama, [prompts()[9]], word)
            assert got["output_ids"] == llama.expected[9]
            (kept,) = [of for name, of in logged(llama)["hashes"].items() if name.startswith(word)]
            hashes.append(kept)
        assert len(hashes[0]) > 10 and hashes[0] == hashes[1]


def test_other_architectures_are_refused():
    from freedraft.config import ConfigError
    from freedraft.engines.sglang.layers import check_structure

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
