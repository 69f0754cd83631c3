"""Check and time every kernel of `freedraft_kernels` on the available device. Needs torch and triton only.

    python bench/kernels.py [--json OUT]

On a GPU: each Triton kernel against its torch reference if it has one (bitwise equal), and its time as a share of the
bandwidth of a device-to-device copy measured here, by the bytes that it must move. On a CPU the references are timed,
at tiny shapes; with TRITON_INTERPRET=1 the kernels are checked against them. Kernels without a reference are checked by
tests/kernels, on a GPU too.
"""

import argparse
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from freedraft_kernels import KVPool, TreeBatch, Verification, top_tokens, tree_inputs, verify
from freedraft_kernels.dispatch import Backend, has_triton, use_triton

from bench.lib.machine import timed
from bench.lib.results import write_json
from bench.lib.tables import table


class Shape(NamedTuple):
    batch: int
    nodes: int
    seq_len: int
    vocab: int
    layers: int
    heads: int  # KV heads
    dim: int


GPU_SHAPES = [Shape(b, n, 4096, 152_064, 32, 8, 128) for b, n in ((1, 32), (8, 16), (64, 8), (64, 32))]
GPU_SHAPES.append(Shape(4, 16, 64, 152_064, 32, 8, 128))  # few keys, so that one too many shows in the output
CPU_SHAPES = [Shape(2, 8, 300, 5000, 2, 2, 16)]
PAGE, QUERY_HEADS = 16, 4  # tokens; per KV head
TOLERANCE = {"top tokens": 2e-5}
"""Absolute, of floats summed in another order than in the reference; all else must be bitwise equal."""
COLUMNS = (
    "kernel={kernel} | batch x nodes={shape} | equal={equal!y} | bytes={bytes:,} | reference us={reference_us:.1f} | "
    "triton us={triton_us:.1f} | of a copy's bandwidth={share_of_copy:.0%}"
)
Run = Callable[[Backend], Any]
Operation = tuple[str, Run, int]
"""Name, function that runs it, and minimum number of bytes moved."""


def median_us(run: Callable[[], object], device: torch.device, repeats: int, graph: bool = False) -> float:
    """Return the median time of one call in us. On a GPU: device time between events, caches flushed before each call;
    with `graph`, in a CUDA graph, which excludes the host's launch time."""
    run()
    if device.type != "cuda":
        return 1e6 * statistics.median(timed(run)[1] for _ in range(repeats))
    if graph:
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start_event, end_event in events:
        flush.zero_()  # keeps the device busy while the host queues the call, so that launch gaps are not timed
        start_event.record()
        run()
        end_event.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in events)


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes per second, read plus written, of a copy of 512 MiB (16 MiB on a CPU)."""
    size = (512 if device.type == "cuda" else 16) * 2**20
    source, target = (torch.zeros(size, dtype=torch.int8, device=device) for _ in range(2))
    return 2 * size / (median_us(lambda: target.copy_(source), device, 10) * 1e-6)


def random_trees(shape: Shape, device: torch.device) -> TreeBatch:
    """Return trees of up to N nodes: a node's parent is one of the four before it; siblings differ in their tokens."""
    generator = torch.Generator().manual_seed(0)
    batch, nodes, node = shape.batch, shape.nodes, torch.arange(shape.nodes)
    back = torch.randint(1, 5, (batch, nodes), generator=generator)
    parents = torch.where(node > 0, (node - back).clamp(min=0), -1).int()
    depths = torch.zeros_like(parents)
    for i in range(1, nodes):
        depths[:, i] = depths.gather(1, parents[:, i : i + 1].long())[:, 0] + 1
    tokens = torch.rand(batch, min(shape.vocab, 4096), generator=generator).argsort(1)[:, :nodes].int()
    counts = torch.randint(nodes // 2 + 1, nodes + 1, (batch,), generator=generator).int()
    return TreeBatch(*(t.contiguous().to(device) for t in (tokens, parents, depths, counts)))


def of_trees(shape: Shape, device: torch.device) -> list[Operation]:
    """Operations on trees: inputs of the verification pass, verification, compaction of the accepted KV."""
    batch, nodes, capacity = shape.batch, shape.nodes, shape.batch * shape.seq_len
    tree, generator = random_trees(shape, device), torch.Generator(device).manual_seed(1)
    seq_lens = torch.full((batch,), shape.seq_len, dtype=torch.int64, device=device)
    logits = torch.randn(batch * nodes, shape.vocab, device=device, generator=generator)
    # After every second node the target is the next node's token, so that accepted paths go down the trees.
    said = torch.arange(nodes, device=device) % 2 == 0
    targets = torch.where(said, tree.tokens.roll(-1, 1), -1).long()
    slots = torch.randperm(2 * batch * nodes, device=device, generator=generator)[: batch * nodes].view(batch, nodes)
    row_shape = (2 * batch * nodes, shape.heads, shape.dim)
    kv = [torch.randn(row_shape, device=device, generator=generator).bfloat16() for _ in range(2 * shape.layers)]
    pools = {"triton": kv, "reference": [rows.clone() for rows in kv]}
    # Every second node is accepted: all rows but the root's move.
    width = (nodes + 1) // 2
    accepted = (torch.arange(width, device=device, dtype=torch.int32) * 2).expand(batch, width).contiguous()
    lengths = torch.full((batch,), width, dtype=torch.int32, device=device)
    paths = Verification(accepted, lengths, accepted)

    def compact(backend: Backend) -> list[torch.Tensor]:
        KVPool(pools[backend]).compact(slots, paths, backend=backend)
        return pools[backend]

    trees = 4 * batch * (3 * nodes + 1)
    inputs_bytes = trees + batch * nodes * 16 + nodes * (capacity + batch * nodes)
    moved = 2 * batch * (width - 1) * 2 * shape.layers * shape.heads * shape.dim * 2
    return [
        ("tree inputs", lambda b: tree_inputs(tree, seq_lens, capacity, backend=b), inputs_bytes),
        ("verify", lambda b: verify(tree, targets, backend=b), trees + 4 * batch * (4 * nodes + 2)),
        ("compact KV", compact, moved),
        ("top tokens", lambda b: top_tokens(logits, 8, backend=b), 4 * logits.numel() + 64 * len(logits)),
    ]


def attention(shape: Shape, device: torch.device) -> Operation:
    """Attention of one layer over the whole context for trees of N nodes; its bytes count each key and value once."""
    from freedraft_kernels.device.tree_attention import TreeQueries, scratch_size, tree_attention

    batch, nodes, length, dim = shape.batch, shape.nodes, shape.seq_len + shape.nodes, shape.dim
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # the interpreter uses NumPy, without bfloat16
    generator = torch.Generator(device).manual_seed(2)
    used = -(-length // PAGE)
    pages = torch.randperm(batch * used, generator=generator, device=device).int().view(batch, used)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator).to(dtype)

    query = random(batch * nodes, QUERY_HEADS * shape.heads, dim)
    keys, values = (random(batch * used, PAGE, shape.heads, dim) for _ in range(2))
    node = torch.arange(nodes, device=device)
    masks = torch.where(node > 0, 1 << (node - 1).clamp(min=0), 0)  # a root and its children
    queries = TreeQueries(
        torch.arange(0, batch * nodes + 1, nodes, dtype=torch.int32, device=device),
        torch.full((batch,), length, dtype=torch.int32, device=device),
        torch.full((batch * nodes,), shape.seq_len + 1, dtype=torch.int32, device=device),
        masks.repeat(batch),
        torch.ones(batch, dtype=torch.int32, device=device),
    )
    scratch = torch.empty(scratch_size(batch, query.shape[1], shape.heads, dim, nodes, length), device=device)
    how: dict[str, Any] = {"max_queries": nodes, "max_seq_len": length, "trees_only": False, "scratch": scratch}
    out = torch.empty_like(query)
    moved = (2 * batch * length * shape.heads * dim + 2 * query.numel()) * query.element_size()
    how["scale"] = dim**-0.5
    return "tree attention", lambda _: tree_attention(query, keys, values, queries, pages, out, **how), moved


def of_slots(shape: Shape, device: torch.device) -> list[Operation]:
    """Operations of vLLM's model runner V2 on requests in slots: newest tokens, and the queries of their trees."""
    from freedraft_kernels.device.newest_tokens import newest_tokens
    from freedraft_kernels.device.tree_queries import NodeMasks, TreeQueries, write_tree_queries

    batch, nodes, slots_in_all = shape.batch, shape.nodes, 2 * shape.batch
    generator = torch.Generator(device).manual_seed(3)
    texts = torch.randint(shape.vocab, (slots_in_all, shape.seq_len + nodes), generator=generator, device=device).int()
    lengths = torch.full((slots_in_all,), shape.seq_len, dtype=torch.int32, device=device)
    slots = torch.randperm(slots_in_all, generator=generator, device=device)[:batch]
    gained = torch.ones(batch, dtype=torch.int32, device=device)
    own = 1 << torch.arange(nodes - 1, device=device)
    trees = NodeMasks((own | 1).repeat(slots_in_all, 1), torch.zeros_like(lengths))  # all descend from the first node
    offsets = torch.arange(0, batch * nodes + 1, nodes, dtype=torch.int32, device=device)
    seq_lens = torch.full((batch,), shape.seq_len + nodes, dtype=torch.int32, device=device)

    out = torch.empty(batch, nodes + 4, dtype=torch.int32, device=device)
    drafts = torch.empty(batch, nodes, dtype=torch.int64, device=device)
    ints = [torch.empty(size, dtype=torch.int32, device=device) for size in (batch * nodes,) * 2 + (batch,) * 2]
    positions = (shape.seq_len + torch.arange(nodes, device=device)).repeat(batch)
    queries = TreeQueries(offsets, seq_lens, ints[0], torch.empty_like(positions), ints[2])
    inputs = trees, slots, offsets, queries, positions, ints[1], ints[3]
    moved = batch * (4 * (nodes + 1) + 4 * (nodes + 4) + 8 * nodes), batch * nodes * (8 + 4 + 8 + 16 + 4)
    return [
        ("newest tokens", lambda _: newest_tokens(texts, lengths, slots, gained, gained, out, drafts), moved[0]),
        ("tree queries", lambda _: write_tree_queries(*inputs), moved[1]),
    ]


def agrees(name: str, run: Run) -> bool:
    """Whether an operation's Triton results equal the reference's."""
    results = (run("triton"), run("reference"))
    tensors = ([getattr(r, f.name) for f in fields(r)] if is_dataclass(r) else list(r) for r in results)
    for ours, theirs in zip(*tensors, strict=True):
        tolerance = TOLERANCE.get(name, 0.0) if ours.is_floating_point() else 0.0
        if not (torch.allclose(ours, theirs, rtol=0, atol=tolerance) if tolerance else torch.equal(ours, theirs)):
            return False
    return True


def measure(shape: Shape, device: torch.device, bandwidth: float) -> list[dict[str, Any]]:
    rows, repeats, with_references = [], 50 if device.type == "cuda" else 5, of_trees(shape, device)
    alone = [attention(shape, device), *of_slots(shape, device)] if use_triton(device) else []
    for name, run, size in (*with_references, *alone):
        row: dict[str, Any] = {"kernel": name, "shape": f"{shape.batch}x{shape.nodes}", "bytes": size}
        row |= {"equal": None, "reference_us": None, "triton_us": None, "share_of_copy": None}
        if (name, run, size) in with_references:
            # Before timing, since compaction works in place.
            row["equal"] = agrees(name, run) if use_triton(device) else None
            row["reference_us"] = median_us(lambda run=run: run("reference"), device, repeats)  # type: ignore[misc]
        if device.type == "cuda" and use_triton(device):
            row["triton_us"] = median_us(lambda run=run: run("triton"), device, repeats, graph=True)  # type: ignore[misc]
            row["share_of_copy"] = size / (row["triton_us"] * 1e-6) / bandwidth
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="file for the figures")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    name, bandwidth = torch.cuda.get_device_name() if on_gpu else f"CPU ({platform.machine()})", copy_bandwidth(device)
    version = __import__("triton").__version__ if has_triton() else None
    print(f"{name}, torch {torch.__version__}, triton {version}, copy {bandwidth / 1e9:.0f} GB/s")
    if not use_triton(device):
        print("no GPU and no TRITON_INTERPRET=1: references only")
    shapes = GPU_SHAPES if on_gpu else CPU_SHAPES
    rows = [row for shape in shapes for row in measure(shape, device, bandwidth)]
    print(table(rows, COLUMNS))
    figures = {"device": name, "torch": torch.__version__, "triton": version, "copy_bytes_per_s": bandwidth}
    write_json(args.json, figures | {"shapes": [s._asdict() for s in shapes], "rows": rows})
    if any(row["equal"] is False for row in rows):
        print("a kernel differs from its reference", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
