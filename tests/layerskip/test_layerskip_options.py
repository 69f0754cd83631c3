"""Options of layer skipping: where skip sets come from, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lookahead_tools import RECIPE, KnownCosts

from freedraft.config import ConfigError
from freedraft.step import EngineContext
from layerskip_plugin.lookahead import Confidence, Cost, DraftVerify, Fixed
from layerskip_plugin.options import LayerSkipOptions
from layerskip_plugin.skip_set import SkipSet, model_fingerprint

SIZES = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "vocab_size": 24,
}
CONFIG = SimpleNamespace(**SIZES)
CHAINS = EngineContext(hf_config=CONFIG, max_draft_tokens=7)
TREES = EngineContext(hf_config=CONFIG, max_draft_tokens=15, widths=(1, 16))
COSTS = KnownCosts({1: 0.5}, {1: 1.0})


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two skip sets of a model with 4 layers."""
    paths = [tmp_path / "little.json", tmp_path / "much.json"]
    for path, skipped in zip(paths, ({1}, {1, 2}), strict=True):
        SkipSet(4, frozenset(skipped), frozenset(), model_fingerprint(SIZES)).save(path)
    return paths


@pytest.mark.parametrize("form", [list, lambda paths: ",".join(map(str, paths)), lambda paths: [*map(str, paths)]])
def test_several_files(files: list[Path], form: Any) -> None:
    options = LayerSkipOptions.parse({"skip_set": form(files)})
    assert list(options.skip_sets(CONFIG)) == ["little", "much"]
    # What travels between processes of an engine says the same.
    assert LayerSkipOptions.parse(options.model_dump(mode="json", exclude_none=True)) == options


def test_one_file_and_none(files: list[Path]) -> None:
    assert LayerSkipOptions.parse({"skip_set": str(files[1])}).skip_sets(CONFIG)["much"].attention == {1, 2}
    assert [len(s) for s in LayerSkipOptions().skip_sets(CONFIG).values()] == [0]
    assert LayerSkipOptions.read({}, {"FREEDRAFT_SKIP_SET": str(files[0])}).skip_set == (files[0],)


def test_sets_that_are_refused(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no/such.json is not a file.*freedraft calibrate"):
        LayerSkipOptions.parse({"skip_set": "no/such.json"})
    with pytest.raises(ConfigError, match="at most 4"):
        LayerSkipOptions.parse({"skip_set": [*files, *files, files[0]]})
    (tmp_path / "more").mkdir()
    namesake = tmp_path / "more" / "much.json"
    namesake.write_bytes(files[1].read_bytes())
    with pytest.raises(ValueError, match="two files are called much"):
        LayerSkipOptions.parse({"skip_set": [files[1], namesake]}).skip_sets(CONFIG)
    other = SimpleNamespace(**SIZES | {"num_hidden_layers": 5})
    with pytest.raises(ValueError, match="4 layers, this one has 5"):
        LayerSkipOptions.parse({"skip_set": files}).skip_sets(other)


@pytest.mark.parametrize(
    ("name", "kind"), [("cost", Cost), ("fixed", Fixed), ("confidence", Confidence), ("adaptive", DraftVerify)]
)
def test_policies(name: str, kind: type) -> None:
    options = LayerSkipOptions.parse({"lookahead": name})
    assert isinstance(options.make_lookahead(CHAINS, [RECIPE], COSTS), kind)


def test_the_policy_that_was_dropped_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match="'lookahead=roc' is no longer supported: set lookahead to cost or confidence"
    ):
        LayerSkipOptions.parse({"lookahead": "roc"})


def test_how_far_fixed_drafts() -> None:
    lengths = [
        LayerSkipOptions.parse({"lookahead": "fixed"} | given).make_lookahead(context, [RECIPE], COSTS).length
        for given in ({}, {"length": 3})
        for context in (CHAINS, TREES)
    ]
    assert lengths == [7, 5, 3, 3]


def test_verifications_are_recorded_if_a_file_is_named(tmp_path: Path) -> None:
    assert LayerSkipOptions().make_recorder(CHAINS) is None
    recorder = LayerSkipOptions.parse({"record": str(tmp_path / "seen.npz")}).make_recorder(CHAINS)
    assert recorder is not None and recorder.model == model_fingerprint(SIZES)
    with pytest.raises(ConfigError, match=r"'record'.*folder"):
        LayerSkipOptions.parse({"record": "/no/such/folder/seen.npz"})


def test_a_classifier_has_to_be_there() -> None:
    with pytest.raises(ValueError, match="freedraft calibrate disco"):
        LayerSkipOptions.parse({"lookahead": "disco"}).make_lookahead(CHAINS, [RECIPE], COSTS)
    with pytest.raises(ConfigError, match="'disco' is not a file"):
        LayerSkipOptions.parse({"disco": "/no/such/file"})
