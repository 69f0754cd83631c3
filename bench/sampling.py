"""What temperature, top-k and top-p over the nodes of draft trees cost, against sorting the vocabulary at each node.

    python bench/sampling.py [--batch 32] [--nodes 16] [--vocab 152064] [--json OUT]

The median of a call and the memory it takes beside its result, in turns, on whatever device there is. Each tree has a
third to all of its nodes. Both must keep the same tokens.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from freedraft_kernels import target_probs

from bench.kernels import median_us
from bench.lib.results import write_json

TOP_K, TOP_P = 20, 0.95  # as generation_config.json of Qwen's models, which SGLang takes for its default


def by_sorting(logits: torch.Tensor, temperatures: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The same distribution from a sort of every row: float32 [B, N, V]."""
    probs = torch.softmax(logits / temperatures[:, None, None], -1)
    ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ordered[before >= top_p] = 0
    ordered[..., top_k:] = 0
    ordered /= ordered.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, order, ordered)


def arms(shape: tuple[int, int, int], device: torch.device) -> dict[str, Callable[[], torch.Tensor]]:
    """Calls on the same inputs; "inputs" only gives these."""
    batch, nodes, vocab = shape
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(batch, nodes, vocab, device=device, generator=generator).mul_(4)
    temperatures = torch.full((batch,), 0.7, device=device)
    counts = torch.randint(nodes // 3, nodes + 1, (batch,), device=device, generator=generator).int()
    top_ks, top_ps = torch.full_like(counts, TOP_K), torch.full_like(temperatures, TOP_P)
    return {
        "inputs": lambda: logits,
        "visited": lambda: target_probs(logits, temperatures, top_ks=top_ks, top_ps=top_ps, counts=counts),
        "sorted": lambda: by_sorting(logits, temperatures, TOP_K, TOP_P),
    }


def peak_bytes(arm: str, shape: tuple[int, int, int]) -> int:
    """Most memory of one call and its inputs; on a CPU, of a process that does nothing else."""
    if torch.cuda.is_available():
        call = arms(shape, torch.device("cuda"))[arm]
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated()
    named = zip(("--batch", "--nodes", "--vocab"), map(str, shape), strict=True)
    command = [sys.executable, __file__, "--once", arm, *(word for pair in named for word in pair)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=152_064)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--once", metavar="ARM", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    shape = args.batch, args.nodes, args.vocab
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    calls = arms(shape, device)
    if args.once:
        calls[args.once]()
        # Not ru_maxrss, which starts from the most of the process that started this one.
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        print(1024 * int(status.partition("VmHWM:")[2].split()[0]))
        return 0
    del calls["inputs"]
    ours, theirs = (call() for call in calls.values())
    nodes = (ours > 0).sum(-1) <= TOP_K  # the others are padding, which is not filtered
    largest = float((ours - theirs).abs().amax(-1)[nodes].max())
    del ours, theirs
    seconds: dict[str, list[float]] = {arm: [] for arm in calls}
    for _ in range(args.repeats):
        for arm, call in calls.items():
            seconds[arm].append(median_us(call, device, 1) * 1e-6)
    base = peak_bytes("inputs", shape)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU ({platform.machine()})"
    print(f"{name}: {shape[0]} requests of {shape[1]} nodes, {shape[2]} ids, top-k {TOP_K}, top-p {TOP_P}")
    figures = {}
    for arm, times in seconds.items():
        median, memory = statistics.median(times), peak_bytes(arm, shape) - base
        figures[arm] = {"median_s": median, "seconds": times, "bytes": memory}
        print(f"{arm:8} {median:8.3f} s  {memory / 2**20:8.0f} MiB beside the logits")
    print(f"largest difference of a probability: {largest:.1e}")
    result = {"device": name, "shape": shape, "top_k": TOP_K, "top_p": TOP_P, "arms": figures, "difference": largest}
    write_json(args.json, result)
    return 0 if largest < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
