"""The documentation: generated pages are up to date, links lead somewhere, what is named exists, commands and metrics
among it; examples run."""

import ast
import inspect
import json
import re
import runpy
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
import yaml
from prometheus_client import REGISTRY

from freedraft import cli
from freedraft.config import PREFIX
from freedraft.method import Method
from freedraft.metrics import Metrics
from layerskip_plugin.options import LayerSkipOptions
from sssd_plugin.options import SssdOptions
from tests.support import repeat_drafter

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docker/*.md")])
COMMAND_PAGES = [page for page in PAGES if page.name != "results.md"]
OPTIONS = {"sssd": {*SssdOptions.model_fields}, "layerskip": {*LayerSkipOptions.model_fields}}
OPTIONS["sssd+layerskip"] = OPTIONS["sssd"] | OPTIONS["layerskip"] | {"ngram_tokens"}
ENGINE_KEYS = {"method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"}


def of_pages(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", ["configuration", "results", "readme", "compare", "compatibility"])
def test_generated_pages_are_up_to_date(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ROOT / "docs" / f"make_{name}.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--check"])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr().err


WORDS = {  # most words of a page, as `wc -w` counts them
    "README": 1_025, "guide": 785, "install": 440, "configuration": 1_180, "operating": 1_240, "troubleshooting": 980,
    "security": 900, "sssd": 1_000, "layerskip": 1_050, "design": 1_410, "add-a-drafter": 1_010, "docker": 180,
    "CONTRIBUTING": 320, "CHANGELOG": 330,
    "results": 1_030, "papers": 1_295, "benchmarks": 660, "gpu": 565, "compare": 590, "compatibility": 1_190,
}  # fmt: skip
ALL_WORDS = 16_500
SHORT = {page: page.parent.name if page.stem == "README" and page.parent != ROOT else page.stem for page in PAGES}


def test_all_pages_are_read_in_an_hour() -> None:
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in PAGES) <= ALL_WORDS


@of_pages([page for page in PAGES if SHORT[page] in WORDS])
def test_a_page_is_short_and_so_are_its_sentences(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= WORDS[SHORT[page]]
    text = re.sub(r"^```.*?^```|<!--.*?-->|^(#|Files:).*?$", "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks = re.split(r"\n\s*\n|\n(?= *[-\d|>])|\|", text)
    ends = r"(?<=[.!?:])\s" if page.stem == "configuration" else r"(?<=[.!?])\s"
    sentences = [one for block in blocks for one in re.split(ends, " ".join(block.split()))]
    assert [one for one in sentences if len(one.split()) > 35] == []


def test_a_cell_of_the_readme_has_one_number_or_range_and_the_page_110_lines() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    cells = [cell for line in re.findall(r"^\|(.*)\|$", text, re.MULTILINE) for cell in line.split("|")]
    number = r"\d+(?:\.\d+)?"
    assert [cell for cell in cells if len(re.findall(rf"(?<![\w.]){number}(?:-{number})?(?![\w.])", cell)) > 1] == []


@of_pages(PAGES)
def test_links_lead_somewhere_and_files_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(there), f"{target} has no such heading"

    folders = "bench|docs|docker|configs|freedraft|sssd_plugin|layerskip_plugin|tests"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{name} is not there"


@pytest.mark.parametrize(("name", "kind"), [("promises", "promise"), ("gpu_findings", "finding")])
def test_every_promise_is_kept_by_tests_that_exist(name: str, kind: str) -> None:
    """Those with a * run in `make test-all` only, and all others in `make test`."""
    for row in tomllib.loads((ROOT / "tests" / f"{name}.toml").read_text(encoding="utf-8"))[kind]:
        assert row["tests"] or (kind == "finding" and not row["state"].startswith("fixed")), row["says"]
        for test in row["tests"]:
            path, _, function = test.rstrip("*").partition("::")
            source = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
            found = re.search(rf"^((?:@.*\n|[ )].*\n)*) *def {function}\(", source, re.MULTILINE)
            assert found, f"{row['says']}: no test {test}"
            later = "\n@pytest.mark.extended" in "\n" + found[1]
            assert later == test.endswith("*"), f"{test}: with a * or without"


def test_the_drafter_of_the_page_is_the_tested_one() -> None:
    page = (ROOT / "docs" / "add-a-drafter.md").read_text(encoding="utf-8")
    drafter, test = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    source = Path(repeat_drafter.__file__).read_text(encoding="utf-8")
    assert drafter == source
    assert sum(1 for line in source.splitlines() if line.strip()) <= 50, "the page's title promises 50 lines"
    names = dict(vars(repeat_drafter))
    exec(test, names)
    names["test_it_repeats"]()


def test_the_step_of_the_page_is_the_one_of_the_code() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert shown == textwrap.dedent(inspect.getsource(Method.draft)).removeprefix("@final\n")


def test_functions_that_a_token_passes_exist() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Za-z_.]+)`", page.partition("| accepted |")[2].partition("\n\n")[0]))
    found = set()
    for path in (file for part in ("freedraft", "sssd_plugin") for file in (ROOT / part).rglob("*.py")):
        for node in (each for each in ast.parse(path.read_text(encoding="utf-8")).body if hasattr(each, "name")):
            inner = (each for each in getattr(node, "body", ()) if isinstance(each, ast.FunctionDef))
            found |= {node.name, *(f"{node.name}.{each.name}" for each in inner)}
    assert len(named) > 25 and named <= found, named - found


def commands(page: Path) -> Iterator[list[str]]:
    """Words of each line in code blocks, and of inline code, that calls one of ours."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in lines:
        if re.match(r"([A-Z_]+=\S+ )*(\S+/)?(freedraft|make|python|vllm)\s", line):
            words = shlex.split(re.sub(r"\s#\s.*", "", line))
            yield words[next(i for i, word in enumerate(words) if not re.match("[A-Z_]+=", word)) :]


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


@of_pages(COMMAND_PAGES)
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
        elif program == "python" and words[1:2] == ["-m"] and words[2].partition(".")[0] not in ("vllm", "sglang"):
            assert find_spec(words[2]), words
        if "--speculative-algorithm" in words:
            assert words[words.index("--speculative-algorithm") + 1] in {*OPTIONS, "repeat"}, words


@of_pages(COMMAND_PAGES)
def test_options_of_methods(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for config in re.findall(r"--speculative-config '(\{[^']*\})'", text):
        options = {"method": None} if "..." in config else json.loads(config)
        if options["method"] in OPTIONS:
            assert options.keys() <= OPTIONS[options["method"]] | ENGINE_KEYS, config
    every = {
        f"{PREFIX}{name.upper()}" for name in OPTIONS["sssd+layerskip"] | {*repeat_drafter.RepeatOptions.model_fields}
    }
    every |= {f"{PREFIX}{name}" for name in ("CONFIG", "DEBUG", "CACHE", "TEST_MODEL")}
    named = {name for name in re.findall(rf"\b{PREFIX}[A-Z_]+\b", text) if not name.endswith("_")}
    assert named <= every, named - every


SUFFIX = {"counter": ["_total"], "summary": ["_sum", "_count"], "gauge": [""]}


def exported() -> set[str]:
    """Names as Prometheus scrapes them, of everything that sssd shows."""
    import sssd_plugin.metrics  # noqa: F401

    Metrics("named")
    families = [family for family in REGISTRY.collect() if family.name.startswith("freedraft_")]
    return {family.name + suffix for family in families for suffix in SUFFIX[family.type]}


def named(text: str) -> set[str]:
    return set(re.findall(r"\bfreedraft_[a-z_]+", text))


def test_the_page_explains_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    assert named(page) == exported()


def test_the_dashboard_and_alerts_ask_for_what_there_is() -> None:
    board = json.loads((ROOT / "configs" / "grafana" / "freedraft.json").read_text(encoding="utf-8"))
    groups = yaml.safe_load((ROOT / "configs" / "prometheus" / "freedraft.yaml").read_text(encoding="utf-8"))["groups"]
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [rule["expr"] for group in groups for rule in group["rules"]]
    assert len(expressions) >= 12 and all(named(e) and named(e) <= exported() for e in expressions)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(places) == len(board["panels"]), "two panels in one place"
