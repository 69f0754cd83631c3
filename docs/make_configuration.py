"""Writes configuration.md from the pydantic models of the plugins.

python docs/make_configuration.py           # write it
python docs/make_configuration.py --check   # exit code 1 when it is out of date
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from freedraft.config import CONFIG_VARIABLE, PREFIX, PluginOptions
from freedraft.hybrid.options import NAME as HYBRID
from layerskip_plugin.method import SPEC as LAYERSKIP
from sssd_plugin.method import SPEC as SSSD

PAGE = Path(__file__).with_name("configuration.md")
PARTS = (SSSD, LAYERSKIP)

HEAD = f"""\
# Configuration

<!-- Written by docs/make_configuration.py from the options' models: change those, then run it. -->

Options come from three sources, each checked by itself: an unknown option (among variables only one that resembles an
option) or a wrong value stops the engine with a line that names it. If an option is set in several sources, the first
of these applies:

1. the engine's flags: on vLLM, keys of `--speculative-config` next to `method` and `num_speculative_tokens`;
2. the YAML file that `{CONFIG_VARIABLE}` names, with lines `option: value`;
3. environment variables `{PREFIX}<OPTION>`, e.g. `{PREFIX}DATASTORE`.

SGLang has no flag for them: use the file or the variables.

| engine | method | maximum of draft tokens |
|---|---|---|
| vLLM | `"method": "sssd"` | `"num_speculative_tokens"`, 1 to 64, default 31 for sssd, or what a batch holds: \
draft tokens of a request, chain or tree, root not counted |
| SGLang | `--speculative-algorithm sssd` | `--speculative-num-draft-tokens`, 1 to 256, default 32 for sssd, else 16: \
nodes of a tree, root included |

`policy` (sssd) and `lookahead` (layerskip) decide how many of these a step drafts; see
[how much to draft](cost-model.md). Method `{HYBRID}` drafts with both.
"""

HYBRID_SECTION = f"""
## {HYBRID}

`"method": "{HYBRID}"`, in SGLang `--speculative-algorithm {HYBRID}`, accepts the options of both methods.
`policy` must be `auto`, without a `knee`, and `lookahead` must be `cost`: the drafters are compared by measured times.
One `metrics_port` serves the metrics of both.
"""


def descriptions(model: type[PluginOptions]) -> dict[str, str]:
    """Return the description of each option, from the "Attributes" section of the docstring.

    Raises:
        ValueError: an option is not described there.
    """
    section = inspect.getdoc(model) or ""
    section = section.partition("Attributes:\n")[2]
    meanings: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if begin := re.match(r"    (\w+): (.*)", line):
            name = begin[1]
            meanings[name] = begin[2]
        elif name and line.startswith("        "):
            meanings[name] += " " + line.strip()
    if missing := model.model_fields.keys() - meanings.keys():
        raise ValueError(f"{model.__name__} does not describe {', '.join(sorted(missing))}")
    return meanings


def type_name(annotation: Any) -> str:
    """Return how a user writes a value of this type."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(inner[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(type_name(a) for a in inner if a is not NoneType)
    if origin is tuple:
        return f"one {type_name(inner[0])} or a list of them"
    return {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path"}[annotation]


def limits(info: FieldInfo) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [f"{sign} {getattr(m, key)}" for m in info.metadata for key, sign in signs.items() if hasattr(m, key)]
    return f" ({', '.join(found)})" if found else ""


def default(info: FieldInfo) -> str:
    if info.default in (None, ()):
        return "-"
    value = str(info.default).lower() if isinstance(info.default, bool) else info.default
    return f"`{value}`"


def page() -> str:
    """Return the whole page.

    Raises:
        ValueError: an option is not described.
    """
    parts = [HEAD]
    for spec in PARTS:
        model = spec.options
        meanings = descriptions(model)
        parts.append(f"\n## {spec.name}\n\n| option | value | default | meaning |\n|---|---|---|---|\n")
        for name, info in model.model_fields.items():
            meaning = meanings[name][0].upper() + meanings[name][1:]
            value = type_name(info.annotation) + limits(info)
            parts.append(f"| `{name}` | {value} | {default(info)} | {meaning.replace('|', chr(92) + '|')} |\n")
    return "".join([*parts, HYBRID_SECTION])


def main() -> int:
    wanted = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != wanted:
            print(f"{PAGE.name} is out of date: python docs/make_configuration.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
