"""Tokens and drafts of vLLM's running requests, by slot of model runner V2. `GainedTokens`: a step's accepted tokens on
their way to the host; `Requests`: the tokens there; `write_drafts`: drafts on their way to the device."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from freedraft_kernels.device.newest_tokens import newest_tokens
from numpy.typing import NDArray

from freedraft.compiled import compiled
from freedraft.draft import DraftBatch
from freedraft.engines.vllm.outputs import drafted_up_to, trimmed_output


def shared(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of the host, as the host and as the device have it."""
    if device.type == "cpu":
        return (memory := torch.zeros(shape, dtype=dtype)), memory
    from vllm.v1.worker.gpu.buffer_utils import UvaBuffer

    buffer = UvaBuffer(shape, dtype)
    return buffer.cpu, buffer.uva()


class GainedTokens:
    """Accepted tokens of a step. B requests, K = most draft tokens of a request. request_ids: B ids; slots,
    generations: int64 [B], see `Requests`; query_tokens: of the step; 0 if it did more than decode; taken: whether
    `Requests` have its tokens."""

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        host, self._device = shared((slots, length + 4), torch.int32, device)
        self._array = host.numpy()
        self._event: Any = None
        self._near: Any = None  # shortly before the tokens: a thread that waits sleeps until it, and not from there on
        if device.type == "cuda":
            self._near, self._event = torch.cuda.Event(blocking=True), torch.cuda.Event(enable_timing=True)
        elif device.type != "cpu":
            self._event = torch.Event(device, enable_timing=True)
        self._ended = 0.0
        self.request_ids: list[str] = []
        self.slots, self.generations = np.zeros(0, np.intp), np.zeros(0, np.int64)
        self.query_tokens, self.number = 0, -1
        self.taken, self._arrived = True, False

    def approach(self) -> None:
        """The model has been launched; its tokens are drawn next."""
        if self._near is not None:
            self._near.record()

    def copy(
        self, input_batch: Any, counts: tuple[torch.Tensor, torch.Tensor], states: Any,
        generations: NDArray[np.int64], number: int, drafts: torch.Tensor,
    ) -> None:  # fmt: skip
        """Start the copy, queued after the step's own work. counts: int32 [B] each, new tokens of each request, and its
        rejected ones; states: vLLM's RequestState; generations: int64 [slots]; drafts: int64 [B, K], filled with each
        request's newest token."""
        batch = input_batch.num_reqs
        self.slots, self.number = input_batch.idx_mapping_np[:batch].astype(np.intp), number
        self.generations = generations[self.slots]
        self.request_ids = list(input_batch.req_ids)
        self.query_tokens = 0 if input_batch.has_prefill else int(input_batch.num_tokens)
        packed, slots = self._device[:batch], input_batch.idx_mapping[:batch]
        gained, rejected = (of_each[:batch] for of_each in counts)
        newest_tokens(states.all_token_ids.gpu, states.total_len.gpu, slots, gained, rejected, packed, drafts)
        if self._event is not None:
            self._event.record()
        else:
            self._ended = time.perf_counter()
        self._arrived = False

    def wait(self) -> NDArray[np.int32]:
        """int32 [B, K + 4]: number of new tokens of each request, of its draft tokens that were verified, of all its
        tokens, and its newest K + 1."""
        if self._event is not None and not self._arrived:
            if self._near is not None:
                self._near.synchronize()
            self._event.synchronize()
        self._arrived = True
        return self._array[: len(self.slots)]

    def seconds_since(self, other: GainedTokens) -> float:
        """Seconds on the device from the end of another step to the end of this one; both must be finished."""
        if self._event is None or other._event is None:
            return self._ended - other._ended
        return 1e-3 * float(other._event.elapsed_time(self._event))


class Left(NamedTuple):
    """A request that has left its slot. output: its output tokens; parameters: vLLM's SamplingParams."""

    slot: int
    generation: int
    length: int
    output: list[int]
    parameters: Any


class Taken(NamedTuple):
    """R requests with new tokens. starts, ends: int64 [R], of these tokens in `Requests.tokens`, flat; rows: int32 [R],
    of the step; contexts, capacities, drafted: int32 [R], as in `Step`."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    rows: NDArray[np.int32]
    contexts: NDArray[np.int32]
    capacities: NDArray[np.int32]
    drafted: NDArray[np.int32]


_FIELDS = "length", "generation", "limit", "verified", "drafted", "drafted_behind", "root"
_SLOT = np.dtype([(name, "i8") for name in _FIELDS])


@compiled
def _set_verified(step, following, state, most, all_verify):
    slots, generations = step
    state["verified"][:] = most if all_verify else 0
    for i in range(len(following[0])):
        state[following[0][i]].verified = min(most, following[1][i])
    for b in range(len(slots)):
        one = state[slots[b]]  # a step without new tokens is followed by no drafts
        if one.verified > 0 and one.generation == generations[b] and one.limit > one.length + 2:
            return True
    return False


@compiled
def _append(step, tokens, state, trees, most, out):
    slots, generations, gained = step
    (starts, ends), (rows, contexts, capacities, before) = out
    n, width = 0, gained.shape[1]
    for b in range(len(slots)):
        slot, count, length = slots[b], gained[b, 0], gained[b, 2]
        one = state[slot]
        if count > 0 and one.length == length - count and one.generation == generations[b]:
            for i in range(count):
                tokens[slot, length - count + i] = gained[b, width - count + i]
            one.length, ends[n] = length, np.int64(slot) * tokens.shape[1] + length
            rows[n], starts[n], contexts[n] = b, ends[n] - count, length
            verified = min(one.verified, most)
            room = min(verified, one.limit - 1 - length)  # as `freedraft.step.room`
            if room > 0 and trees[slot]:
                room = min(verified, tokens.shape[1] - 1 - length)
            capacities[n], before[n] = max(room, 0), min(one.drafted, gained[b, 1])
            one.drafted = 0
            n += 1
    return n


class Requests:
    """Tokens by slot, and slots by id. A step's new tokens belong to the generations of its slots at launch: if a slot
    has been reassigned since, they are dropped.

    Args:
        slots: number of slots; max_model_len: most tokens of a request; length: K, most draft tokens of one; trees:
            bool [slots], `Step.trees` by slot; None: nowhere.

    Attributes:
        tokens: int32 [slots, max_model_len]. state: one record per slot, whose fields are the arrays below, and
            `verified`: draft tokens that the request verifies next.
        lengths: int64 [slots], tokens held of each request; -1 for a free slot.
        generations: int64 [slots], number of requests that have left each slot.
        limits: int64 [slots], maximum total tokens of each request.
        drafted: int64 [slots], our draft tokens that each request's next step verifies.
        drafted_behind: int64 [slots], number of the step after which these were drafted, -1 for none.
        roots: int64 [slots], the token that they follow; parents: int32 [slots, K + 1], as in `DraftBatch`.
        slots: the slot of each request that has one, by id.
        ended: finished requests, by id, for which a step may still return tokens.
    """

    def __init__(
        self, slots: int, max_model_len: int, length: int, tokenizer: Any = None, trees: NDArray[np.bool_] | None = None
    ) -> None:
        self.tokens: NDArray[np.int32] = np.empty((slots, max_model_len), np.int32)  # memory is used as it fills
        self.state: NDArray[Any] = np.zeros(slots, _SLOT)
        state, self._prompts = self.state, np.zeros(slots, np.int64)
        self.lengths, self.generations, self.limits = state["length"], state["generation"], state["limit"]
        self.drafted, self.drafted_behind, self.roots = state["drafted"], state["drafted_behind"], state["root"]
        self.lengths[:] = self.drafted_behind[:] = -1
        self.parents = np.zeros((slots, length + 1), np.int32)
        self.trees = np.zeros(slots, np.bool_) if trees is None else trees
        self._none = np.zeros(0, np.intp), np.zeros(0, np.int32)
        self.slots: dict[str, int] = {}
        self._tokenizer = tokenizer  # see `trimmed_output`
        self._parameters: list[Any] = [None] * slots
        self._preempted: dict[str, Left] = {}
        self.ended: dict[str, Left] = {}

    def add(self, request_id: str, slot: int, tokens: list[int], prompt: int, parameters: Any) -> NDArray[np.int32]:
        """Add a request with its tokens so far: its prompt, and output before a preemption. prompt: length of the
        prompt; parameters: vLLM's SamplingParams, which limit its output. Returns int32 [n], a view of the tokens."""
        self._preempted.pop(request_id, None)
        self.slots[request_id] = slot
        self.tokens[slot, : len(tokens)] = tokens
        self.lengths[slot], self.drafted[slot], self.drafted_behind[slot] = len(tokens), 0, -1
        self._prompts[slot], self._parameters[slot] = prompt, parameters
        self.limits[slot] = min(self.tokens.shape[1], drafted_up_to(parameters, prompt))
        return self.tokens[slot, : len(tokens)]

    def set_verified(self, gained: GainedTokens, most: int, batch: Any) -> bool:
        """Set how many draft tokens each request may verify next, at most `most`: all of them without an InputBatch
        `batch`, otherwise what it verifies. Whether any request of the newest step may have drafts."""
        following, counts = self._none, None if batch is None else batch.num_draft_tokens_per_req
        if counts is not None:
            following = batch.idx_mapping_np[: batch.num_reqs], counts[: batch.num_reqs]
        return bool(_set_verified((gained.slots, gained.generations), following, self.state, most, batch is None))

    def append(self, gained: GainedTokens, most: int) -> Taken:
        """Append a step's new tokens, for requests that are still in their slot and miss no earlier ones. most: draft
        tokens that each may verify next, of those that `set_verified` has set."""
        slots, generations, known = gained.slots, gained.generations, gained.wait()
        places, found = np.empty((2, len(slots)), np.int64), np.empty((4, len(slots)), np.int32)
        n = _append((slots, generations, known), self.tokens, self.state, self.trees, most, (places, found))
        for left in self.ended.values():
            for row in np.flatnonzero((slots == left.slot) & (generations == left.generation)).tolist():
                count, length = known[row, 0], known[row, 2]
                if left.length == length - count:
                    left.output.extend(known[row, known.shape[1] - count :].tolist())
        return Taken(*places[:, :n], *found[:, :n])

    def preempt(self, request_id: str) -> None:
        """Release the slot of a preempted request."""
        if (left := self._leave(request_id)) is not None:
            self._preempted[request_id] = left

    def finish(self, request_id: str) -> None:
        """Release the slot of a finished request; see `take_ended`."""
        if (left := self._preempted.pop(request_id, None) or self._leave(request_id)) is not None:
            self.ended[request_id] = left

    def take_ended(self, request_id: str) -> NDArray[np.int32]:
        """Remove a finished request; int32 [n], its output without tokens that steps accepted beyond its end."""
        left = self.ended.pop(request_id)
        return trimmed_output(left.parameters, left.output, self._tokenizer)

    def _leave(self, request_id: str) -> Left | None:
        if (slot := self.slots.pop(request_id, None)) is None:
            return None
        length, generation = int(self.lengths[slot]), int(self.generations[slot])
        output = self.tokens[slot, self._prompts[slot] : length].tolist()
        self.lengths[slot] = -1
        self.generations[slot] += 1
        return Left(slot, generation, length, output, self._parameters[slot])


def write_drafts(
    draft: DraftBatch | None, taken: Taken, gained: GainedTokens, requests: Requests, proposed: NDArray[np.int64],
    number: int,
) -> NDArray[np.int32]:  # fmt: skip
    """Write drafts after a step into `proposed`, and what was drafted into `requests`; return int32 [R], draft tokens
    of each of the R requests of `taken`.

    Args:
        draft: of R requests, or None.
        proposed: int64 [slots, 1 or 2, K], out: tokens, and masks (`NodeMasks`) if there may be trees; without a draft
            token, a request's newest one and 0.
        number: of the step, for `Requests.drafted_behind`.
    """
    counts, draft = np.zeros(len(taken.rows), np.int32), draft or DraftBatch.empty(0, 1)
    _write(
        (draft.tokens, draft.parents, draft.counts),
        (taken.rows, gained.wait(), gained.slots),
        (requests.state, requests.trees, requests.parents),
        (proposed, counts),
        number,
    )
    return counts


@compiled
def _write(draft, taken, of_slots, out, number):
    tokens, parents, nodes = draft
    rows, gained, slots = taken
    state, trees, all_parents = of_slots
    (all_tokens, all_masks), counts = (out[0][:, 0], out[0][:, -1]), out[1]
    for row, slot in enumerate(slots):
        all_masks[slot] = 0  # without trees, these are the tokens
        all_tokens[slot] = gained[row, -1]
    for b in range(len(rows)):
        row = rows[b]
        slot = slots[row]
        proposed, masks = all_tokens[slot], all_masks[slot]
        counts[b] = state[slot].drafted = max(0, nodes[b] - 1) if b < len(nodes) else 0
        for kept in range(counts[b]):
            parent = parents[b, kept + 1]
            proposed[kept], all_parents[slot, kept + 1] = tokens[b, kept + 1], parent
            if trees[slot]:
                above = masks[parent - 1] if parent > 0 else np.int64(0)
                masks[kept] = above | (np.int64(1) << np.int64(kept))
        state[slot].drafted_behind, state[slot].root, all_parents[slot, 0] = number, gained[row, -1], -1
