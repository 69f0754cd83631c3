"""The `freedraft` command: plugin commands by entry point, one-line errors, a broken plugin beside working ones."""

from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint

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


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"freedraft {__version__}\n")


def test_commands_of_plugins_run(commands: types.ModuleType) -> None:
    assert run("store", "info", "x").stdout == "info of x\n"
    assert run("calibrate", "rate", "--rate", "0.25").stdout == "trained at 0.25\n"


def test_help_lists_own_and_plugin_commands_and_names_broken_ones(commands: types.ModuleType) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for word in ("doctor", "store", "calibrate", "crash", "gone", "cannot be loaded"):
        assert word in result.stdout
    inner = run("calibrate", "--help")
    assert inner.exit_code == 0
    assert all(word in inner.stdout for word in ("rate", "knee", "lost", "Train a thing"))


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


def test_an_unknown_command_is_a_usage_error(commands: types.ModuleType) -> None:
    for args in (("nothing",), ("calibrate", "nothing"), ("store", "nothing")):
        result = run(*args)
        assert result.exit_code == 2
        assert "nothing" in result.stderr


def test_debug_shows_the_traceback(commands: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cli.DEBUG, "1")
    assert isinstance(run("store", "build").exception, ValueError)
    monkeypatch.setenv(cli.DEBUG, "0")
    assert isinstance(run("store", "build").exception, SystemExit)


def test_a_bug_is_not_dressed_up_as_a_user_error(commands: types.ModuleType) -> None:
    assert isinstance(run("crash").exception, RuntimeError)


def test_the_installed_commands_all_load() -> None:
    for name, point in cli.installed_commands().items():
        assert point.load() is not None, name


@pytest.mark.parametrize("retired", cli.RETIRED)
def test_commands_and_options_of_earlier_versions_are_refused_in_one_line(retired: str) -> None:
    command, word = retired.split()
    result = run(command, word)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert f"'{word}' is no longer supported: {cli.RETIRED[retired]}" in result.stderr
