"""Calibration in vLLM: what transformers says of the same tokens, from the engine's own modules and KV cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import vllm_engines  # sets vLLM's environment before it is imported
from scipy.stats import spearmanr
from typer.testing import CliRunner

from freedraft.cli import app
from layerskip_plugin.calibrate import run as calibrate_run
from layerskip_plugin.calibrate.host_model import HostModel
from layerskip_plugin.calibrate.knapsack import search
from layerskip_plugin.calibrate.sample import Sample
from layerskip_plugin.calibrate.vllm import VllmModel
from layerskip_plugin.selection.knapsack import Plan
from layerskip_plugin.selection.knn import Domains
from layerskip_plugin.skip_set import SkipSet
from tests.support import prompts

SETTINGS = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 64}
TEXTS, TOKENS = 3, 24


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Iterator[VllmModel]:
    assert vllm_engines.engine
    made = VllmModel(demo_model, 520, SETTINGS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def host(demo_model: Path) -> HostModel:
    return HostModel.load(demo_model)


@pytest.fixture(scope="module")
def samples(model: VllmModel, host: HostModel, demo_model: Path) -> tuple[Sample, Sample]:
    """The same tokens of the engine's own answers, read by both."""
    asked = prompts.chat_and_raw_ids(demo_model)[:TEXTS]
    answers = model.generate(asked, 16)
    assert [len(answer) for answer in answers] == [16] * TEXTS
    texts = [prompt + answer for prompt, answer in zip(asked, answers, strict=True)]
    read: list[Sample] = []
    for each in (model, host):
        read.append(Sample.spread(each, texts, TOKENS, [len(prompt) for prompt in asked], seed=1))
    assert torch.equal(read[0].gather(lambda t: t.best), read[1].gather(lambda t: t.best))
    return read[0], read[1]


def test_scores_are_those_of_the_reference(model: VllmModel, host: HostModel, samples: tuple) -> None:
    """Also across several passes, and with nothing of the texts' own KV written over."""
    rng = np.random.default_rng(0)
    sets = [model.empty(), model.skip([0, 7])]
    sets += [model.skip(rng.choice(np.arange(2, 58), size, replace=False).tolist()) for size in (3, 5, 8, 8, 12, 12)]
    assert len(sets) * TOKENS > 2 * model.rows
    caches = [layer.self_attn.attn.kv_cache for layer in model.backbone.layers]
    pages = torch.cat([text.pages for text in samples[0].texts]).long()
    before = [cache[pages].clone() for cache in caches]
    agreement, cosine = model.scores(sets, samples[0])
    assert all(torch.equal(old, cache[pages]) for old, cache in zip(before, caches, strict=True))
    expected, expected_cosine = host.scores(sets, samples[1])
    assert agreement[0] == 1 and 0.2 < agreement[2:].min() < 0.95
    assert agreement == pytest.approx(expected, abs=1.01 / TOKENS)
    assert cosine == pytest.approx(expected_cosine, abs=1e-3)
    assert spearmanr(agreement, expected).statistic >= 0.9


def test_the_knapsack_search_finds_the_sets_of_the_reference(model: VllmModel, host: HostModel, samples: tuple) -> None:
    ours, theirs = (search(each, sample, max_weight=6) for each, sample in zip((model, host), samples, strict=True))
    assert [each.weight for each in ours] == [each.weight for each in theirs] == list(range(7))
    assert [each.skip for each in ours] == [each.skip for each in theirs]


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
    times = model.pass_times(500)
    assert model.pool.get_num_free_blocks() == free
    assert times.attention > 0 and times.mlp > 0 and times.verify(1) < times.verify(12)
    assert times.draft(model.skip(range(0, 60, 2))) < times.draft(model.empty())
    with pytest.raises(ValueError, match="started for 520 tokens, and timing needs 524"):
        model.pass_times(512)


def test_all_commands_write_what_engines_load(
    model: VllmModel, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate_run, "load_model", lambda folder, settings: model)
    monkeypatch.setattr(calibrate_run, "ANSWER_TOKENS", 16)
    monkeypatch.setattr(calibrate_run, "TIMED_CONTEXT", 128)
    monkeypatch.setattr(VllmModel, "close", lambda self: None)
    files = [tmp_path / f"{name}.jsonl" for name in ("animals", "poems")]
    for file, asked in zip(
        files,
        (("Tell me of cats.", "Tell me of dogs."), ("Write a poem on rain.", "Write a poem on snow.")),
        strict=True,
    ):
        file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in asked))

    def calibrate(name: str, *options: object) -> Path:
        out = tmp_path / f"{name}.json"
        few = ("--tokens", 24, "--engine", "vllm", "--model", demo_model, "--out", out)
        done = CliRunner().invoke(app, ["calibrate", name, *map(str, (*files, *few, *options))])
        assert done.exit_code == 0, done.output
        assert json.loads(out.read_text())["about"]["engine"] == "vllm"
        return out

    known = model.n_layers, model.fingerprint
    assert len(SkipSet.load(calibrate("skip-set", "--share", 0.05, "--survivors", 1), *known)) == 3
    assert len(SkipSet.load(calibrate("bayesian", "--share", 0.05, "--iterations", 4), *known)) == 3
    assert Plan.load(calibrate("knapsack", "--contexts", "128"), *known).contexts == (128,)
    assert Domains.load(calibrate("knn", "--share", 0.05, "--survivors", 1), *known).names == ("animals", "poems")
