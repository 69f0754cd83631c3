"""Calibration in vLLM: what transformers says of the same tokens, from the engine's own modules and KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import vllm_engines  # sets vLLM's environment before it is imported

from layerskip_plugin.calibrate.host_model import HostModel
from layerskip_plugin.calibrate.vllm import VllmModel
from tests.support import calibration

SETTINGS = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 64}


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Iterator[VllmModel]:
    assert vllm_engines.engine
    made = VllmModel(demo_model, calibration.CONTEXT, SETTINGS)
    with calibration.quick_timing():
        yield made
    made.close()


@pytest.fixture(scope="module")
def host(demo_model: Path) -> HostModel:
    return HostModel.load(demo_model)


@pytest.fixture(scope="module")
def samples(model: VllmModel, host: HostModel, demo_model: Path) -> tuple:
    return calibration.read_by_both(model, host, demo_model)


def test_scores_are_those_of_the_reference(model: VllmModel, host: HostModel, samples: tuple) -> None:
    """And nothing of the texts' own KV is written over."""
    caches = [layer.self_attn.attn.kv_cache for layer in model.backbone.layers]
    pages = torch.cat([text.pages for text in samples[0].texts]).long()
    before = [cache[pages].clone() for cache in caches]
    calibration.check_scores(model, host, samples, model.rows)
    assert all(torch.equal(old, cache[pages]) for old, cache in zip(before, caches, strict=True))


def test_the_knapsack_search_finds_the_sets_of_the_reference(model: VllmModel, host: HostModel, samples: tuple) -> None:
    calibration.check_search(model, host, samples)


def test_pages_are_free_again_with_their_text(model: VllmModel) -> None:
    free = model.pool.get_num_free_blocks()
    text = model.read(list(range(3, 3 + model.page_size + 1)))
    assert len(text.pages) == 2 and model.pool.get_num_free_blocks() == free - 2
    del text
    assert model.pool.get_num_free_blocks() == free
    with pytest.raises(ValueError, match=f"room for {free} more blocks, not {free + 1}: .*VLLM_CPU_KVCACHE_SPACE"):
        model._take(free + 1)
    with pytest.raises(ValueError, match="between 1 and 520 tokens, not 521"):
        model.read([3] * 521)


def test_times_are_of_sublayers_and_of_verification(model: VllmModel) -> None:
    free = model.pool.get_num_free_blocks()
    calibration.check_times(model)
    assert model.pool.get_num_free_blocks() == free
    with pytest.raises(ValueError, match="started for 520 tokens, and timing needs 524"):
        model.pass_times(512)


def test_all_commands_write_what_engines_load(
    model: VllmModel, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration.check_commands("vllm", model, demo_model, tmp_path, monkeypatch)
