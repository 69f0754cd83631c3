"""What a method is told of SGLang's requests, through prefill, decoding, retraction, abort and end."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from freedraft.config import PluginOptions
from freedraft.cost.hardware import choose_profile
from freedraft.cost.policies import Fixed
from freedraft.draft import DraftBatch
from freedraft.engines.sglang.drafting import Drafting
from freedraft.guarded_method import FIRST_PAUSE, GuardedMethod
from freedraft.method import EngineContext, Method, MethodSpec

pytestmark = pytest.mark.engine_free

NODES = 6


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


def drafting(widths=(1, 2, 4, NODES), max_batch=4):
    spec = MethodSpec("recorder", f"{__name__}:Recorder", PluginOptions)
    return Drafting(GuardedMethod(spec, None, EngineContext(widths=widths)), widths, max_batch)


class Request:
    extra_key = cache_salt = finished_len = finished_reason = None

    def __init__(self, rid, prompt, padded=None, **attributes):
        self.rid, self.output_ids = rid, []
        self.origin_input_ids_unpadded, self.origin_input_ids = list(prompt), list(padded or prompt)
        self.sampling_params = types.SimpleNamespace(custom_params=attributes.pop("custom_params", None))
        self.__dict__.update(attributes)

    def finished(self):
        return self.finished_reason is not None

    def end(self, kind="length"):
        self.finished_reason = types.SimpleNamespace(to_json=lambda: {"type": kind})


def step(drafting, gained, *, overlap=True, penalties=None):
    """A step after one by which requests gained tokens, {request: tokens}; without overlap SGLang knows them."""
    tokens = np.zeros((len(gained), NODES), np.int32)
    for row, new in enumerate(gained.values()):
        tokens[row, : len(new)] = new
    lengths = []
    for request, new in gained.items():
        if not overlap:
            request.output_ids += new
        known = len(request.origin_input_ids) + len(request.output_ids) + (len(new) if overlap else 0)
        lengths.append(known - 1)  # in the KV cache
    sampling = types.SimpleNamespace(
        acc_additive_penalties=penalties,
        acc_scaling_penalties=None,
        has_custom_logit_processor=False,
        has_watermark_candidates=False,
    )
    batch = types.SimpleNamespace(
        reqs=list(gained),
        seq_lens_cpu=torch.tensor(lengths),
        sampling_info=sampling,
        spec_info=types.SimpleNamespace(
            accept_tokens=torch.from_numpy(tokens.reshape(-1)),
            accept_lens=torch.tensor([len(new) for new in gained.values()], dtype=torch.int32),
        ),
    )
    tree = drafting.draft(batch)
    if overlap:  # the result of a step is read while the next one runs
        for request, new in gained.items():
            request.output_ids += new
    return tree


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
def test_a_step_says_what_requests_gained(overlap):
    seam = drafting()
    method = seam.guarded.method
    a = Request("a", [1, 2, 3], extra_key="x", cache_salt="y", custom_params={"skip_set": "one"})
    b = Request("b", [4, 5])
    seam.begin([a])
    seam.begin([a, b])  # a later chunk of a's prompt
    assert method.take() == [("begin", "a", [1, 2, 3], "x\ny", {"skip_set": "one"}), ("begin", "b", [4, 5], None, {})]
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
    c = Request("c", [6])
    seam.interrupt()  # a prefill
    seam.begin([c])
    step(seam, {a: [14], c: [15]}, overlap=overlap)
    assert method.steps[-1].previous is None and method.steps[-1].drafted.tolist() == [3, 0]
    assert method.take() == [("begin", "c", [6], None, {})]


def test_retracted_requests_begin_anew_and_ids_may_come_again():
    seam = drafting()
    method = seam.guarded.method
    method.nodes = {"a": 3}
    a = Request("a", [1, 2])
    seam.begin([a])
    step(seam, {a: [5]})
    step(seam, {a: [6, 7]})
    a.output_ids = [5, 6]  # it is retracted, and what its last step gained is lost
    method.take()
    seam.begin([a])
    assert method.take() == [("begin", "a", [1, 2, 5, 6], None, {})]
    step(seam, {a: [9]})
    assert method.steps[-1].drafted.tolist() == [0] and method.steps[-1].history(0).tolist() == [1, 2, 5, 6, 9]
    other = Request("a", [8, 8, 8, 8, 8])  # as long as the one of that id, which was aborted while it waited
    seam.begin([other])
    assert method.take() == [("begin", "a", [8, 8, 8, 8, 8], None, {})]


def test_the_end_of_a_request():
    seam = drafting()
    method = seam.guarded.method
    for name, kind in (("a", "length"), ("b", "abort")):
        request = Request(name, [1, 2])
        seam.begin([request])
        step(seam, {request: [5]})
        step(seam, {request: [6, 7, 8]})
        request.finished_len = 3
        request.end(kind)
        method.take()
        seam.finish(name)
        assert method.take() == [("finish", name, [5, 6, 7], kind == "abort")]
    seam.finish("never began")
    assert method.take() == [("finish", "never began", None, False)]
    assert not seam.guarded.running


def test_a_request_that_runs_after_its_end_is_not_kept():
    """With a grammar SGLang runs a request once more after its end."""
    seam = drafting()
    method = seam.guarded.method
    a, b = Request("a", [1, 2]), Request("b", [3])
    seam.begin([a, b])
    step(seam, {a: [5], b: [6]})
    a.end("stop")
    seam.finish("a")
    method.take()
    tree = step(seam, {a: [7], b: [8]})
    assert tree.tokens[:, 0].tolist() == [7, 8] and method.steps[-1].request_ids == ["a", "b"]
    assert method.take() == [("finish", "a", [], False)]
    assert seam.guarded.running == {"b"}


def test_aborted_requests_do_not_pile_up_and_a_swept_one_keeps_its_tenant():
    """SGLang does not tell of requests that are aborted while they wait."""
    seam = drafting(max_batch=4)
    method = seam.guarded.method
    running = Request("running", [1])
    seam.begin([running])
    waiting = [Request(str(i), [1, 2], extra_key="t") for i in range(200)]
    for request in waiting:
        seam.begin([request])
        step(seam, {running: [5]})
    assert len(seam.guarded.running) <= 4 * 4 + 64 + 1 and "running" in seam.guarded.running
    assert ("finish", "0", None, True) in method.take()
    waiting[0].output_ids = [3, 4]
    step(seam, {waiting[0]: [6, 7]})
    assert method.take() == [("begin", "0", [1, 2, 3, 4], "t", {})]
    assert method.steps[-1].history(0).tolist() == [1, 2, 3, 4, 6, 7]


def test_image_padding_is_not_counted():
    seam = drafting()
    a = Request("a", [1, 2], padded=[10**9] * 6)
    seam.begin([a])
    step(seam, {a: [3]})
    step(seam, {a: [4, 5]})
    last = seam.guarded.method.steps[-1]
    assert last.contexts.tolist() == [5] and last.history(0).tolist() == [1, 2, 3, 4, 5]


def test_prompt_states_come_before_the_first_step():
    seam = drafting()
    method = seam.guarded.method
    a, b = Request("a", [1, 2]), Request("b", [3])
    b.output_ids = [4]  # it was retracted: the state is not that of its prompt
    seam.begin([a, b])
    seam.take_states([a, b], torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16))
    seam.take_states([a], torch.tensor([[5.0, 6.0]], dtype=torch.bfloat16))  # a later chunk of the prompt
    method.take()
    step(seam, {a: [5], b: [6]})
    step(seam, {a: [5], b: [6]})
    assert method.take() == [("state", "a", [5.0, 6.0])]


def test_no_drafts_where_tokens_of_the_step_count():
    """Penalties: a tree has no one distribution."""
    seam = drafting()
    seam.guarded.method.nodes = {"a": 4}
    a = Request("a", [1])
    seam.begin([a])
    tree = step(seam, {a: [5]}, penalties=torch.zeros(1))
    assert seam.guarded.method.steps[-1].capacities.tolist() == [0]
    assert tree.tokens.tolist() == [[5]] and tree.counts.tolist() == [1]


@pytest.mark.parametrize(("nodes", "width"), [(1, 1), (2, 2), (3, 4), (5, 6), (9, 6)])
def test_the_smallest_prepared_width(nodes, width):
    seam = drafting()
    seam.guarded.method.nodes = {"a": nodes}
    a = Request("a", [1])
    seam.begin([a])
    tree = step(seam, {a: [5]})
    assert tree.tokens.shape == (1, width) and tree.counts.tolist() == [min(nodes, NODES)]


def test_one_width_for_all():
    """Some backends fix the width when they are built."""
    seam = drafting(widths=(NODES,))
    a = Request("a", [1])
    seam.begin([a])
    tree = step(seam, {a: [5]})
    assert tree.tokens.shape == (1, NODES) and tree.counts.tolist() == [1]


def test_failures_leave_the_roots():
    """What raises, and what returns something that is no draft of this step."""
    seam = drafting()
    method = seam.guarded.method
    a, b = Request("a", [1]), Request("b", [2])
    seam.begin([a, b])
    method.nodes = {"a": -1, "b": -1}
    assert step(seam, {a: [5], b: [6]}).tokens.tolist() == [[5], [6]]
    for _ in range(FIRST_PAUSE):
        assert step(seam, {a: [5], b: [6]}).counts.tolist() == [1, 1]
    assert len(method.steps) == 1, "not asked during the pause"
    method.nodes = {"a": 2, "b": 2}
    assert step(seam, {a: [7], b: [8]}).counts.tolist() == [2, 2]
    assert method.steps[-1].history(0)[-1] == 7 and len(method.steps[-1].history(0)) == 3 + FIRST_PAUSE
    method.draft = lambda step: DraftBatch.empty(5, 3)
    before = method.metrics.failures._value.get()
    assert step(seam, {a: [7], b: [8]}).tokens.tolist() == [[7], [8]]
    assert method.metrics.failures._value.get() == before + 1
