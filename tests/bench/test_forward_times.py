"""Forward times against the roofline: the decoder is one, and its cells are those that were asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench import forward_times
from bench.lib.results import checked
from freedraft.cost.model_shape import ModelShape

SHAPE = (32, 2, 4, 2, 8, 48, 64)


def test_each_token_sees_the_cache_and_what_comes_before_it() -> None:
    """Against attention written out, one query token after the other."""
    torch.manual_seed(0)
    shape = ModelShape(*SHAPE, dtype="float32")
    decoder, batch, context, n = forward_times.Decoder(shape, "cpu"), 2, 5, 3
    caches, x = decoder.caches(batch, context + n), torch.randn(batch, n, shape.hidden)
    copies = [cache.clone() for cache in caches]
    logits = decoder.forward(x, caches)
    hidden = x.clone()
    for weights, cache in zip(decoder.layers, copies, strict=True):
        h = F.rms_norm(hidden, (shape.hidden,))
        q, k, v = (h @ weights["qkv"].T).split((32, 16, 16), -1)
        out = torch.zeros(batch, n, 32)
        for b in range(batch):
            for i in range(n):
                cache[0, b, :, context + i], cache[1, b, :, context + i] = k[b, i].view(2, 8), v[b, i].view(2, 8)
                for head in range(4):
                    keys, values = cache[:, b, head // 2, : context + i + 1]
                    share = torch.softmax(keys @ q[b, i, 8 * head : 8 * head + 8] / 8**0.5, 0)
                    out[b, i, 8 * head : 8 * head + 8] = share @ values
        hidden = hidden + out @ weights["out"].T
        gate, up = (F.rms_norm(hidden, (shape.hidden,)) @ weights["up"].T).chunk(2, -1)
        hidden = hidden + (F.silu(gate) * up) @ weights["down"].T
    expected = F.rms_norm(hidden, (shape.hidden,)) @ decoder.head.T
    assert torch.allclose(logits, expected, atol=1e-4)


def test_cells_that_do_not_fit_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_times, "free_bytes", lambda device: 40_000.0)  # 128 bytes a token and layer
    path = tmp_path / "forward.json"
    arguments = f"--dtype float32 --batches 1 2 --contexts 16 100 --query-tokens 2 4 --seconds 0.01 --json {path}"
    assert forward_times.main(["--shape", *map(str, SHAPE), *arguments.split()]) == 0
    result = json.loads(path.read_text())
    assert len(result["rows"]) == 6
    assert result["skipped"] == [{"batch": 2, "context": 100, "query_tokens": q} for q in (2, 4)]


def test_memory_that_the_allocator_holds_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU has it: what was given back by tensors is not given back to the device."""
    held = [3e9]
    monkeypatch.setattr(torch.cuda, "empty_cache", held.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10e9 - sum(held), 80e9))
    assert forward_times.free_bytes("cuda") == 10e9


def test_a_row_for_each_cell_and_growth_over_the_plain_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "forward.json"
    arguments = f"--dtype float32 --batches 1 3 --contexts 16 64 --query-tokens 1 3 4 6 --seconds 0.01 --json {path}"
    assert forward_times.main(["--shape", *map(str, SHAPE), *arguments.split()]) == 0
    result = json.loads(path.read_text())
    cells = [(row["batch"], row["context"], row["query_tokens"]) for row in result["rows"]]
    assert cells == [(b, c, q) for b in (1, 3) for c in (16, 64) for q in (1, 3, 4, 6) if q % b == 0]
    for row in result["rows"]:
        # Figures of the file have four digits behind the point.
        assert row["ms"] > 0 and row["measured_over_predicted"] * row["predicted_ms"] == pytest.approx(
            row["ms"], rel=0.05
        )
        if row["query_tokens"] == row["batch"]:
            assert row["growth"] == row["predicted_growth"] == 1.0
    assert set(result["summary"]) == {"measured_over_predicted", "growth_over_predicted"}
    assert checked(path)["command"]
