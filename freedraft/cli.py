"""The `freedraft` command.

Plugins add sub-commands through entry points in the group `freedraft.commands`: one named `a` is the command or group
`a`, one named `a.b` the command `b` of group `a`; the object is a `typer.Typer` or a function with typer annotations.
Entry points are imported when called or listed; one that cannot be imported prints why.
"""

import json
import os
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from freedraft import __version__

GROUP = "freedraft.commands"
TUNING = "To tune and to estimate"  # the second panel of the help: commands that serving does not need
DEBUG = "FREEDRAFT_DEBUG"
USAGE_ERROR = 2


def installed_commands() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


class OneLineGroup(TyperGroup):
    """A group in which an error that a user can fix ends in one line and exit code 2; with FREEDRAFT_DEBUG=1 in its
    traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            if isinstance(error, BrokenPipeError) or os.environ.get(DEBUG, "0") not in ("", "0"):
                raise
            typer.echo(f"error: {' '.join(str(error).split()) or type(error).__name__}", err=True)
            raise typer.Exit(USAGE_ERROR) from None


class PluginGroup(OneLineGroup):
    """A group of its own commands, listed first, and of the commands that plugins registered under `prefix`."""

    prefix = ""

    def list_commands(self, ctx: Any) -> list[str]:
        names = {name.removeprefix(self.prefix).partition(".")[0] for name in self._registered()}
        return [*self.commands, *sorted(names.difference(self.commands))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The imported command; a stand-in that prints why the import failed; None for an unknown name."""
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        registered, name = self._registered(), self.prefix + cmd_name
        if name in registered:
            return _load(registered[name], cmd_name)
        return _group(cmd_name, f"{name}.") if any(other.startswith(f"{name}.") for other in registered) else None

    def _registered(self) -> dict[str, EntryPoint]:
        return {name: point for name, point in installed_commands().items() if name.startswith(self.prefix)}


# Help of the groups of plugins' two-word commands.
GROUPS = {"calibrate": "layerskip: find layers that drafts can leave out."}


def _group(name: str, prefix: str) -> Any:
    group = PluginGroup(
        name=name, help=GROUPS.get(name, f"Commands of {name}."), no_args_is_help=True, rich_help_panel=TUNING
    )
    group.prefix = prefix
    return group


def _load(point: EntryPoint, name: str) -> Any:
    try:
        target = point.load()
        if not isinstance(target, typer.Typer):
            function, target = target, typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            target.command(name)(function)
        command = typer.main.get_command(target)
    except Exception as error:
        return _broken(point, name, error)
    command.name = name
    return command


def _broken(point: EntryPoint, name: str, error: Exception) -> TyperCommand:
    reason = f"{type(error).__name__}: {error}"
    package = point.dist.name if point.dist else point.value

    def fail(**_: object) -> None:
        raise ValueError(f"command '{name}' ({point.value}) cannot be loaded: {reason}; reinstall {package}") from error

    # Accept any arguments, so that the user sees the reason instead of an error about them.
    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    return TyperCommand(name, callback=fail, help=f"cannot be loaded: {reason}", context_settings=settings)


app = typer.Typer(
    name="freedraft",
    cls=PluginGroup,
    epilog="Begin with 'freedraft doctor', which says what to type next.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"freedraft {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option(
        "--version", help="Print the version and exit.", is_eager=True, callback=_print_version)] = False,
) -> None:  # fmt: skip
    """Training-free speculative decoding for stock vLLM and SGLang."""


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check that vLLM or SGLang works with freedraft here, and say how to start it. Exit code 1 if not."""
    from freedraft.doctor import run

    raise typer.Exit(run(as_json=as_json))


@app.command(rich_help_panel=TUNING)
def profile(
    name: Annotated[str | None, typer.Option(help="Name of the profile. Default: the device's name.")] = None,
    out: Annotated[Path | None, typer.Option(
        help="File to write. Default: freedraft's own folder, where the device's name finds it.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: the GPU if there is one.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
) -> None:  # fmt: skip
    """Measure this machine in a few seconds, for GPUs other than A100, H100, H200, L40S and RTX 4090.

    From its speed freedraft estimates how many draft tokens pay.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from freedraft.cost.profiling import measure, write

    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        show = partial(bar.update, task)
        measured = measure(device, name, lambda what, share: show(description=what, completed=share))
    path = write(measured, out, force=force)
    typer.echo(
        f"wrote {path}: {measured.peak_flops / 1e12:.3g} TFLOP/s, {measured.bandwidth / 1e9:,.0f} GB/s; "
        f"{measured.ridge} tokens per step take about as long as one"
    )


@app.command(rich_help_panel=TUNING)
def explain(
    model: Annotated[Path, typer.Option(help="Model folder, or its config.json.")],
    hardware: Annotated[str, typer.Option(help="Name or file of a hardware profile, or auto.")] = "auto",
    context: Annotated[int, typer.Option(min=1, help="Tokens per request in the KV cache.")] = 1024,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Number of tensor-parallel ranks.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="The engine's dtype (default: the model's).")] = None,
    shape: Annotated[str, typer.Option(
        metavar="chain|tree", help="Shape of drafts: vLLM's FlashAttention verifies chains, SGLang trees.")] = "chain",
    *,
    max_num_seqs: Annotated[int | None, typer.Option(
        min=1, help="Most requests at once: also print what draft tokens take of the memory, and the default.")] = None,
    data_parallel: Annotated[int, typer.Option(min=1, help="Number of data-parallel ranks.")] = 1,
    memory: Annotated[float | None, typer.Option(min=1, help="GB of a device, for recurrent models.")] = None,
) -> None:  # fmt: skip
    """Estimate how many draft tokens pay at each batch size, without running a model."""
    from rich.console import Console
    from rich.table import Table

    from freedraft.cost.explain import CURVES, draft_tokens, rooms
    from freedraft.cost.explain import explain as rows_of
    from freedraft.cost.hardware import choose_profile
    from freedraft.cost.model_shape import ModelShape, read_config
    from freedraft.cost.roofline import Roofline

    config = read_config(model)
    decoder = ModelShape.from_config(config, dtype=dtype, source=str(model))
    roofline = Roofline(decoder, choose_profile(hardware), tensor_parallel)
    if shape not in CURVES:
        raise ValueError(f"--shape '{shape}': write {' or '.join(CURVES)}")
    table = Table(title=f"{model} on {roofline.profile.name} ({roofline.profile.source}), context {context:,}")
    for heading in ("requests", "step ms", "SSSD's rule", "ms", "best", "ms", "tokens/s", "speed-up"):
        table.add_column(heading, justify="right")
    for batch, plain, rule, rule_seconds, best, best_seconds, speedup in rows_of(roofline, context, CURVES[shape]):
        table.add_row(
            str(batch), f"{plain * 1e3:.2f}", str(rule), f"{rule_seconds * 1e3:.2f}", str(best),
            f"{best_seconds * 1e3:.2f}", f"{batch / plain * speedup:,.0f}", f"{speedup:.2f}x",
        )  # fmt: skip
    Console().print(table)
    typer.echo(
        "An estimate: real steps are slower than the profile's peak speeds say. SSSD's rule and the best length count "
        "nodes per request, root included. Tokens per step are taken to be "
        + ", ".join(f"{t:g} for {n} nodes" for n, t in CURVES[shape].items() if n > 1)
        + " (--shape). While serving, policy 'auto' measures both. On top of another drafter ('sssd+mtp'), of whose K"
        " tokens all are verified, n-grams add nodes from 2 + K on."
    )
    if max_num_seqs is not None:
        found = rooms(config, roofline, max_num_seqs, memory and memory * 1e9, data_parallel)
        columns = {engine: draft_tokens(room, trees=shape == "tree") for engine, room in found.items()}
        states = [f"{engine}: {what}" for engine in columns for what in ("states, GB per request", "requests by them")]
        table = Table("draft tokens", *states, "masks, MiB", "vLLM: full CUDA graphs", "for up to requests")
        for ours, theirs in zip(columns["vLLM"][2], columns["SGLang"][2], strict=True):
            sizes = [text for row in (ours, theirs) for text in (f"{row[1] / 1e9:.2f}", f"{row[2]:,}")]
            table.add_row(str(ours[0]), *sizes, f"{ours[3] / 2**20:,.0f}", *map(str, ours[4:]))
        Console().print(table)
        for engine, (length, why, _) in columns.items():
            typer.echo(f"{engine}, up to {max_num_seqs:,} requests: {length} draft tokens by default: {why}.")


@app.command()
def top(
    port: Annotated[int, typer.Argument(min=1, max=65535, help="Port of the metrics: option 'metrics_port'.")] = 9100,
    host: Annotated[str, typer.Option(help="Host of the server, or of a proxy of its metrics.")] = "127.0.0.1",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print totals since the server's start, and exit.")]
    = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:  # fmt: skip
    """Watch a running server: its speed-up, tokens per step, accepted drafts."""
    from freedraft.top import run

    raise typer.Exit(run(f"http://{host}:{port}/metrics", interval, once, as_json))


@app.command()
def compare(
    plain: Annotated[str, typer.Argument(metavar="PLAIN_URL", help="Server without drafts, http://HOST:PORT.")],
    drafting: Annotated[str | None, typer.Argument(
        metavar="DRAFTING_URL", help="The same with drafts.")] = None,
    control: Annotated[str | None, typer.Option(
        metavar="off", help="With one URL: compare it with itself, drafts turned off in each request.")] = None,
    only: Annotated[list[str] | None, typer.Option(
        metavar="PATTERN", help="Kinds to send, for example '*stop*'; may be repeated.")] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="By how much logprobs may differ.")] = 1e-3,
    file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all outcomes to it.")] = None,
) -> None:  # fmt: skip
    """Check on two servers, or on one, that drafts change no answer. Exit code 1 if they do."""
    from collections import Counter

    from freedraft.compare import DIFFERS, ONE, Server, compare

    rows = []
    if (control, drafting is None) not in ((None, False), ("off", True)):
        raise ValueError("name two servers, or one that drafts and --control off")
    drafting = drafting or plain
    for row in compare(Server(plain, off=control == "off"), Server(drafting), only or (), tolerance):
        rows.append(row)
        count = "-" if row["accepted"] is None else row["accepted"]
        typer.echo(f"{row['kind']:42} {row['outcome']:25} {count:>6} accepted  {row['plain']}")
        if row["difference"]:
            typer.echo(f"    {row['difference']}")
    counts = Counter(row["outcome"] for row in rows)
    typer.echo(f"{len(rows)} kinds: {', '.join(f'{n} {outcome}' for outcome, n in counts.most_common())}")
    if file is not None:
        file.write_text(json.dumps({"outcomes": counts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    if all(row["accepted"] == 0 for row in rows):
        raise ValueError(f"{drafting} accepted no draft token, which shows nothing: see docs/troubleshooting.md")
    raise typer.Exit(bool(counts[DIFFERS] + counts[ONE]))


main = app

if __name__ == "__main__":
    main()
