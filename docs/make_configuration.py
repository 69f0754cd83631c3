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
from freedraft.on_top import DEFAULT, NGRAMS
from layerskip_plugin.method import SPEC as LAYERSKIP
from sssd_plugin.method import SPEC as SSSD

PAGE = Path(__file__).with_name("configuration.md")
PARTS = (SSSD, LAYERSKIP)

HEAD = f"""\
# Configuration

<!-- Written by docs/make_configuration.py from the options' models: change those, then run it. -->

Options come from three places, of which the first applies:

1. **Flags.** On vLLM: keys of `--speculative-config`, beside `method` and `num_speculative_tokens`. SGLang has none.
2. **A file** that `{CONFIG_VARIABLE}` names, with one line `option: value` each (YAML).
3. **Variables** `{PREFIX}<OPTION>`, such as `{PREFIX}DATASTORE`.

A wrong value or an unknown option stops the engine, with a line that names it. A file:

```yaml
metrics_port: 9100
isolation: strict
datastore: /data/store
```

| | vLLM | SGLang |
|---|---|---|
| method | `"method": "sssd"` | `--speculative-algorithm sssd` |
| most draft tokens of a request | `"num_speculative_tokens"` | `--speculative-num-draft-tokens`, root included |
| values | 1 to 64 | 1 to 256 |
| default for `sssd` ([or less](operating.md#how-many-draft-tokens)) | 15, 31 for trees | 32, `shape: chain`: 16 |
| default for others | none: set one | 16 |

[How much of it a step drafts](design.md#cost-model).
"""

ON_TOP = f"""
## sssd+layerskip, sssd+mtp, ...

Options of both, and on vLLM `{NGRAMS}`: most tokens of a draft ({DEFAULT}). The drafter below drafts
`num_speculative_tokens` of them, on SGLang `length` (5). Drafts are chains.
"""

BASIC = {
    "sssd": ("metrics_port", "isolation", "datastore", "live", "policy"),
    "layerskip": ("skip_set", "window", "selection", "selection_file"),
}


def descriptions(model: type[PluginOptions]) -> dict[str, str]:
    """Return the description of each option, from the "Attributes" sections of the docstrings.

    Raises:
        ValueError: an option is not described there.
    """
    sections = (inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2] for kind in model.__mro__)
    meanings: dict[str, str] = {}
    name = ""
    for line in "\n".join(sections).splitlines():
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
        fields, meanings = spec.options.model_fields, descriptions(spec.options)
        basic = BASIC[spec.name]
        # What both methods have is explained once.
        known = {} if spec is SSSD else descriptions(SSSD.options)
        others = [name for name in fields if name not in basic and meanings[name] != known.get(name)]
        told = "Others:" if spec is SSSD else "Others, besides `metrics_port` and `metrics_host` as above:"
        for title, names in ((f"## {spec.name}", basic), (told, others)):
            parts.append(f"\n{title}\n\n| option | value | default | meaning |\n|---|---|---|---|\n")
            for name in names:
                meaning = meanings[name][0].upper() + meanings[name][1:]
                value = type_name(fields[name].annotation) + limits(fields[name])
                parts.append(
                    f"| `{name}` | {value} | {default(fields[name])} | {meaning.replace('|', chr(92) + '|')} |\n"
                )
    return "".join([*parts, ON_TOP])


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
