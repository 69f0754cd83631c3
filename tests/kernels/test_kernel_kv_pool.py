"""Compaction of accepted paths, against plain Python."""

import numpy as np
import torch
from freedraft_kernels import KVPool, Verification
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import EXAMPLES, by_each


def accepted_paths(rng: np.random.Generator, batch: int, nodes: int, width: int) -> Verification:
    """Rising node indices from 0, of every length from none to `width`."""
    accepted = torch.full((batch, width), -1, dtype=torch.int32)
    lengths = torch.zeros(batch, dtype=torch.int32)
    for b in range(batch):
        lengths[b] = length = int(rng.integers(0, width + 1))
        if length:
            path = [0, *sorted(rng.choice(np.arange(1, nodes), length - 1, replace=False).tolist())]
            accepted[b, :length] = torch.tensor(path, dtype=torch.int32)
    return Verification(accepted, lengths, torch.empty(0))


def paged_slots(rng: np.random.Generator, batch: int, nodes: int, page_size: int) -> tuple[torch.Tensor, int]:
    """Windows that start anywhere in a page and go on in another one anywhere: int64 [B, N], and the pool's slots."""
    per_request = -(-(nodes + page_size - 1) // page_size)
    pages = rng.permutation(batch * per_request + 3)[: batch * per_request].reshape(batch, per_request)
    position = rng.integers(0, page_size, (batch, 1)) + np.arange(nodes)
    slots = pages[np.arange(batch)[:, None], position // page_size] * page_size + position % page_size
    return torch.from_numpy(slots), (batch * per_request + 3) * page_size


def random_buffers(rng: np.random.Generator, slots: int, heads: int, dim: int) -> list[torch.Tensor]:
    """Float, half, byte and 3-byte rows, and K and V interleaved in one tensor (rows apart from each other)."""
    both = torch.from_numpy(rng.normal(size=(slots, 2, heads, dim))).float()
    return [
        torch.from_numpy(rng.normal(size=(slots, heads, dim))).float(),
        torch.from_numpy(rng.normal(size=(slots, heads, dim))).bfloat16(),
        torch.from_numpy(rng.integers(-128, 128, (slots, heads, dim))).to(torch.int8),
        torch.from_numpy(rng.integers(-128, 128, (slots, 3))).to(torch.int8),
        torch.from_numpy(rng.normal(size=(slots, heads, dim))).float().to(torch.float8_e4m3fn),
        both[:, 0],
        both[:, 1],
    ]


def expected(buffer: torch.Tensor, slots: torch.Tensor, verification: Verification) -> torch.Tensor:
    buffer = buffer.float()
    result = buffer.clone()
    for b, length in enumerate(verification.lengths.tolist()):
        for step in range(length):
            result[slots[b, step]] = buffer[slots[b, verification.accepted[b, step]]]
    return result


@by_each
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 12), st.sampled_from([1, 4, 16]))
def test_compaction(backend: str, device: str, seed: int, batch: int, nodes: int, page_size: int) -> None:
    rng = np.random.default_rng(seed)
    slots, total = paged_slots(rng, batch, nodes, page_size)
    paths = accepted_paths(rng, batch, nodes, int(rng.integers(1, nodes + 1)))
    buffers = random_buffers(rng, total, 2, 4)
    if seed % 4 == 0:  # rows that several Triton programs share
        buffers.append(torch.from_numpy(rng.normal(size=(total, 5, 130))).half())
    wanted = [expected(b, slots, paths) for b in buffers]
    buffers = [b.to(device) for b in buffers]
    paths = Verification(paths.accepted.to(device), paths.lengths.to(device), paths.tokens)
    KVPool(buffers).compact((slots.int() if seed % 2 else slots).to(device), paths, backend=backend)
    for buffer, want in zip(buffers, wanted, strict=True):
        assert torch.equal(buffer.float().cpu(), want)
