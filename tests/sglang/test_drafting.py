"""What a method is told of SGLang's requests, through prefill, decoding, retraction, abort and end."""

from __future__ import annotations

import functools
import logging
import tempfile
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from freedraft.config import PluginOptions
from freedraft.cost.controller import Fixed
from freedraft.cost.hardware import choose_profile
from freedraft.draft import DraftBatch
from freedraft.engines.sglang.accepted import AcceptedTokens
from freedraft.engines.sglang.drafting import Drafting
from freedraft.engines.sglang.requests import tenant_of
from freedraft.guarded_method import GuardedMethod
from freedraft.method import Method, MethodSpec
from freedraft.step import EngineContext
from freedraft.tenants import tenant_key

NODES = 6
VOCAB_SIZE = 100


@pytest.fixture(autouse=True, scope="module")
def scheduler_configuration():
    """What SGLang's scheduler publishes, and its batches read."""
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args(device="cpu", enable_custom_logit_processor=True):
        yield


class Recorder(Method):
    """Keeps what it is told, and drafts what the test says: numbers of nodes by request."""

    needs_prompt_states = True

    def __init__(self, options, context, controller=None):
        super().__init__(options, context, Fixed(choose_profile("cpu"), NODES - 1, context.widths), "recorder")
        self.log, self.steps, self.nodes = [], [], {}

    def begin(self, request_id, tokens, tenant, extra):
        self.log.append(("begin", request_id, tokens.tolist(), tenant, dict(extra)))

    def set_prompt_state(self, request_id, state):
        self.log.append(("state", request_id, state.tolist()))

    def finish(self, request_id, output, aborted):
        self.log.append(("finish", request_id, None if output is None else output.tolist(), aborted))

    def draft(self, step):
        self.steps.append(step)
        counts = [self.nodes.get(request_id, 1) for request_id in step.request_ids]
        if max(counts) < 0:
            raise RuntimeError("this drafter fails on purpose")
        draft = DraftBatch.empty(len(counts), max(counts))
        draft.parents[:], draft.depths[:] = np.arange(-1, max(counts) - 1), np.arange(max(counts))
        draft.counts[:] = counts
        draft.tokens[:, 1:] = 77
        return draft

    def take(self):
        log, self.log = self.log, []
        return log


def drafting(widths=(1, 2, 4, NODES), max_batch=4, method="Recorder", **given):
    spec = MethodSpec("recorder", f"{__name__}:{method}", PluginOptions)
    guarded = GuardedMethod(spec, None, EngineContext(widths=widths))
    seam = Drafting(guarded, widths, max_batch, AcceptedTokens(256, NODES), **given)
    return seam, seam.guarded.method


def request(rid, prompt, **given):
    """SGLang's Req, as its scheduler makes one from what a client sends; what is no field of it is for sampling."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    names = ("extra_key", "cache_salt", "lora_id", "custom_logit_processor")
    fields = {name: given.pop(name) for name in names if name in given}
    sampling = SamplingParams(**{"max_new_tokens": 1000} | given)
    sampling.normalize(None)
    sampling.verify(VOCAB_SIZE)
    return Req(rid, "", array("q", prompt), sampling, **fields)


@functools.cache
def model_config():
    """SGLang's ModelConfig of a Llama with this vocabulary."""
    import transformers
    from sglang.srt.configs.model_config import ModelConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.LlamaConfig(vocab_size=VOCAB_SIZE, architectures=["LlamaForCausalLM"], **sizes)
        config.save_pretrained(folder)
        return ModelConfig(folder)


def decoding_batch(gained, accepted):
    """SGLang's ScheduleBatch before a decoding step, after one by which requests gained tokens: {request: tokens}.

    `prepare_for_extend` and `prepare_for_decode` take slots of the KV pool, which an engine has: what they set and a
    method is told of, the lengths, is set here.
    """
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    tokens = torch.zeros(len(gained), NODES, dtype=torch.int32)
    for row, new in enumerate(gained.values()):
        tokens[row, : len(new)] = torch.tensor(new)
    pool = ReqToTokenPool(size=len(gained), max_context_len=8, device="cpu", enable_memory_saver=False)
    batch = ScheduleBatch.init_new(list(gained), pool, None, None, model_config(), True, SpeculativeAlgorithm.NONE)
    batch.forward_mode = ForwardMode.DECODE
    # The newest token is not in the KV cache.
    lengths = [len(r.origin_input_ids) + len(r.output_ids) + len(new) - 1 for r, new in gained.items()]
    batch.seq_lens = batch.seq_lens_cpu = torch.tensor(lengths)
    batch.req_pool_indices = batch.req_pool_indices_cpu = torch.arange(1, 1 + len(gained))
    counts = torch.tensor([len(new) for new in gained.values()], dtype=torch.int32)
    accepted.put(batch.req_pool_indices, tokens, counts, batch.seq_lens)
    # The scheduler's own is copied for each pass, which counts penalties.
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, VOCAB_SIZE).copy_for_forward()
    return batch


def step(drafting, gained, *, overlap=True):
    """A step after one by which requests gained tokens, {request: tokens}; without overlap SGLang knows them."""
    batch = decoding_batch(gained, drafting.accepted)
    if not overlap:
        read_result(gained)
    tree = drafting.draft(batch)
    drafting.note(batch, tree)
    if overlap:  # the result of a step is read while the next one runs
        read_result(gained)
    return tree


def read_result(gained):
    """What the scheduler does with the tokens of a step (BatchResultProcessor, which wants all of a scheduler)."""
    for request, new in gained.items():
        if not request.finished():
            request.output_ids.extend(new)
            request.update_finish_state(len(new))


def test_an_adapter_makes_another_tenant():
    """SGLang appends its id to the extra_key."""
    assert (
        request("a", [1], extra_key="x", lora_id="7f").extra_key
        == "x7f"
        == request("a", [1], extra_key="x7f").extra_key
    )
    for fields in ({}, {"cache_salt": "y"}, {"extra_key": "x"}, {"extra_key": "x", "cache_salt": "y"}):
        keys = fields.get("cache_salt"), fields.get("extra_key")
        assert tenant_of(request("a", [1], **fields)) == tenant_key(*keys)
        assert tenant_of(request("a", [1], lora_id="7f", **fields)) == tenant_key(*keys, "7f")


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
def test_a_step_says_what_requests_gained(overlap):
    seam, method = drafting()
    a = request("a", [1, 2, 3], extra_key="x", cache_salt="y", custom_params={"skip_set": "one"})
    b = request("b", [4, 5])
    seam.begin([a])
    seam.begin([a, b])  # a later chunk of a's prompt
    key = tenant_key("y", "x")
    assert method.take() == [("begin", "a", [1, 2, 3], key, {"skip_set": "one"}), ("begin", "b", [4, 5], None, {})]
    method.nodes = {"a": 4, "b": 2}
    tree = step(seam, {a: [7], b: [8]}, overlap=overlap)
    assert tree.tokens.shape == (2, 4) and tree.counts.tolist() == [4, 2]
    assert tree.tokens[:, 0].tolist() == [7, 8] and tree.parents[0].tolist() == [-1, 0, 1, 2]
    first = method.steps[-1]
    assert first.request_ids == ["a", "b"] and first.contexts.tolist() == [4, 3] and first.gained.tolist() == [1, 1]
    assert first.capacities.tolist() == [NODES - 1] * 2 and first.drafted.tolist() == [0, 0] and first.previous is None
    assert [first.history(row).tolist() for row in (0, 1)] == [[1, 2, 3, 7], [4, 5, 8]]
    step(seam, {b: [9, 10], a: [11, 12, 13]}, overlap=overlap)  # rows change places
    second = method.steps[-1]
    assert second.contexts.tolist() == [5, 7] and second.roots.tolist() == [10, 13]
    assert second.drafted.tolist() == [1, 3] and second.accepted.tolist() == [1, 2] and second.previous == (2, 8)
    assert [second.history(row).tolist() for row in (0, 1)] == [[4, 5, 8, 9, 10], [1, 2, 3, 7, 11, 12, 13]]
    c = request("c", [6])
    seam.interrupt()  # a prefill
    seam.begin([c])
    step(seam, {a: [14], c: [15]}, overlap=overlap)
    assert method.steps[-1].previous is None and method.steps[-1].drafted.tolist() == [3, 0]
    assert method.take() == [("begin", "c", [6], None, {})]


def test_retracted_requests_begin_anew_and_ids_may_come_again():
    seam, method = drafting()
    method.nodes = {"a": 3}
    a = request("a", [1, 2])
    seam.begin([a])
    step(seam, {a: [5]})
    step(seam, {a: [6, 7]})
    a.reset_for_retract()  # what the running step gains is lost
    method.take()
    seam.begin([a])
    assert method.take() == [("begin", "a", [1, 2, 5, 6, 7], None, {})]
    step(seam, {a: [9]})
    assert method.steps[-1].drafted.tolist() == [0] and method.steps[-1].history(0).tolist() == [1, 2, 5, 6, 7, 9]
    other = request("a", [8] * 5)  # as long as the one of that id when it began, which was aborted while it waited
    seam.begin([other])
    assert method.take() == [("begin", "a", [8] * 5, None, {})]


@pytest.mark.parametrize(
    ("parameters", "output"),
    [({"max_new_tokens": 3}, [5, 6, 7]), ({"stop_token_ids": [6]}, [5, 6]), ({}, [5, 6, 7, 8])],
    ids=["length", "stop", "abort"],
)
def test_the_end_of_a_request(parameters, output):
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    seam, method = drafting()
    a = request("a", [1, 2], **parameters)
    seam.begin([a])
    step(seam, {a: [5]})
    if not parameters:
        a.to_finish = FINISH_ABORT("the client went away")  # as the scheduler does; it ends with its next tokens
    step(seam, {a: [6, 7, 8]})
    assert a.finished()
    method.take()
    seam.finish("a")
    assert method.take() == [("finish", "a", output, not parameters)]
    seam.finish("never began")
    assert method.take() == [("finish", "never began", None, False)]
    assert not seam.guarded.running


def test_aborted_requests_do_not_pile_up_and_a_swept_one_keeps_its_tenant():
    """SGLang does not tell of requests that are aborted while they wait."""
    seam, method = drafting(max_batch=4)
    running = request("running", [1])
    seam.begin([running])
    waiting = [request(str(i), [1, 2], extra_key="t") for i in range(200)]
    for one in waiting:
        seam.begin([one])
        step(seam, {running: [5]})
    assert len(seam.guarded.running) <= 4 * 4 + 64 + 1 and "running" in seam.guarded.running
    assert ("finish", "0", None, True) in method.take()
    waiting[0].output_ids.extend([3, 4])
    step(seam, {waiting[0]: [6, 7]})
    assert method.take() == [("begin", "0", [1, 2, 3, 4], tenant_key(None, "t"), {})]
    assert method.steps[-1].history(0).tolist() == [1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize(
    ("sampling", "capacity"),
    [
        ({"frequency_penalty": 0.5}, 0),
        ({"presence_penalty": -0.5}, 0),
        ({"repetition_penalty": 1.5}, 0),
        ({"custom_params": {"token_ids": [1]}}, 0),
        ({"custom_params": {"freedraft": "off"}}, 0),
        ({"custom_params": {"freedraft": ["off"]}}, NODES - 1),
        ({"custom_params": ["freedraft"]}, NODES - 1),
        ({"logit_bias": {"3": 1.0}, "top_p": 0.5, "min_p": 0.1}, NODES - 1),
    ],
)
def test_no_drafts_where_tokens_of_the_step_count(sampling, capacity):
    """Penalties, for one: a tree has no one distribution; nor where the client wants none. Other requests of the batch
    have their drafts."""
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    if "token_ids" in sampling.get("custom_params", {}):
        sampling = sampling | {"custom_logit_processor": DisallowedTokensLogitsProcessor.to_str()}
    seam, method = drafting()
    method.nodes = {"a": 4, "b": 3}
    a, b = request("a", [1], **sampling), request("b", [2])
    seam.begin([a, b])
    tree = step(seam, {a: [5], b: [6]})
    assert method.steps[-1].capacities.tolist() == [capacity, NODES - 1]
    assert tree.counts.tolist() == [1 if capacity == 0 else 4, 3] and tree.tokens[:, 0].tolist() == [5, 6]


def test_trees_are_cut_to_chains_where_attention_verifies_no_others():
    seam, method = drafting(chains=True)
    a, b = request("a", [1]), request("b", [2])
    seam.begin([a, b])
    branched = DraftBatch.empty(2, 4)
    branched.parents[:] = [[-1, 0, 1, 0], [-1, 0, 0, 1]]
    branched.counts[:] = 4
    method.draft = lambda step: branched
    assert step(seam, {a: [5], b: [6]}).counts.tolist() == [3, 2]


@pytest.mark.parametrize(("nodes", "width"), [(1, 4), (-1, 4), (3, 4), (5, NODES)])
def test_widths_that_could_not_be_prepared(nodes, width):
    """What would be verified at one of them is, at the next larger one: also the roots that a failure leaves."""
    seam, method = drafting()
    seam.keep_widths((4, NODES))
    method.nodes = {"a": nodes}
    a = request("a", [1])
    seam.begin([a])
    tree = step(seam, {a: [5]})
    assert tree.tokens.shape == (1, width) and tree.counts.tolist() == [max(nodes, 1)] and tree.tokens[0, 0] == 5
    assert method.controller.widths.tolist() == [4, NODES]


def test_steps_of_a_rest_make_no_step_and_lose_no_token():
    """Neither of a request that ends in a rest nor of one that comes after it."""
    from sssd_plugin.method import SPEC
    from sssd_plugin.options import SssdOptions

    options = SssdOptions(live="off", policy="fixed")
    context = EngineContext(vocab_size=VOCAB_SIZE, max_draft_tokens=5, widths=(1, NODES), gives_logits=True)
    seam = Drafting(GuardedMethod(SPEC, options, context), context.widths, 4, AcceptedTokens(256, NODES))
    guarded, method = seam.guarded, seam.guarded.method
    taken, counted = [], guarded.metrics.tokens._value.get()
    update, method.update = method.update, lambda step: (taken.append(list(step.request_ids)), update(step))
    a, b, c = request("a", [1, 2]), request("b", [3]), request("c", [4])
    seam.begin([a, b])
    batches = [[a, b]] * 6 + [[b]] * 3 + [[b, c]] * 3
    for number, requests in enumerate(batches):
        if requests[-1] is c and number == 9:
            seam.interrupt()
            seam.begin([c])
        method.controller.rests = lambda number=number: number not in (0, 4)
        gained = {r: [10 + 3 * number + i] for i, r in enumerate(requests)}  # nothing to draft from
        tree = step(seam, gained)
        assert tree.counts.tolist() == [1] * len(requests)
        assert tree.tokens[:, 0].tolist() == [new for (new,) in gained.values()]
        assert guarded.needs_logits == (number in (0, 4, 6, 9)), "of other steps nobody drafts next"
        if number == 5:
            seam.finish("a")
    for row in (b, c):
        guarded._catch_up()
        known = method.drafter.tokens(row.rid).tolist()
        assert known == [*row.origin_input_ids, *row.output_ids]
    assert taken == [["a", "b"], ["a", "b"] * 3, ["a", "b"], ["a", "b"], ["b"], ["b"] * 2, ["b", "c"], ["b", "c"] * 2]
    assert guarded.metrics.tokens._value.get() - counted == sum(map(len, batches))


def test_nothing_is_counted_before_verification_is_launched():
    """But then all is, also of a request that ends."""
    seam, method = drafting()
    metrics = seam.guarded.metrics
    method.nodes = {"a": 4}
    a, b = request("a", [1, 2], stop_token_ids=[9]), request("b", [3])
    seam.begin([a, b])
    step(seam, {a: [5], b: [6]})
    counters = metrics.tokens, metrics.drafted, metrics.accepted
    before = [counter._value.get() for counter in counters]
    batch = decoding_batch({a: [7, 8, 9], b: [4]}, seam.accepted)
    seam.prepare(batch)
    tree = seam.draft(batch)
    assert [counter._value.get() for counter in counters] == before and len(method.steps) == 2
    seam.note(batch, tree)
    assert [counter._value.get() - was for counter, was in zip(counters, before, strict=True)] == [4, 3, 2]
    seam.note(batch, tree)
    assert metrics.tokens._value.get() - before[0] == 4, "counted twice"


def test_an_error_of_the_driver_in_a_step_is_the_engines(caplog, monkeypatch):
    """Raised as it is, without a line of ours before it: by the wait for a step's tokens, and by drafting. One that
    leaves the device as it was costs drafts."""
    monkeypatch.setattr(logging.getLogger("freedraft"), "propagate", True)
    fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def fail(error):
        raise error

    def drafted(error, waits):
        seam, made = drafting()
        a = request("a", [1])
        seam.begin([a])
        batch, made.draft = decoding_batch({a: [5]}, seam.accepted), lambda step: fail(error)
        if waits:
            copies = seam.accepted._copies
            rows, host, _ = copies.pop()
            copies.append((rows, host, SimpleNamespace(synchronize=functools.partial(fail, error))))
        with caplog.at_level(logging.INFO):
            return seam.draft(batch)

    for waits in (True, False):
        with pytest.raises(torch.AcceleratorError) as raised:
            drafted(fault, waits)
        assert raised.value is fault and not caplog.records
    tree = drafted(torch.OutOfMemoryError("CUDA out of memory"), False)
    assert tree.counts.tolist() == [1] and tree.tokens[:, 0].tolist() == [5]
    (record,) = caplog.records
    assert "the engine goes on without drafts" in record.getMessage()


def put(accepted, rows, first):
    """A step that stores tokens `first`, `first + 1` for each pool row."""
    ones = torch.ones(len(rows), dtype=torch.int32)
    tokens = torch.tensor([first, first + 1] + [0] * (NODES - 2), dtype=torch.int32)
    accepted.put(torch.tensor(rows), tokens.repeat(len(rows), 1), 2 * ones, ones)


def test_a_step_reads_the_newest_tokens_of_each_request_and_keeps_them():
    """Also those of a prefill some steps ago; a late thread keeps them after the next step."""
    accepted = AcceptedTokens(256, NODES)
    for rows, first in (([3, 250], 10), ([7], 20), ([3], 30)):
        put(accepted, rows, first)
    gained = accepted.read(np.array([250, 3, 7]))
    assert gained.tokens.reshape(3, -1)[:, 2:4].tolist() == [[10, 11], [30, 31], [20, 21]]
    put(accepted, [3, 250], 40)
    assert accepted.read(np.array([3])).tokens[2:4].tolist() == [40, 41]
    assert gained.tokens[gained.ends - 1].tolist() == [11, 31, 21] and gained.seq_lens.tolist() == [1, 1, 1]


def test_a_step_copies_its_own_rows_only():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
            made = operation(*arguments, **keywords or {})
            self.elements += made.numel() if isinstance(made, torch.Tensor) else 0
            return made

    accepted = AcceptedTokens(4096, NODES)
    with Counting() as counting:
        for first in range(50):  # of prefills, which nobody reads
            put(accepted, [5, 9], first)
    assert counting.elements < 50 * 200 and len(accepted._copies) == 1


def test_lengths_come_with_the_tokens():
    """What SGLang's relay sets of a step is what it sets by its own copy, without that copy."""
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    from freedraft.engines.sglang.algorithm import TreeAlgorithm

    seam, _ = drafting()
    batch = decoding_batch({request("a", [1, 2, 3]): [4, 5], request("b", [6]): [7]}, seam.accepted)
    lengths, pool = batch.seq_lens, ReqToTokenPool(size=8, max_context_len=8, device="cpu", enable_memory_saver=False)
    algorithm = TreeAlgorithm("sssd", None)
    algorithm.prepare = seam.prepare
    early = algorithm.create_future_map("cpu", pool)
    stock = FutureMap("cpu", algorithm, pool)
    for relay in (early, stock):
        relay.publish_ready = None
        relay.new_seq_lens_buf[batch.req_pool_indices] = lengths
        batch.spec_info = NgramVerifyInput(custom_mask=lengths, draft_token_num=NODES)
        batch.spec_info.future_indices = batch.req_pool_indices
        batch.seq_lens = batch.seq_lens_cpu = batch.seq_lens_sum = None
        relay.resolve_seq_lens_cpu(batch)
        assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == lengths.tolist()
        assert batch.seq_lens_sum == int(lengths.sum()) and relay.needs_cpu_seq_lens
    early.new_seq_lens_buf[:] = -1  # it is not copied to the host again
    batch.spec_info.future_indices, batch.seq_lens_cpu = batch.req_pool_indices, None
    early.resolve_seq_lens_cpu(batch)
    assert batch.seq_lens_cpu.tolist() == lengths.tolist()
