"""The `freedraft` command: plugin commands by entry point, one-line errors, a broken plugin beside working ones."""

import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from freedraft import __version__, cli

runner = CliRunner()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A plugin with one group, two commands in a group, and three commands that are broken in different ways."""
    plugin = types.ModuleType("toy_plugin")
    group = typer.Typer(help="A group of its own.", no_args_is_help=True, pretty_exceptions_enable=False)

    @group.command()
    def info(path: str) -> None:
        typer.echo(f"info of {path}")

    @group.command()
    def build() -> None:
        raise ValueError("store.bin is truncated:\n  build it again")

    def train(rate: float = 0.5) -> None:
        """Train a thing."""
        typer.echo(f"trained at {rate}")

    def measure() -> None:
        raise FileNotFoundError(2, "No such file", "trace.npz")

    def crash() -> None:
        raise RuntimeError("a bug of ours")

    plugin.group, plugin.train, plugin.measure, plugin.crash = group, train, measure, crash
    monkeypatch.setitem(sys.modules, "toy_plugin", plugin)
    points = {
        "store": "toy_plugin:group",
        "calibrate.rate": "toy_plugin:train",
        "calibrate.knee": "toy_plugin:measure",
        "calibrate.lost": "toy_plugin:not_there",
        "crash": "toy_plugin:crash",
        "gone": "a_module_that_is_not_there:app",
    }
    table = {name: EntryPoint(name, value, cli.GROUP) for name, value in points.items()}
    monkeypatch.setattr(cli, "installed_commands", lambda: table)
    monkeypatch.delenv(cli.DEBUG, raising=False)
    return plugin


def run(*args: str) -> Result:
    return runner.invoke(cli.app, list(args))


def test_version_and_commands_of_plugins(commands: types.ModuleType) -> None:
    assert run("--version").stdout == f"freedraft {__version__}\n"
    assert run("store", "info", "x").stdout == "info of x\n"
    assert run("calibrate", "rate", "--rate", "0.25").stdout == "trained at 0.25\n"


def test_help_lists_own_and_plugin_commands_and_names_broken_ones(commands: types.ModuleType) -> None:
    for args, words in (
        (["--help"], ("doctor", "store", "calibrate", "crash", "gone", "cannot be loaded")),
        (["calibrate", "--help"], ("rate", "knee", "lost", "Train a thing")),
    ):
        result = run(*args)
        assert result.exit_code == 0 and all(word in result.stdout for word in words)
        assert "completion" not in result.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("store", "build"), ["error: store.bin is truncated: build it again\n"]),
        (("calibrate", "knee"), ["error: [Errno 2] No such file: 'trace.npz'\n"]),
        (("gone", "--option", "7"), ["'gone'", "a_module_that_is_not_there", "reinstall"]),
        (("calibrate", "lost"), ["'lost'", "toy_plugin:not_there", "not_there"]),
    ],
)
def test_what_fails_says_why_in_one_line(commands: types.ModuleType, args: tuple[str, ...], words: list[str]) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert all(word in result.stderr for word in words)


def test_tracebacks_are_of_bugs_and_for_who_debugs(commands: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(run("crash").exception, RuntimeError)
    for debug, kind in (("1", ValueError), ("0", SystemExit)):
        monkeypatch.setenv(cli.DEBUG, debug)
        assert isinstance(run("store", "build").exception, kind)


def test_the_installed_commands_all_load() -> None:
    for name, point in cli.installed_commands().items():
        assert point.load() is not None, name


@pytest.mark.parametrize(("command", "module"), [("knn", "sklearn.cluster"), ("disco", "sklearn.neural_network")])
def test_calibrations_say_what_they_need_before_they_load_a_model(
    command: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages that come with extras: what is said where one is missing."""
    monkeypatch.setitem(sys.modules, module, None)
    given = [] if command == "disco" else ["--model", str(tmp_path)]
    result = run("calibrate", command, str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "out.json"), *given)
    assert result.exit_code == 2
    assert f"calibrate {command} needs {module}" in result.output and "pip install '.[calibrate]'" in result.output
