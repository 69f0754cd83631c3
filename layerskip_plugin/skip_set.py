"""A skip set: which of a model's attention and MLP sublayers a draft pass skips."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from freedraft.draft_model import Recipe
from freedraft.files import write_atomically

FORMAT = "freedraft skip set 1"
SHAPE_FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip


def model_fingerprint(config: Mapping[str, Any] | object) -> str:
    """16 hex digits over the shape fields of a Hugging Face config, so that fine-tunes share skip sets. Raises
    ValueError if one is missing."""
    config = text_config(config)
    get = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
    shape = {name: get(name) for name in SHAPE_FIELDS}
    # Some exporters omit these at their usual values; engines fill them in.
    shape["num_key_value_heads"] = shape["num_key_value_heads"] or shape["num_attention_heads"]
    if not shape["head_dim"] and shape["hidden_size"] and shape["num_attention_heads"]:
        shape["head_dim"] = shape["hidden_size"] // shape["num_attention_heads"]
    missing = [name for name, value in shape.items() if value is None]
    if missing:
        raise ValueError(f"the model's config has no {', '.join(missing)}: not a decoder that layers can be skipped in")
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]


def text_config(config: Any) -> Any:
    """The part of a Hugging Face config, or of a mapping like one, that describes the decoder."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


@dataclass(frozen=True, slots=True)
class SkipSet(Recipe):
    """An immutable set of skipped sublayers, and with its window the recipe of a draft pass."""

    def __post_init__(self) -> None:
        if self.n_layers < 1:
            raise ValueError(f"skip set: n_layers must be positive, not {self.n_layers}")
        for name in ("attention", "mlp"):
            layers = frozenset(getattr(self, name))
            object.__setattr__(self, name, layers)
            for x in layers:
                if type(x) is not int or not 0 <= x < self.n_layers:
                    raise ValueError(
                        f"skip set: {name} names layer {x!r}; the model has layers 0 to {self.n_layers - 1}"
                    )

    @classmethod
    def empty(cls, n_layers: int, model: str = "") -> Self:
        return cls(n_layers, frozenset(), frozenset(), model)

    @classmethod
    def of_sublayers(cls, sublayers: Iterable[int], n_layers: int, model: str = "") -> Self:
        """The set of these sublayers: 2i is the attention of layer i, 2i + 1 its MLP."""
        skipped = [int(s) for s in sublayers]
        attention, mlp = (frozenset(s // 2 for s in skipped if s % 2 == kind) for kind in (0, 1))
        return cls(n_layers, attention, mlp, model)

    @property
    def sublayers(self) -> tuple[int, ...]:
        return tuple(i for i, flag in enumerate(self.bits) if flag)

    def __len__(self) -> int:
        """Skipped sublayers; the empty set is false."""
        return len(self.attention) + len(self.mlp)

    def to_dict(self) -> dict[str, Any]:
        fields = {"model": self.model, "n_layers": self.n_layers}
        return fields | {"attention": sorted(self.attention), "mlp": sorted(self.mlp)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "skip set") -> Self:
        """Raises ValueError, which names `source`, if a key is missing or wrong."""
        try:
            n_layers, model = values["n_layers"], values.get("model", "")
            lists = [values["attention"], values["mlp"]]
        except (KeyError, TypeError, AttributeError):
            raise ValueError(f"{source}: needs the keys n_layers, attention and mlp") from None
        if type(n_layers) is not int or not isinstance(model, str) or not all(isinstance(x, list) for x in lists):
            raise ValueError(f"{source}: n_layers must be a number, model a text, attention and mlp lists of layers")
        try:
            return cls(n_layers, frozenset(lists[0]), frozenset(lists[1]), model)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{source}: {error}") from None

    def save(self, path: Path, about: Mapping[str, Any] | None = None) -> None:
        """Write a JSON file; about: its origin (model, hardware, data, scores), not read back."""
        write_json(path, FORMAT, self.to_dict(), about)

    @classmethod
    def load(cls, path: Path, n_layers: int | None = None, model: str | None = None) -> Self:
        """Raises ValueError, one line, if the file is damaged or not of this model, see `require`."""
        values = read_json(path, FORMAT, "skip set")
        return cls.from_dict(values, str(path)).require(n_layers, model, str(path))

    def require(self, n_layers: int | None = None, model: str | None = None, source: str = "skip set") -> Self:
        """Return the set if it has these layers and this fingerprint (None: any), else raise ValueError."""
        remedy = "make one with: freedraft calibrate skip-set"
        if n_layers is not None and n_layers != self.n_layers:
            raise ValueError(f"{source} is for a model of {self.n_layers} layers, this one has {n_layers}; {remedy}")
        if model and self.model and model != self.model:
            raise ValueError(f"{source} is for another model (fingerprint {self.model}, here {model}); {remedy}")
        return self


def write_json(path: Path, form: str, values: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> None:
    """Raises ValueError, one line, on a disk error."""
    try:
        text = json.dumps({"format": form, **values, "about": dict(about or {})}, indent=1) + "\n"
        write_atomically(path, text.encode(), mode=0o666)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None


@contextmanager
def undamaged(what: str, path: Path) -> Iterator[None]:
    """Turn errors of a file's contents into a ValueError of one line."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{what}: {path} is damaged: {error}; make it again with freedraft calibrate {what.split()[0]}"
        ) from None


def read_json(path: Path, form: str, what: str) -> dict[str, Any]:
    """Read the object in a JSON file of format `form`, or raise ValueError: one line that starts with `what`."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{what}: cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise ValueError(f"{what}: {path} is not JSON: make it again with freedraft calibrate") from None
    actual = values.get("format") if isinstance(values, dict) else None
    if actual != form:
        raise ValueError(f"{what}: {path} has the format {actual!r}, not {form!r}: make it with freedraft calibrate")
    return values
