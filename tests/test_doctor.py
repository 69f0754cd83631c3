import importlib.util
import json
import subprocess
import sys
import types
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from freedraft import cli, doctor
from freedraft.engines.hooks import Hook, check

ENGINE = """
from dataclasses import dataclass

class Runner:
    def propose(self, scheduler_output, sampled): ...
    @property
    def lookahead(self): raise RuntimeError("must not run")

@dataclass
class Output:
    finished: set
@dataclass
class Special(Output):
    new: list
"""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path) -> types.ModuleType:
    """A small engine that can be imported, and a hook table for it."""
    (tmp_path / "toy_engine").mkdir()
    (tmp_path / "toy_engine" / "__init__.py").write_text(ENGINE)
    (tmp_path / "toy_engine" / "broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    table = types.ModuleType("freedraft.engines.toy_engine.hooks")
    table.DISTRIBUTIONS, table.ENTRY_POINT_GROUP = ("toy-engine",), "toy.plugins"
    table.MODEL_HOOKS, table.OPTIONAL_HOOKS, table.TESTED_VERSIONS, table.settings = (), (), ("?",), list
    table.HOOKS = (
        Hook("toy_engine.Runner.propose", parameters=("scheduler_output",)),
        Hook("toy_engine.Runner.lookahead"),
        Hook("toy_engine.Special", members=("finished", "new")),
    )
    monkeypatch.setitem(sys.modules, table.__name__, table)
    monkeypatch.setattr(doctor, "ENGINES", ("toy_engine",))
    monkeypatch.setattr(doctor, "entry_points", lambda group, name: group == "toy.plugins" and name == "freedraft")
    yield table
    for name in [n for n in sys.modules if n.startswith("toy_engine")]:
        del sys.modules[name]


def diagnose() -> tuple[int, str]:
    out = StringIO()
    return doctor.run(Console(file=out, width=300)), out.getvalue()


def test_a_renamed_attribute_is_found(engine: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import toy_engine

    monkeypatch.setattr(toy_engine.Runner, "draft", toy_engine.Runner.propose, raising=False)
    monkeypatch.delattr(toy_engine.Runner, "propose")
    code, text = diagnose()
    assert code == 1
    assert "toy_engine.Runner.propose is missing" in text and "runs without freedraft" in text


def test_what_not_all_drafting_needs_is_told_and_no_failure(engine: types.ModuleType) -> None:
    engine.OPTIONAL_HOOKS = (Hook("toy_engine.Newer.draft", purpose="drafting in newer runners"),)
    engine.MODEL_HOOKS = (Hook("toy_engine.Runner.propose"), Hook("toy_engine.Runner.draft_pass"))
    code, text = diagnose()
    assert code == 0 and "OK, it has all 3 functions" in text and "profile '" in text
    assert "toy_engine.Newer is missing: no drafting in newer runners" in text
    assert "'sssd' can draft, 'layerskip' and what runs with it cannot: toy_engine.Runner.draft_pass is missing" in text


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        (Hook("toy_engine.Runner.propose", parameters=("metadata",)), "takes no parameter metadata"),
        (Hook("toy_engine.Output", members=("finished", "new")), "has no new"),
        (Hook("toy_engine.gone.Thing.x"), "toy_engine.gone is missing"),
        (Hook("toy_engine.broken.Thing.x"), "cannot be imported"),
        (Hook("no_such_package.Thing.x"), "cannot be imported"),
    ],
)
def test_each_kind_of_difference_is_told(engine: types.ModuleType, hook: Hook, problem: str) -> None:
    problems = check([hook])
    assert len(problems) == 1 and problem in problems[0]


def test_no_engine_at_all_or_one_that_does_not_see_our_entry_point(engine: types.ModuleType, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "entry_points", lambda group, name: False)
    code, text = diagnose()
    assert code == 1 and "toy.plugins" in text and "reinstall" in text
    monkeypatch.setattr(doctor, "ENGINES", ("no_such_engine",))
    code, text = diagnose()
    assert code == 1 and "not installed" in text and "Next: in the clone of freedraft, pip install" in text


@pytest.mark.parametrize(("given", "told"), [("sssd,another", True), ("another, freedraft", False), ("", False)])
def test_a_variable_that_omits_us_is_told(engine: types.ModuleType, monkeypatch, given: str, told: bool) -> None:
    monkeypatch.setenv("TOY_ENGINE_PLUGINS", given)
    code, text = diagnose()
    assert code == told and ("TOY_ENGINE_PLUGINS is set and omits freedraft" in text) == told


def test_the_next_command_and_json(engine: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "START", {"toy_engine": "toy serve"})
    code, text = diagnose()
    assert code == 0 and text.endswith("Next: toy serve\n") and "freedraft explain --model DIR" in text
    done = CliRunner().invoke(cli.app, ["doctor", "--json"])
    report = json.loads(done.output)
    assert done.exit_code == 0 and report["ok"] and report["engines"]["toy_engine"]["hooks"] == 3


def test_settings_and_an_untested_version_are_told(engine: types.ModuleType) -> None:
    engine.TESTED_VERSIONS, engine.settings = ("0.32",), lambda: ["it starts otherwise"]
    code, text = diagnose()
    assert code == 0 and "- untested version; tested: 0.32" in text and "- it starts otherwise" in text


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as if it were not installed
from freedraft.doctor import run
sys.exit(run())
"""


def test_without_torch_it_says_so_too() -> None:
    """As in an environment without an engine, or with an incomplete one."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    for name in doctor.ENGINES:
        here = importlib.util.find_spec(name) is not None
        assert (f"  {name}: not installed" in done.stdout) != here
        assert not here or "torch" in done.stdout
    assert "hardware: CPU" in done.stdout
