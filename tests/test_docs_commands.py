"""The commands that the documentation shows exist: `freedraft`, `make`, benchmarks, and options of the engines."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from freedraft import cli
from freedraft.config import PREFIX
from layerskip_plugin.options import LayerSkipOptions
from sssd_plugin.options import SssdOptions
from tests.support.repeat_drafter import RepeatOptions

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docker/*.md")])
PAGES.remove(ROOT / "docs" / "results.md")  # its commands are those of the commits that it names
OPTIONS = {"sssd": {*SssdOptions.model_fields}, "layerskip": {*LayerSkipOptions.model_fields}}
OPTIONS["freedraft"] = OPTIONS["sssd"] | OPTIONS["layerskip"]
ENGINE_KEYS = {"method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"}


def commands(page: Path) -> Iterator[list[str]]:
    """Words of each line in code blocks, and of inline code, that calls one of ours."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in lines:
        if re.match(r"(\S+/)?(freedraft|make|python|vllm|FREEDRAFT_\w+=\S+)\s", line):
            yield shlex.split(re.sub(r"\s#\s.*", "", line))


def command_of(words: list[str]) -> tuple[typer.core.TyperCommand, list[str]]:
    """The command of `freedraft` that these words call, and what follows its name."""
    found = typer.main.get_command(cli.app)
    context = found.make_context("freedraft", [], resilient_parsing=True)
    while words and hasattr(found, "get_command"):
        inner = found.get_command(context, words[0])
        if inner is None:
            break
        found, words = inner, words[1:]
        context = found.make_context(words[0] if words else "x", [], resilient_parsing=True)
    return found, words


def flags(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_of_ours(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(page):
        program = Path(words[0]).name
        if program == "freedraft" and "|" not in words:
            command, rest = command_of(words[1:])
            assert not hasattr(command, "get_command") or not rest or rest[0].startswith("-"), f"no command: {words}"
            known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            assert flags(rest) <= known | {"--help", "--version"}, words
        elif program == "make":
            goals = [w for w in words[1:] if re.fullmatch(r"[a-z][\w-]*", w)]
            assert set(goals[:1]) <= targets, words
        elif program == "python" and len(words) > 1 and words[1].startswith("bench/"):
            source = (ROOT / words[1]).read_text(encoding="utf-8")
            assert all(f'"{flag}"' in source for flag in flags(words[2:])), words


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_options_of_methods(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    given = re.findall(r"--speculative-config '(\{[^']*\})'", text)
    for config in given:
        if "..." in config:
            continue
        options = json.loads(config)
        if options["method"] in OPTIONS:
            assert options.keys() <= OPTIONS[options["method"]] | ENGINE_KEYS, config
    every = {f"{PREFIX}{name.upper()}" for name in OPTIONS["freedraft"] | {*RepeatOptions.model_fields}}
    every |= {f"{PREFIX}{name}" for name in ("CONFIG", "DEBUG", "CACHE", "TEST_MODEL")}
    named = {name for name in re.findall(rf"\b{PREFIX}[A-Z_]+\b", text) if not name.endswith("_")}
    assert named <= every, named - every
