"""Forward times of a decoder with random weights against the roofline: how far `auto` is off before it has measured.

    python bench/forward_times.py --json bench/results/forward-times.json       # the shape of Llama-3.1-8B, on a GPU
    python bench/forward_times.py --shape 576 4 9 3 64 1536 49152 --batches 1 4 --contexts 512 --query-tokens 1 4 16

Needs no engine: norms, projections, attention over a cache (PyTorch's own kernels) and the head, in CUDA graphs on a
GPU, so that no launch is counted. By cell the median time, and what `freedraft.cost.roofline` says with the
profile of this device (`freedraft profile --out FILE` makes one). What matters to `auto` is not a time but what a step
takes over one without drafts: `growth`, measured and predicted. Cells whose caches do not fit are listed as `skipped`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from bench.lib.machine import cores, cpu, rounded, versions
from bench.lib.results import write_json
from freedraft.cost.hardware import HardwareProfile, choose_profile, device_name
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.roofline import Roofline

NAMES = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
LLAMA_8B = (4096, 32, 32, 8, 128, 14336, 128256)
CELL_SECONDS = 0.3
FREE_SHARE = 0.9  # of the memory that is left, at most, for caches


class Decoder:
    """A pre-norm decoder without positions, with random weights of its own in every layer."""

    def __init__(self, shape: ModelShape, device: str) -> None:
        self.shape, self.device, self.dtype = shape, device, getattr(torch, shape.dtype)
        h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = {"qkv": (q + 2 * kv, h), "out": (h, q)}
        sizes |= {"up": (2 * shape.intermediate, h), "down": (h, shape.intermediate)}
        self.layers = [{name: self._random(*size) for name, size in sizes.items()} for _ in range(shape.layers)]
        self.head = self._random(shape.vocab, h)
        self.norm = torch.ones(h, device=device, dtype=self.dtype)

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device, dtype=self.dtype) * size[-1] ** -0.5

    def caches(self, batch: int, tokens: int) -> list[Tensor]:
        """[2, batch, kv heads, tokens, head_dim] for each layer: keys and values, whose last places a step writes."""
        size = (2, batch, self.shape.kv_heads, tokens, self.shape.head_dim)
        return [torch.randn(size, device=self.device, dtype=self.dtype) for _ in range(self.shape.layers)]

    @torch.inference_mode()
    def forward(self, x: Tensor, caches: list[Tensor]) -> Tensor:
        """Logits [b, n, vocab] of the embedded newest n tokens of b requests, x [b, n, h], behind what is cached."""
        batch, n, h = x.shape
        shape, tokens = self.shape, caches[0].shape[3]
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        mask = None if n == 1 else causal_lower_right(n, tokens)
        for weights, cache in zip(self.layers, caches, strict=True):
            qkv = F.linear(F.rms_norm(x, (h,), self.norm), weights["qkv"]).view(batch, n, sum(heads), shape.head_dim)
            q, k, v = qkv.transpose(1, 2).split(heads, 1)
            cache[0, :, :, tokens - n :], cache[1, :, :, tokens - n :] = k, v
            attended = F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=mask, enable_gqa=True)
            x = x + F.linear(attended.transpose(1, 2).reshape(batch, n, -1), weights["out"])
            gate, up = F.linear(F.rms_norm(x, (h,), self.norm), weights["up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, weights["down"])
        return F.linear(F.rms_norm(x, (h,), self.norm), self.head)


def measure(decoder: Decoder, roofline: Roofline, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each batch, context and number of query tokens, without figures where its caches do not fit."""
    shape, device = decoder.shape, decoder.device
    for batch, context in itertools.product(args.batches, args.contexts):
        plain: tuple[float, float] | None = None
        for query_tokens in sorted(args.query_tokens):
            n, rest = divmod(query_tokens, batch)
            if n < 1 or rest:
                continue
            needed = 2 * batch * shape.kv_heads * (context + n) * shape.head_dim * shape.layers
            cell = {"batch": batch, "context": context, "query_tokens": query_tokens}
            if needed * decoder.dtype.itemsize > FREE_SHARE * free_bytes(device):
                yield cell
                continue
            x = torch.randn(batch, n, shape.hidden, device=device, dtype=decoder.dtype)
            seconds = timed(partial(decoder.forward, x, decoder.caches(batch, context + n)), device)
            predicted = float(roofline.seconds(batch, query_tokens, context))
            plain = plain or (seconds, predicted)
            cell |= {"ms": 1e3 * seconds, "predicted_ms": 1e3 * predicted}
            cell |= {"measured_over_predicted": seconds / predicted}
            yield cell | {"growth": seconds / plain[0], "predicted_growth": predicted / plain[1]}


def free_bytes(device: str) -> float:
    """What caches may take; of a GPU also what PyTorch's allocator still holds of the cell before."""
    if device != "cuda":
        return 4e9
    torch.cuda.empty_cache()
    return float(torch.cuda.mem_get_info()[0])


def timed(work: Callable[[], object], device: str) -> float:
    """Median seconds of a call; on a GPU of a CUDA graph of it."""
    work()
    run, wait = work, torch.cuda.synchronize if device != "cpu" else lambda: None
    if device != "cpu":
        with torch.cuda.stream(torch.cuda.Stream()):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        run = graph.replay
    run()
    times: list[float] = []
    while sum(times) < CELL_SECONDS or len(times) < 3:
        wait()
        began = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and extremes over the cells: of times, and of growth where there were drafts."""
    level = [row["measured_over_predicted"] for row in rows]
    growth = [row["growth"] / row["predicted_growth"] for row in rows if row["query_tokens"] > row["batch"]]
    return {
        name: [min(values), statistics.median(values), max(values)]
        for name, values in (("measured_over_predicted", level), ("growth_over_predicted", growth))
        if values
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=7, metavar=tuple(map(str.upper, NAMES)), default=LLAMA_8B)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 16384])
    powers = [2**i for i in range(10)]
    parser.add_argument("--query-tokens", type=int, nargs="+", default=powers, help="of all requests")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = torch.empty(0, dtype=getattr(torch, args.dtype)).element_size()
    sizes: dict[str, Any] = dict(zip(NAMES, args.shape, strict=True))
    sizes |= {"weight_bytes": width, "activation_bytes": width, "kv_bytes": width}
    shape = ModelShape(**sizes, dtype=args.dtype)
    profile: HardwareProfile = choose_profile("auto")
    result: dict[str, Any] = {"machine": device_name() or f"{cpu()}, {cores()} cores"} | versions("torch")
    result |= {"shape": list(args.shape), "dtype": args.dtype, "profile": profile.name}
    result |= {"rows": [], "skipped": []}
    decoder = Decoder(shape, device)
    for row in measure(decoder, Roofline(shape, profile), args):
        fits = "ms" in row
        result["rows" if fits else "skipped"].append(row)
        said = " ".join(f"{name} {value:.4g}" for name, value in row.items())
        print(said if fits else f"{said}: skipped, not enough memory", flush=True)
        result["summary"] = summary(result["rows"])
        write_json(args.json, rounded(result))
    print({name: [round(value, 2) for value in values] for name, values in result.get("summary", {}).items()})


if __name__ == "__main__":
    main()
