"""Calibration in SGLang: what transformers says of the same tokens, from the engine's own modules and KV pool.

python calibration_in_engine.py MODEL PAGE_SIZE
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
import torch

from layerskip_plugin.calibrate.host_model import HostModel
from layerskip_plugin.calibrate.sglang import SglangModel
from tests.support import calibration

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "max_total_tokens": 8192,
    "max_running_requests": 32,
    "disable_cuda_graph": True,
}


def check_texts(model: SglangModel) -> None:
    """Slots are free again with their text, and what does not fit is said."""
    free, size = model.allocator.available_size(), model.page_size
    text = model.read(list(range(3, 3 + size + 1)))
    assert len(text.slots) == size + 1 and model.allocator.available_size() == free - 2 * size
    del text
    assert model.allocator.available_size() == free
    with pytest.raises(ValueError, match=f"room for {free} more tokens, not {free + 1}: .*max_total_tokens"):
        model._take(free + 1)
    for tokens, words in (([3] * 521, "between 1 and 520 tokens, not 521"), ([], "not 0")):
        with pytest.raises(ValueError, match=words):
            model.read(tokens)
    with pytest.raises(ValueError, match=r"context 512: .* between 1 and 520 tokens, not 524"):
        model.pass_times(512)
    assert model.allocator.available_size() == free


def main(folder: Path, page_size: int) -> None:
    model = SglangModel(folder, calibration.CONTEXT, SETTINGS | {"page_size": page_size})
    host = HostModel.load(folder)
    samples = calibration.read_by_both(model, host, folder)
    pool = model.runner.token_to_kv_pool
    slots = torch.cat([text.slots for text in samples[0].texts])
    caches = [*pool.k_buffer, *pool.v_buffer]
    before = [cache[slots].clone() for cache in caches]
    calibration.check_scores(model, host, samples, len(model.rows))
    assert all(torch.equal(old, cache[slots]) for old, cache in zip(before, caches, strict=True))
    check_texts(model)
    if page_size > 1:
        return
    calibration.check_search(model, host, samples, max_weight=3)
    free = model.allocator.available_size()
    with calibration.quick_timing():
        calibration.check_times(model)
        assert model.allocator.available_size() == free
        check_command(model, folder)


def check_command(model: SglangModel, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        calibration.check_commands("sglang", model, folder, Path(made), patch, ["bayesian"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
