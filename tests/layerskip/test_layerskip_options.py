"""Options of layer skipping: where skip sets come from, which selection and policy they name, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from lookahead_tools import RECIPE, KnownCosts
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from freedraft.config import ConfigError
from freedraft.draft_model import Window
from freedraft.step import EngineContext
from layerskip_plugin.lookahead.base import Confidence, FixedLength, Lookahead
from layerskip_plugin.lookahead.cost import Cost
from layerskip_plugin.options import LayerSkipOptions
from layerskip_plugin.selection.base import Selection
from layerskip_plugin.selection.knapsack import Choice, Plan
from layerskip_plugin.selection.knn import Domains
from layerskip_plugin.skip_set import SkipSet, model_fingerprint

SIZES = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
         "num_attention_heads": 2, "vocab_size": 24}  # fmt: skip
CONFIG, MODEL = SimpleNamespace(**SIZES), model_fingerprint(SIZES)
CHAINS = EngineContext(hf_config=CONFIG, max_draft_tokens=7)
TREES = EngineContext(hf_config=CONFIG, max_draft_tokens=15, widths=(1, 16))
COSTS = KnownCosts(0.5, {1: 1.0})


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two skip sets of a model with 4 layers."""
    paths = [tmp_path / "little.json", tmp_path / "much.json"]
    for path, skipped in zip(paths, ({1}, {1, 2}), strict=True):
        SkipSet(4, frozenset(skipped), frozenset(), MODEL).save(path)
    return paths


@pytest.fixture
def selections(tmp_path: Path) -> dict[str, Path]:
    """Selection files of that model, each with the set that skips sublayer 2."""
    skip = SkipSet.of_sublayers([2], 4, MODEL)
    for name, length in (("knapsack", 3), ("plain", 0)):
        Plan((10,), (Choice(skip, length, 1.0, 3 - length),), "here").save(tmp_path / f"{name}.json", {})
    skip.save(tmp_path / "skip.json")
    anchors = np.eye(2, 6, dtype=np.float32)
    domains = Domains(("a", "b"), (skip,) * 3, np.zeros(6, np.float32), anchors, np.array([0, 1], np.int32), 0.5)
    domains.save(tmp_path / "knn.json", {})
    return {path.stem: path for path in tmp_path.glob("*.json")}


def selection(hardware: str = "here", sizes: Any = (), **options: Any) -> Selection:
    config = SimpleNamespace(**SIZES | dict(sizes))
    return LayerSkipOptions.parse(options).make_selection(config, hardware)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"lookahead": "confidence"}, "auto"),
        ({"lookahead": "fixed", "length": 3, "shape": "tree"}, "tree"),
        ({"lookahead": "confidence", "shape": "chain"}, "chain"),
        ({"lookahead": "fixed", "shape": "tree"}, "chain"),
        ({"shape": "tree"}, "chain"),
    ],
)
def test_trees_at_one_length_are_of_chains_that_end_early(options: dict[str, Any], shape: str) -> None:
    assert LayerSkipOptions.parse(options).shape_at_one_length == shape


def test_several_files_one_and_none(files: list[Path]) -> None:
    for form in (files, ",".join(map(str, files)), [*map(str, files)]):
        options = LayerSkipOptions.parse({"skip_set": form})
        assert list(options.skip_sets(CONFIG.num_hidden_layers, MODEL)) == ["little", "much"]
        # What travels between processes of an engine says the same.
        assert LayerSkipOptions.parse(options.model_dump(mode="json", exclude_none=True)) == options
    assert selection(skip_set=str(files[1])).sets["much"].attention == {1, 2}
    assert [len(s) for s in selection().sets.values()] == [0]
    assert LayerSkipOptions.read({}, {"FREEDRAFT_SKIP_SET": str(files[0])}).skip_set == (files[0],)


@pytest.mark.parametrize("name", get_args(LayerSkipOptions.model_fields["selection"].annotation))
def test_every_selection_by_name(selections: dict[str, Path], name: str) -> None:
    made = selection(selection=name, selection_file=selections.get(name), search_share=0.05)
    assert type(made).__name__.lower() == name and getattr(made, "share", 0.05) == 0.05
    assert all(skip.n_layers == 4 and skip.model == MODEL for skip in made.sets.values())
    assert made.choose(["r"], np.array([5], np.int32))[0] in made.sets.values()
    assert not {0, 1, 6, 7} & set(next(iter(made.sets.values())).sublayers)


@pytest.mark.parametrize(("options", "size"), [({}, 4), ({"skip_ratio": 0.25}, 2)])
def test_what_is_set_reaches_swift(options: dict[str, float], size: int) -> None:
    made: Any = selection(selection="swift", **options)
    assert made.space.size == len(made.incumbent) == size


def test_a_search_or_a_plan(selections: dict[str, Path]) -> None:
    assert not selection(selection="knapsack").sets["knapspec"], "searched, where there is no plan"
    for lookahead, length in (("cost", 3), ("fixed", 0)):
        plain = selection(selection="knapsack", selection_file=selections["plain"], lookahead=lookahead)
        assert plain.max_lengths(np.array([10], np.int32)).tolist() == [length]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"selection": "statik"}, "'static', 'swift', 'knn' or 'knapsack'"),
        ({"selection": "knn"}, "needs the option 'selection_file'.*calibrate knn"),
        ({"selection": "knn", "selection_file": "knapsack"}, "has the format 'freedraft knapsack plan 1'"),
        ({"selection": "knapsack", "selection_file": "knapsack", "hardware": "there"}, "measured on here, this is"),
        ({"selection": "swift", "selection_file": "knapsack"}, "does not go with selection swift"),
        ({"selection": "knapsack", "selection_file": "knapsack", "skip_set": "knn"}, "not go with selection knapsack"),
        ({"selection": "knapsack", "skip_set": "knn"}, "does not go with selection knapsack"),
        ({"selection": "swift", "skip_ratio": 0.9}, "'skip_ratio' 0.9 is too much of 8 sublayers.*set 0.5 or less"),
        ({"selection_file": "/no/such/file"}, "'selection_file' /no/such/file is not a file.*freedraft calibrate"),
        ({"skip_set": "knn"}, "has the format 'freedraft knn 1', not 'freedraft skip set 1'"),
        ({"skip_set": "no/such.json"}, r"no/such.json is not a file.*freedraft calibrate"),
        ({"skip_set": "skip,skip,skip,skip,skip"}, "at most 4"),
        ({"skip_set": "skip,skip"}, "two files are called skip"),
        ({"selection": "knn", "selection_file": "knn", "sizes": {"hidden_size": 5}}, "another model"),
        ({"selection": "knapsack", "selection_file": "knapsack", "sizes": {"num_hidden_layers": 5}}, "4 layers, this"),
    ],
)
def test_what_cannot_be_used_is_refused(selections: dict[str, Path], options: dict[str, Any], says: str) -> None:
    for key in {"selection_file", "skip_set"} & options.keys():
        options = options | {key: ",".join(str(selections.get(name, name)) for name in options[key].split(","))}
    with pytest.raises(ValueError, match=says):
        selection(**options)


def lookahead(context: EngineContext = CHAINS, **options: Any) -> Lookahead:
    return LayerSkipOptions.parse(options).make_lookahead(context, [RECIPE], COSTS)


def test_policies() -> None:
    for name, kind in (("cost", Cost), ("fixed", FixedLength), ("confidence", Confidence)):
        assert type(lookahead(lookahead=name)) is kind
    lengths = [lookahead(context, lookahead="fixed").length for context in (CHAINS, TREES)]
    assert [*lengths, lookahead(lookahead="fixed", length=3).length] == [7, 5, 3]


def test_policies_and_records_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="freedraft calibrate disco"):
        lookahead(lookahead="disco")
    for options, says in (
        ({"disco": "/no/such/file"}, "'disco' /no/such/file is not a file"),
        ({"record": "/no/such/folder/seen.npz"}, "'record'.*folder"),
        ({"threshold": 1.5}, "threshold"),
        ({"skip_ratio": 1}, "option 'skip_ratio' should be less than 1"),
    ):
        with pytest.raises(ConfigError, match=says):
            LayerSkipOptions.parse(options)


def window(given: dict[str, Any], config: Any = None, **context: Any) -> Window | None:
    return LayerSkipOptions.parse(given).draft_window(EngineContext(hf_config=config or LlamaConfig(), **context))


def test_windows_that_may_be() -> None:
    assert window({}) is None
    assert window({"window": 512}, page_size=128) == Window(16, 496)
    assert window({"window": "600", "sinks": 0}) == Window(0, 600)
    assert window({"window": 8192}, Qwen2Config(use_sliding_window=False, sliding_window=4096))


@pytest.mark.parametrize(
    ("given", "context", "words"),
    [
        ({"window": 100}, {"page_size": 128}, "'window' is 100 tokens, less than a page of the KV cache: set 128"),
        ({"window": 64, "sinks": 64}, {}, "'sinks' is 64 and leaves nothing of a window of 64 tokens"),
        ({"window": 4096}, {"config": MistralConfig(sliding_window=4096)}, "looks back 4096 at most"),
        ({"window": 512}, {"config": LlamaConfig(dual_chunk_attention_config={"chunk_size": 1})}, "dual chunk"),
        ({"window": 0}, {}, "window"),
        ({"window": "wide"}, {}, "window"),
        ({"sinks": -1}, {}, "sinks"),
    ],
)
def test_windows_that_are_refused(given: dict[str, Any], context: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        window(given, **context)
    assert "\n" not in str(error.value)
