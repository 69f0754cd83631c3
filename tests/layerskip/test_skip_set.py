"""Skip sets; and files of `freedraft calibrate`: read back as they were, refused in one line where they do not fit."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerskip_plugin.lookahead.disco import Classifier
from layerskip_plugin.selection.knapsack import Choice, Plan
from layerskip_plugin.selection.knn import Domains, unit
from layerskip_plugin.skip_set import SkipSet, model_fingerprint

SMOL = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOL |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
SKIP = SkipSet(4, frozenset({1, 2}), frozenset({3}), "abc")
RNG = np.random.default_rng(0)
ANCHORS = unit(RNG.standard_normal((2, 6)).astype(np.float32))
SHAPES = ((12,), (12,), (12, 3), (3,), (3, 1), (1,))
SAVED: list[Any] = [
    SKIP,
    Plan((100, 400), (Choice(SKIP, 0, 2.0, 4), Choice(SkipSet.empty(4, "abc"), 2, 4.0)), "one CPU"),
    Domains(("a", "b"), (SKIP,) * 3, np.zeros(6, np.float32), ANCHORS, np.array([0, 1], np.int32), 0.5),
    Classifier(tuple(RNG.standard_normal(shape).astype(np.float32) for shape in SHAPES), 0.4, 7, "abc"),
]


def parts(value: Any) -> list[Any]:
    """Fields, arrays among them as flat lists."""
    fields = [getattr(value, name) for name in value.__dataclass_fields__]
    flat = [x for field in fields for x in (field if isinstance(field, tuple) else [field])]
    return [x.ravel().tolist() if isinstance(x, np.ndarray) else x for x in flat]


@pytest.mark.parametrize("saved", SAVED, ids=lambda saved: type(saved).__name__)
def test_files_come_back_and_fit_one_model(saved: Any, tmp_path: Path) -> None:
    path, layers = tmp_path / "s.json", () if isinstance(saved, Classifier) else (4,)
    saved.save(path, {"data": "d"})
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]
    for ours, theirs in zip(parts(type(saved).load(path, *layers, "abc")), parts(saved), strict=True):
        assert ours == (pytest.approx(theirs, abs=1e-3) if isinstance(theirs, list) else theirs)
    with pytest.raises(ValueError, match="another model"):
        type(saved).load(path, *layers, "def")
    if layers:
        with pytest.raises(ValueError, match="4 layers, this one has 5"):
            type(saved).load(path, 5)
    with pytest.raises(ValueError, match="cannot read"):
        type(saved).load(tmp_path / "missing.json")


def test_a_plan_is_of_one_machine_and_its_contexts_ascend(tmp_path: Path) -> None:
    plan = SAVED[1]
    plan.save(tmp_path / "p.json", {})
    with pytest.raises(ValueError, match="one CPU, this is two"):
        Plan.load(tmp_path / "p.json", 4, "abc", "two")
    with pytest.raises(ValueError, match="ascend"):
        Plan((4, 2), plan.choices, "")


@pytest.mark.parametrize(
    ("kind", "content", "says"),
    [
        (SkipSet, "{", "is not JSON"),
        (SkipSet, '{"format": "other"}', "has the format 'other'"),
        (SkipSet, '{"format": "freedraft skip set 1", "n_layers": 3}', "needs the keys"),
        *(
            (SkipSet, f'{{"format": "freedraft skip set 1", "n_layers": {n}, "attention": {layers}, "mlp": []}}', says)
            for n, layers, says in (
                ('"3"', "[]", "must be a number"), (3, "[3]", "layers 0 to 2"), (3, "[[1]]", "s.json"),
                (3, "[true]", "True"),
            )
        ),
        (Plan, '{"format": "freedraft knapsack plan 1", "entries": [], "hardware": ""}', "is damaged"),
        (Domains, '{"format": "freedraft knn 1", "sets": [], "domain": [0]}', "is damaged"),
        (Classifier, '{"format": "freedraft disco 2", "hidden": 2, "weights": {}}', "is damaged"),
        (Domains, ('"hidden": 6', '"hidden": 5'), "is damaged"),
        (Classifier, ('"hidden": 3', '"hidden": 4'), "is damaged"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_in_one_line(
    tmp_path: Path, kind: Any, content: str | tuple[str, str], says: str
) -> None:
    """content: of the file, or what is replaced in a good one."""
    if isinstance(content, tuple):
        (saved,) = [each for each in SAVED if type(each) is kind]
        saved.save(tmp_path / "s.json", {})
        content = (tmp_path / "s.json").read_text().replace(*content)
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(ValueError, match=says) as caught:
        kind.load(tmp_path / "s.json")
    assert "\n" not in str(caught.value)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_bits_and_sublayers_give_the_set_back(pairs: list[tuple[bool, bool]]) -> None:
    bits = [flag for pair in pairs for flag in pair]
    skip = SkipSet.of_sublayers((i for i, flag in enumerate(bits) if flag), len(pairs), "m")
    assert list(skip.bits) == bits
    assert skip.attention == {i for i, (a, _) in enumerate(pairs) if a}
    assert skip.mlp == {i for i, (_, m) in enumerate(pairs) if m}
    assert len(skip) == sum(bits) and bool(skip) == any(bits)
    assert SkipSet.of_sublayers(skip.sublayers, skip.n_layers, "m") == skip
    assert hash(SkipSet.from_dict(json.loads(json.dumps(skip.to_dict())))) == hash(skip)


def test_fingerprint_knows_the_shape_and_not_the_name() -> None:
    ours = model_fingerprint(SMOL)
    assert ours == model_fingerprint(SMOL | {"_name_or_path": "x", "dtype": "float32", "head_dim": 64})
    assert ours == model_fingerprint(SimpleNamespace(**SMOL))
    assert ours != model_fingerprint(SMOL | {"num_hidden_layers": 31})
    with pytest.raises(ValueError, match="hidden_size"):
        model_fingerprint({k: v for k, v in SMOL.items() if k != "hidden_size"})
