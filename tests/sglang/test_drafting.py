"""What lies between SGLang's batches and a method: trees cut to what may be verified, who a request's tenant is, slots
of windows, candidates of a pass, draws, and models that are refused. The rest: real engines."""

import dataclasses
from array import array

import numpy as np
import pytest
import torch
from freedraft_kernels import TreeBatch, Verification, tree_inputs

from freedraft.config import ConfigError
from freedraft.draft import DraftBatch
from freedraft.draft_model import PassOutputs, Window
from freedraft.engines.draft_round import most_likely, on_host
from freedraft.engines.sglang.drafting import AcceptedTokens, BatchDrafting, Gained
from freedraft.engines.sglang.requests import tenant_of
from freedraft.guarded_method import GuardedMethod
from freedraft.step import EngineContext
from freedraft.tenants import tenant_key
from sssd_plugin.method import SPEC

NODES = 6


def request(**fields):
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Req("a", "", array("q", [1]), SamplingParams(), **fields)


def bare(cls, **attributes):
    """One of a class that cannot be built alone, with what is read here."""
    made = cls.__new__(cls)
    made.__dict__.update(attributes)
    return made


def batch_of(**fields):
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    return ScheduleBatch(**{"reqs": [], "device": "cpu"} | fields)


@pytest.fixture(scope="module")
def configured():
    """SGLang's own settings, at their defaults."""
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args():
        yield


def test_an_adapter_makes_another_tenant():
    """SGLang appends its id to the extra_key."""
    assert request(extra_key="x", lora_id="7f").extra_key == "x7f" == request(extra_key="x7f").extra_key
    for fields in ({}, {"cache_salt": "y"}, {"extra_key": "x"}, {"extra_key": "x", "cache_salt": "y"}):
        keys = fields.get("cache_salt"), fields.get("extra_key")
        assert tenant_of(request(**fields)) == tenant_key(*keys)
        assert tenant_of(request(lora_id="7f", **fields)) == tenant_key(*keys, "7f")


@pytest.mark.parametrize(
    ("nodes", "trees", "counts", "width"), [(4, False, [3, 3], 4), (4, True, [4, 4], 4), (5, True, [5, 5], NODES)]
)
def test_trees_are_cut_to_chains_and_verified_at_widths_that_could_be_prepared(nodes, trees, counts, width):
    context = EngineContext(vocab_size=100, max_draft_tokens=NODES - 1, widths=(1, 4, NODES))
    guarded = GuardedMethod(SPEC, SPEC.options.parse({"live": "off", "policy": "fixed"}), context)
    drafting = BatchDrafting(guarded, context.widths, 4, AcceptedTokens(256, NODES), trees=trees)
    drafting.keep_widths((4, NODES))
    assert guarded.method.controller.widths.tolist() == [4, NODES]
    branched, roots = DraftBatch.empty(2, nodes), np.array([7, 8], np.int32)
    branched.parents[:] = [[-1, 0, 1, 0, 3][:nodes], [-1, 0, 0, 1, 3][:nodes]]
    branched.counts[:] = nodes
    branched.limit(np.full(2, NODES, np.int32), np.full(2, trees))
    tree = drafting._padded(branched, roots)
    assert tree.counts.tolist() == counts and tree.tokens.shape == (2, width) and tree.tokens[:, 0].tolist() == [7, 8]
    none = drafting._padded(DraftBatch.roots(roots), roots)
    assert none.tokens.shape == (2, 4) and none.counts.tolist() == [1, 1]
    guarded.close()


@pytest.mark.parametrize("places", [5, 1])
def test_images_are_in_no_text(places):
    """SGLang puts hashes where images are; the drafter's text has the model's own mark, at one place or several."""
    mark, hashes, said = 96, [2**40 + i for i in range(5)], [11, 12, 13]
    prompt = [7, 8, *[mark] * places, *said, 9]
    asked = request(origin_input_ids_unpadded=array("q", prompt))
    asked.origin_input_ids = array("q", [7, 8, *hashes, *said, 9])
    asked.sampling_params.max_new_tokens = 20
    asked.output_ids.extend(said)
    context = EngineContext(vocab_size=100, max_draft_tokens=NODES - 1, widths=(1, NODES))
    guarded = GuardedMethod(SPEC, SPEC.options.parse({"live": "store", "policy": "fixed"}), context)
    drafting = BatchDrafting(guarded, context.widths, 4, AcceptedTokens(256, NODES), trees=True)
    drafting.begin([asked])
    drafter = guarded.method.drafter
    assert drafter.tokens("a").tolist() == prompt + said
    # The last of `said` is the newest token, which is not in the KV cache.
    gained = Gained(np.array(said[-1:], np.int32), np.array([0]), np.array([1]), np.array([len(hashes) + 2 + 4 + 2]))
    _, tracked, drafted = drafting._look_up([asked], ["a"])
    step = drafting._step(batch_of(reqs=[asked]), gained, tracked, drafted)
    assert step.contexts.tolist() == [len(prompt + said)] and step.history(0).tolist() == prompt + said
    assert (step.capacities >= NODES - 1).all() and tracked[0, 1] == 5 - places
    draft = guarded.step(step)
    assert draft.tokens[0, : draft.counts[0]].tolist()[:2] == [13, 9], "what followed the same words"
    assert draft.tokens.max() < 100
    guarded.close()


@pytest.mark.usefixtures("configured")
def test_positions_of_trees_go_on_from_those_of_images():
    """Three for each node: those of decoding, where a node is the newest token behind those above it."""
    from sglang.srt.managers.schedule_batch import MultimodalInputs
    from sglang.srt.model_executor import forward_batch_info as info
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    lengths, depths = torch.tensor([9, 20]), torch.tensor([0, 1, 1, 2])
    tree = TreeBatch.from_numpy(
        np.ones((2, 4), np.int32), np.array([[-1, 0, 0, 2]] * 2, np.int32), depths.int().expand(2, 4).numpy(),
        np.full(2, 4, np.int32), "cpu",
    )  # fmt: skip
    images = [MultimodalInputs([], mrope_position_delta=torch.tensor([[-5]])), None]
    runner, none = bare(ModelRunner, device="cpu"), torch.zeros(0)

    def forward(mode, seq_lens):
        return info.ForwardBatch(mode, 2, none, none, seq_lens, none, 0, seq_lens_cpu=seq_lens)

    inputs = tree_inputs(tree, lengths, int(lengths.sum()))
    asked = NgramVerifyInput(inputs.input_ids, inputs.mask, inputs.positions, draft_token_num=4)
    batch = batch_of(multimodal_inputs=images, spec_info=asked)
    verifying = forward(info.ForwardMode.TARGET_VERIFY, lengths)
    verifying.compute_spec_mrope_positions(runner, batch)
    assert verifying.mrope_positions.shape == (3, 8)
    for node, depth in enumerate(depths):
        decoding = forward(info.ForwardMode.DECODE, lengths + depth + 1)
        decoding._compute_mrope_positions_decode(runner, batch)
        assert torch.equal(verifying.mrope_positions.view(3, 2, 4)[:, :, node], decoding.mrope_positions)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("attended", [None, 150])
def test_rows_hold_the_slots_that_a_window_leaves(page_size, attended):
    """Of which pages these are, see test_draft_window.py."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from freedraft.engines.sglang.draft_model import WindowRows

    pool = ReqToTokenPool(5, 300, "cpu", False)
    pool.req_to_token[1:] = torch.randperm(5 * 300).view(5, 300)
    before, window, drafts = pool.req_to_token.clone(), Window(20, 50), 6
    extra = WindowRows(pool, page_size)
    assert set(pool.free_slots).isdisjoint(extra.rows.tolist()) and len(extra.rows) == 5
    requests, roots = [3, 1, 5], np.array([290, 45, 140])
    left_out = extra.write(torch.tensor(requests), roots, window, drafts, attended)
    assert torch.equal(pool.req_to_token[: 5 + 1], before), "rows of requests stay as they are"
    sinks, pages = window.pages(roots, page_size, attended=attended, max_draft_len=drafts)
    for b, (taken, root) in enumerate(zip(requests, roots.tolist(), strict=True)):
        first, gap = int(sinks[b]) * page_size, int(pages[b]) * page_size
        places = [at for at in range(root + drafts) if not first <= at < first + gap]
        assert len(places) == root + drafts - left_out[b] and left_out[b] == gap
        assert pool.req_to_token[extra.rows[b], : len(places)].tolist() == before[taken, places].tolist()


def test_candidates_of_a_pass():
    """The best tokens, their probabilities and the entropy, against numpy."""
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
    logits[:, 2] = -torch.inf  # forbidden
    assert most_likely(logits, PassOutputs(1, entropy=True)).isfinite().all()


@pytest.mark.usefixtures("configured")
def test_other_architectures_are_refused():
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models import gemma2, llama, qwen2, qwen2_moe

    from freedraft.engines.sglang.passes import check_structure

    def stack(layer=llama.LlamaDecoderLayer, mlp=llama.LlamaMLP, scales="dynamic"):
        quantised = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme=scales)
        norm = RMSNorm(16)
        norm.fuse_input_quant(ReplicatedLinear(16, 16, bias=False, quant_config=quantised))
        made = bare(layer, mlp=bare(mlp), input_layernorm=norm, post_attention_layernorm=norm)
        return bare(llama.LlamaForCausalLM, model=bare(llama.LlamaModel, layers=[made]))

    check_structure(stack())
    check_structure(stack(mlp=qwen2.Qwen2MLP))
    for model, why in (
        (bare(gemma2.Gemma2ForCausalLM, model=None), "cannot skip layers of Gemma2ForCausalLM"),
        (bare(qwen2_moe.Qwen2MoeForCausalLM, model=None), "cannot skip layers of Qwen2MoeForCausalLM"),
        (stack(layer=gemma2.Gemma2DecoderLayer), "layers are of type Gemma2DecoderLayer"),
        (stack(mlp=qwen2_moe.Qwen2MoeSparseMoeBlock), "MLPs are of type Qwen2MoeSparseMoeBlock"),
        (stack(scales="static"), "norms quantise"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_structure(model)


def test_logits_that_are_no_numbers(monkeypatch):
    """Where SGLang's sampler replaces them, verification does."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from freedraft.engines.sglang.verify import TreeVerifier

    one, few = torch.ones(1, 1), torch.ones(1)
    sampling = SamplingBatchInfo(one, few, few, few, True, True, False, False, False, vocab_size=4)
    batch, tree = batch_of(sampling_info=sampling), DraftBatch.roots(np.array([1], np.int32))
    verifier, logits = TreeVerifier.__new__(TreeVerifier), torch.tensor([[1.0, float("nan"), 3.0, 2.0]])
    for replaced, token in (("0", 1), ("1", 2)):
        monkeypatch.setenv("SGLANG_SANITIZE_NAN_LOGITS", replaced)
        verifier._process_logits(batch, logits, tree)
        assert verifier._targets(batch, tree, None, logits).tolist() == [token]


@pytest.mark.parametrize(("moves", "kept"), [(True, [0, 2, 2, 3]), (False, [0, 1, 2, 3])])
def test_chains_are_kept_where_they_are(moves, kept):
    """Some of SGLang's KV pools cannot move; those of attention that verifies chains alone need not."""
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from freedraft.engines.sglang.verify import TreeVerifier

    pool = MHATokenToKVPool(8, 1, torch.float32, 1, 2, 1, "cpu", False)
    verifier = TreeVerifier(4, None, "cpu", TokenToKVPoolAllocator(8, torch.float32, "cpu", pool, False), None)
    verifier.moves = moves
    for buffer in (pool.k_buffer[0], pool.v_buffer[0]):
        buffer[:] = torch.arange(len(buffer))[:, None, None]
    accepted = torch.tensor([[0, 2, -1, -1]], dtype=torch.int32)
    outcome = Verification(accepted, torch.tensor([2], dtype=torch.int32), accepted)
    verifier.keep(batch_of(out_cache_loc=torch.arange(4)), outcome, None)
    assert pool.k_buffer[0][:4, 0, 0].tolist() == pool.v_buffer[0][:4, 0, 0].tolist() == kept


@pytest.mark.usefixtures("configured")
def test_recurrent_layers_are_told_the_links_of_chains_too(monkeypatch):
    """Where only attention asks for chains, SGLang's graphs are those of trees, and read links."""
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from freedraft.engines.sglang.graphs import WidthGraphs
    from freedraft.engines.sglang.worker import TreeVerifyWorker

    draft, told = DraftBatch.empty(2, 3), []
    draft.parents[:], draft.depths[:], draft.counts[:] = [-1, 0, 1], [0, 1, 2], [3, 2]
    worker = bare(
        TreeVerifyWorker, device="cpu", _backend="flashinfer", _recurrent=True, _trees=False, _graphs=WidthGraphs(None),
        _draft=lambda batch: draft, _target_worker=bare(TpModelWorker),
    )  # fmt: skip

    def run(self, batch, **given):
        told.append(batch.spec_info)
        raise RuntimeError("there is no model")

    monkeypatch.setattr(TpModelWorker, "forward_batch_generation", run)
    rows, lengths = torch.tensor([1, 2]), torch.tensor([4, 5])
    pool = {"req_to_token_pool": ReqToTokenPool(2, 30, "cpu", False), "req_pool_indices": rows}
    with pytest.raises(RuntimeError, match="no model"):
        worker._decode(batch_of(seq_lens=lengths, seq_lens_cpu=lengths, **pool), None)
    assert told[0].retrieve_next_token.tolist() == [[1, 2, -1], [1, -1, -1]]
    assert (told[0].retrieve_next_sibling == -1).all()


# Fields of SGLang's results that ours leave at their defaults, and why.
LEFT_OUT = {
    "pipeline parallelism, disaggregation or diffusion, which are refused": """
        pp_hidden_states_proxy_tensors skipped_output_comm next_verify_chain next_verify_parent_list
        next_verify_top_scores_index spec_verify_out_cache_loc accept_index dllm_algo_state
        accept_length_per_req_cpu""",
    "the scheduler's, which fills them in": """
        num_correct_drafts num_correct_drafts_per_req_cpu num_block_accept_tokens num_cap_tokens copy_done
        future_indices auxiliary_host_output fpm_timing fpm_scheduled_requests
        extend_input_len_per_req extend_logprob_start_len_per_req grammar_advanced grammar_retained_tokens""",
    "a draft model's, or of other algorithms": """
        speculative_output_stride num_non_draft_tokens_per_req block_accept_lens cap_lens kv_loc_plan
        prepared_draft_extend_inputs extra_keep_alive_refs""",
    "sampling is done": "delay_sample_func",
    "refused: they stay with the nodes' slots": "routed_experts_output indexer_topk_output",
    "a metric of expert parallelism": "expert_distribution_metrics",
}


def test_results_have_every_field_that_sglang_reads():
    """A new one is set, or left out for a reason."""
    from sglang.srt.managers.utils import GenerationBatchResult

    from freedraft.engines.sglang.worker import TreeVerifyWorker

    worker, few = TreeVerifyWorker.__new__(TreeVerifyWorker), torch.ones(1)
    worker._drafting, worker.max_nodes = None, 1
    target = GenerationBatchResult(logits_output="logits", can_run_cuda_graph=True)
    result = worker._publish(batch_of(), target, few[:, None], few, few, None)
    given = {each.name for each in dataclasses.fields(result) if getattr(result, each.name) is not each.default}
    left_out = " ".join(LEFT_OUT.values()).split()
    assert sorted([*given, *left_out]) == sorted(each.name for each in dataclasses.fields(GenerationBatchResult))


def test_draws_are_those_of_sglangs_sampler(monkeypatch):
    """Without seeds and filters, for the same noise; and in parts, so that noise for a large batch takes no more memory
    than SGLang was told of."""
    from sglang.srt.layers.sampler import sampling_from_probs_torch

    from freedraft.engines.sglang import verify

    rows, vocab = 300, 1000
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    logits[:, ::7] = float("-inf")  # of a grammar
    temperatures, before = torch.linspace(0.2, 2, rows)[:, None], logits.clone()
    torch.manual_seed(1)
    tokens = verify.drawn(logits, temperatures)
    torch.manual_seed(1)
    expected = sampling_from_probs_torch(torch.softmax(logits / temperatures, -1))
    assert (tokens == expected).float().mean() > 0.99, "rounding may swap two tokens"
    assert torch.equal(logits, before) and len(set(tokens.tolist())) > 100
    monkeypatch.setattr(verify, "MAX_PROBABILITIES", 7 * vocab)
    tokens = verify.drawn(logits, torch.ones(rows, 1))
    assert tokens.shape == (rows,) and torch.isfinite(logits.gather(1, tokens[:, None])).all()
    assert torch.equal(verify.drawn(logits, torch.full((rows, 1), 1e-3)), logits.argmax(-1))
