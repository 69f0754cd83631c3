"""Typed options of a plugin, read from the engine's flags, a YAML file or the environment."""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

CONFIG_VARIABLE = "FREEDRAFT_CONFIG"
PREFIX = "FREEDRAFT_"
LOCAL = "127.0.0.1"  # default address of metrics: this machine only


class _Loader(yaml.SafeLoader):
    """YAML with the booleans `true` and `false` alone, since `off` is a value of options."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if first in "tTfF" or not tag.endswith(":bool")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class ConfigError(ValueError):
    """An unusable configuration. The message is one line: the option or file, and the remedy."""


def configs_dir() -> Path:
    """The folder with the shipped profiles: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if folder.is_dir():
            return folder
    raise ConfigError(f"freedraft's configs folder is missing beside {package}: reinstall freedraft")


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError for one that is missing, unreadable, not YAML or no mapping."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise ConfigError(f"{path} is not valid YAML{where}: correct it or remove it") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold 'option: value' lines, not a {type(content).__name__}")
    return content


def suggestion(name: str, known: Iterable[str]) -> str:
    """Remedy for a mistyped name: the closest known one, else all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"choose from: {', '.join(known)}"


def one_line(error: ValidationError, known: Iterable[str], source: str) -> str:
    """A pydantic error as one line: each wrong option, its source, and the remedy."""
    parts = []
    for item in error.errors(include_url=False):
        option = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown option '{option}': {suggestion(option, known)}")
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
            given = f" (given: {item['input']!r})" if option and not isinstance(item["input"], dict) else ""
            parts.append(f"option '{option}' {message}{given}" if option else f"options {message}{given}")
    return f"{source}: {'; '.join(parts)}"


def expand_path(value: object) -> object:
    """Expand `~` in a path; an empty path means none."""
    if isinstance(value, str):
        return Path(value).expanduser() if value.strip() else None
    return value


UserPath = Annotated[Path | None, BeforeValidator(expand_path)]


class PluginOptions(BaseModel):
    """Base of a plugin's options: a frozen pydantic model that rejects unknown options.

    Attributes:
        metrics_port: serve Prometheus metrics of the engine process at this port (0 picks a free one).
        metrics_host: address to serve them on; anyone who reaches it can read the amount of traffic.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, str_strip_whitespace=True)

    source_name: ClassVar[str] = "freedraft options"

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    metrics_host: str = Field(default=LOCAL, min_length=1)

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str | None = None) -> Self:
        """Validate `values`; `source` names their origin in messages. Raises ConfigError: an option is unknown, or its
        value is wrong."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(one_line(error, cls.model_fields, source or cls.source_name)) from None

    @classmethod
    def read(cls, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Self:
        """Options from the engine's flags, else from the YAML file named by `FREEDRAFT_CONFIG`, else from
        `FREEDRAFT_<OPTION>` variables. Each source is checked separately, so that a ConfigError names it."""
        environ = os.environ if environ is None else environ
        values = cls._from_environment(environ)
        if path := environ.get(CONFIG_VARIABLE):
            from_file = read_yaml(Path(path).expanduser())
            cls.parse(from_file, f"{path} (named by {CONFIG_VARIABLE})")
            values |= from_file
        if flags:
            cls.parse(flags)
            values |= flags
        return cls.parse(values)

    @classmethod
    def _from_environment(cls, environ: Mapping[str, str]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        names = {PREFIX + option.upper(): option for option in cls.model_fields}
        for variable, value in environ.items():
            if option := names.get(variable):
                if value != "":
                    cls.parse({option: value}, f"environment variable {variable}")
                    values[option] = value
            elif variable.startswith(PREFIX) and variable != CONFIG_VARIABLE:
                # Other tools may use the prefix; only names that resemble an option are errors.
                stem = variable.removeprefix(PREFIX).lower()
                if close := difflib.get_close_matches(stem, cls.model_fields, n=1, cutoff=0.8):
                    meant = f"{PREFIX}{close[0].upper()}"
                    raise ConfigError(f"unknown environment variable {variable}: did you mean {meant}?")
        return values
