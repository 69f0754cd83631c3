"""`freedraft datastore`: build, look at and check datastores."""

from __future__ import annotations

import inspect
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from freedraft.tenants import parse_tenant
from sssd_plugin.datastore.build.builder import StoreBuilder, merge_stores
from sssd_plugin.datastore.build.memory import format_size, parse_size, peak_resident_bytes
from sssd_plugin.datastore.build.sorting import Sorter
from sssd_plugin.datastore.disk.format import MANIFEST, Manifest, TokenizerEntry, digest, read_manifest
from sssd_plugin.datastore.disk.remote import local_copy
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.live.store import SEARCHED

ABOUT = "Build, inspect and verify suffix-array datastores for SSSD."
app = typer.Typer(name="datastore", help=ABOUT, no_args_is_help=True, pretty_exceptions_enable=False)


def _place(text: str) -> Path:
    """Return the path that `text` is; of a URL, the path of a local copy."""
    try:
        return local_copy(text) if "://" in text else Path(text)
    except DatastoreError as error:
        raise typer.BadParameter(str(error)) from None


StorePath = Annotated[Path, typer.Argument(
    metavar="STORE", help="The datastore's directory, or a URL of one.", parser=_place)]  # fmt: skip
PlaceArgument = Annotated[str, typer.Argument(
    metavar="STORE", help="The datastore's directory, or the URL of servers with `live`.")]  # fmt: skip
WorkersOption = Annotated[int, typer.Option(
    metavar="N", min=1, max=1024, help="Threads that sort sub-indices, sharing the memory.")]  # fmt: skip
RayOption = Annotated[str | None, typer.Option(
    metavar="ADDRESS", help="Sort on this Ray cluster; --memory is then what each task may use.")]  # fmt: skip
OutPath = Annotated[Path, typer.Argument(metavar="OUT", help="Directory to make.")]
TokenizerOption = Annotated[Path | None, typer.Option(
    "--tokenizer", metavar="DIR", help="Folder of the model (or its tokenizer.json).")]  # fmt: skip
MemoryOption = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Memory that the command may use.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace the datastore at OUT.")]


@contextmanager
def _one_line() -> Iterator[None]:
    """End the command with one line and an exit code instead of a traceback."""
    try:
        yield
    except (DatastoreError, MemoryError) as error:
        out_of_memory = isinstance(error, MemoryError)
        message = "out of memory: give a smaller --memory" if out_of_memory else " ".join(str(error).split())
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(1) from None


@dataclass(frozen=True)
class BuildOptions:
    """Build a datastore. OUT appears when it is whole; an interrupted build leaves nothing (but see --resume).

    Reading and tokenising use the cores of this machine (one where TOKENIZERS_PARALLELISM is false). Sorting takes one
    thread for each sub-index: with --workers or --ray, several are sorted while more is read.
    """

    out: OutPath
    inputs: Annotated[list[Path], typer.Argument(
        metavar="INPUT...",
        help="JSON lines (.jsonl), token ids (.npy; -1 between documents), text, or folders of these.")]
    tokenizer: TokenizerOption = None
    field: Annotated[list[str] | None, typer.Option(
        help="Field of a JSON line that holds text ('a.b' if nested); may be repeated. (default: text)")] = None
    glob: Annotated[str, typer.Option(help="Which files of a folder.")] = "**/*"
    memory: MemoryOption = "2GiB"
    sub_index_tokens: Annotated[int | None, typer.Option(
        metavar="N", help="Largest sub-index (default: what the memory allows).")] = None
    vocab_size: Annotated[int | None, typer.Option(
        metavar="N", help="Ids are below it (default: the tokenizer's; needed without one).")] = None
    force: ForceOption = False
    resume: Annotated[bool, typer.Option(
        "--resume",
        help="Keep the tokens read so far beside OUT if interrupted, and go on from there when called again.")] = False
    workers: WorkersOption = 1
    ray: RayOption = None
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False

    def run(self) -> None:
        start = time.monotonic()
        with _one_line(), _ended_by_sigterm():
            manifest = self._build(start)
        seconds = time.monotonic() - start
        typer.echo(
            f"{self.out}: {_contents(manifest)}; built in {seconds:.1f} s "
            f"({seconds / manifest.n_tokens * 1e6:.2f} us/token), peak memory {format_size(peak_resident_bytes())}"
        )
        if (n := len(manifest.sub_indices)) > SEARCHED:
            best = f"drafts are best with at most {SEARCHED}: build with a larger --memory"
            typer.echo(f"warning: {n} sub-indices; {best}", err=True)

    def _build(self, start: float) -> Manifest:
        from sssd_plugin.datastore import tokenizer as tokenizers
        from sssd_plugin.datastore.build.checkpoint import BuildCheckpoint
        from sssd_plugin.datastore.build.sources import find_inputs, read_pieces, tokenize

        files, fields = find_inputs(self.inputs, self.glob), self.field or ["text"]
        loaded = entry = None
        vocab_size = self.vocab_size or 0
        if self.tokenizer is not None:
            loaded = tokenizers.load(self.tokenizer)
            entry = TokenizerEntry(name=self.tokenizer.resolve().name, fingerprint=tokenizers.fingerprint(loaded))
            vocab_size = vocab_size or tokenizers.vocab_size(loaded)
        elif any(file.kind != "npy" for file in files):
            raise DatastoreError("text needs a tokenizer: give --tokenizer, the folder of the model")
        elif self.vocab_size is None:
            raise DatastoreError("token ids need a vocabulary: give --tokenizer (or --vocab-size)")
        with (
            _progress(self.quiet) as progress,
            StoreBuilder(
                self.out, vocab_size=vocab_size, tokenizer=entry, memory=parse_size(self.memory),
                sub_index_tokens=self.sub_index_tokens, replace=self.force, sorter=self._sorter(),
                on_phase=lambda phase: progress.update(task, description=phase),
            ) as builder,
            BuildCheckpoint(self.out, files, fields, entry.fingerprint if entry else None, vocab_size)
            if self.resume
            else nullcontext() as checkpoint,
        ):
            task = progress.add_task("reading", total=sum(file.size for file in files), tokens=0.0, rate=0.0)
            n_tokens, kept = 0, checkpoint.n_tokens if checkpoint else 0
            if kept:
                typer.echo(f"going on after {kept:,} tokens that were read before", err=True)
            for block in checkpoint.blocks(loaded) if checkpoint else tokenize(read_pieces(files, fields), loaded):
                builder.append(block.tokens)
                n_tokens += len(block.tokens)
                rate = max(0, n_tokens - kept) / (time.monotonic() - start) / 1e6
                progress.update(task, advance=block.n_bytes, tokens=n_tokens / 1e6, rate=rate)
            return builder.finish()  # fmt: skip

    def _sorter(self) -> Sorter:
        if self.ray is None:
            return Sorter(self.workers)
        if self.workers > 1:
            raise DatastoreError("give --workers or --ray, not both: Ray decides how many tasks run at a time")
        from sssd_plugin.datastore.build.ray_sorting import RaySorter

        return RaySorter(self.ray, parse_size(self.memory))


def build(**options: Any) -> None:
    BuildOptions(**options).run()


build.__doc__, build.__annotations__ = BuildOptions.__doc__, get_type_hints(BuildOptions, include_extras=True)
vars(build)["__signature__"] = inspect.signature(BuildOptions, eval_str=True)  # of which the command's options are made
app.command()(build)


@app.command()
def info(store: StorePath, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Say what a datastore holds."""
    with _one_line():
        manifest = read_manifest(store)
    if as_json:
        typer.echo(json.dumps(_summary(manifest), indent=2))
        return
    known = manifest.tokenizer
    typer.echo(f"datastore   {store}")
    typer.echo(f"contents    {_contents(manifest)}")
    typer.echo(f"vocabulary  {manifest.vocab_size} ids, largest in use {manifest.max_token}")
    typer.echo(f"tokenizer   {f'{known.name} (fingerprint {known.fingerprint})' if known else 'not recorded'}")
    typer.echo(f"digest      {digest(store)} (datastore_sha256)")
    typer.echo(f"format      version {manifest.format_version}")
    typer.echo(f"built       {manifest.created_at:%Y-%m-%d %H:%M:%S %Z} by {manifest.created_by}")
    for sub in manifest.sub_indices:
        typer.echo(f"  {sub.name}  {sub.n_tokens} tokens, {sub.n_documents} documents, {format_size(sub.size)}")


@app.command()
def verify(
    store: StorePath,
    tokenizer: TokenizerOption = None,
    vocab_size: Annotated[int | None, typer.Option(metavar="N", help="The model's vocabulary size.")] = None,
    full: Annotated[bool, typer.Option(
        "--full", help="Prove the order of every suffix (slow; a byte of memory per token).")] = False,
    erased: Annotated[str | None, typer.Option(
        "--erased", metavar="FILE", help="Tenants, as for `forget`, of whom nothing may be left.")] = None,
) -> None:  # fmt: skip
    """Check a datastore: checksums, counts, order of the suffixes, and that it fits a model; of what was learnt, with
    --erased, that no byte of its files names these tenants. Exit code 1 if not."""
    from sssd_plugin.datastore import tokenizer as tokenizers
    from sssd_plugin.datastore.disk.store import Datastore, audit
    from sssd_plugin.datastore.live.maintenance import verify_live

    with _one_line():
        fingerprint = None if tokenizer is None else tokenizers.fingerprint(tokenizers.load(tokenizer))
        learnt = verify_live(store, _tenants(erased))
        if learnt is not None:
            typer.echo(f"{store}: {learnt}")
        elif erased:
            raise DatastoreError(f"{store} has learnt nothing: correct the path")
        if learnt is not None and not (store / MANIFEST).exists():
            return  # nothing was built
        with Datastore.open(store, vocab_size=vocab_size, fingerprint=fingerprint) as opened:
            audit(opened, full=full)
            manifest = opened.manifest
        if fingerprint is not None and manifest.tokenizer is None:
            typer.echo("warning: the store does not record its tokenizer", err=True)
    order = "every suffix in order" if full else "suffix order sampled"
    typer.echo(f"{store}: good. {_contents(manifest)}; checksums match, {order}")


@app.command()
def merge(
    out: OutPath,
    stores: Annotated[list[Path], typer.Argument(
        metavar="STORE...", help="Datastores of the same tokenizer.", parser=_place)],
    memory: MemoryOption = "2GiB",
    force: ForceOption = False,
) -> None:  # fmt: skip
    """Make one datastore of several, in as few sub-indices as the memory allows. What was learnt is not taken along."""
    with _one_line(), _ended_by_sigterm():
        manifest = merge_stores(out, stores, memory=parse_size(memory), replace=force)
    typer.echo(f"{out}: {_contents(manifest)}")


TenantsOption = Annotated[
    str | None,
    typer.Option(
        "--tenants", metavar="FILE",
        help="Tenants: a cache_salt a line, or a JSON list of cache_salt and extra_key; '-' is standard input.",
    ),
]  # fmt: skip


@app.command()
def forget(
    store: PlaceArgument,
    tenants: TenantsOption = None,
    before: Annotated[str | None, typer.Option(
        metavar="TIME", help="What was learnt before, as 2026-01-31 or 2026-01-31T12:00.")] = None,
) -> None:  # fmt: skip
    """Erase what was learnt while serving, on disk and in servers of this host that learn there, or at a URL and in all
    servers that learn there. With --tenants and --before, only what both apply to."""
    from sssd_plugin.datastore.live import maintenance

    with _one_line():
        if tenants is None and before is None:
            raise DatastoreError("say what to forget: --tenants FILE, --before TIME, or both")
        names = _tenants(tenants)
        if "://" in store:
            maintenance.forget_at(store, names, maintenance.end_of(before))
            typer.echo(f"{store}: forgotten; servers that learn there follow when they look next")
            return
        gone = maintenance.forget(Path(store), names, maintenance.end_of(before))
    servers = "" if gone.alone else "; servers that learn there follow within a second"
    typer.echo(f"{store}: {gone.documents:,} documents, {gone.tokens:,} tokens forgotten{servers}")


@app.command()
def export(
    store: PlaceArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT.npy", help="Token ids, for `freedraft datastore build`.")],
    tenants: TenantsOption = None,
    accept: Annotated[bool, typer.Option("--accept", help="Though tenants were kept apart, put all into one file.")]
    = False,
) -> None:  # fmt: skip
    """Write what was learnt as token ids, -1 after each document. A store that is built of it drafts for everybody."""
    from sssd_plugin.datastore.live.maintenance import export

    with _one_line():
        documents, n_tokens = export(store, out, _tenants(tenants), accept=accept)
    typer.echo(f"{out}: {n_tokens:,} tokens in {documents:,} documents")


@app.command()
def isolation(
    store: StorePath,
    kind: Annotated[Literal["salt", "strict", "shared", "off"], typer.Argument(help="As the option of the server.")],
    accept: Annotated[bool, typer.Option("--accept", help="Let everybody see what was learnt of one tenant.")] = False,
) -> None:
    """Let servers with this isolation use what was learnt under another one."""
    from sssd_plugin.datastore.live import maintenance

    with _one_line():
        if not accept:
            raise DatastoreError(f"requests of everybody may then be drafted from all of {store}: say so with --accept")
        before = maintenance.accept_isolation(store, kind)
    typer.echo(f"{store}: isolation '{kind}', before '{before}'")


def _tenants(source: str | None) -> list[str]:
    """Read keys of tenants. A salt is a secret, so it is never an argument, which every user of the machine can see.
    Raises DatastoreError: the file cannot be read, or names nobody."""
    if source is None:
        return []
    with reporting("read", Path(source)):
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    keys = [key for line in text.splitlines() if (key := parse_tenant(line))]
    if not keys:
        raise DatastoreError(f"{'standard input' if source == '-' else source} names no tenant: give one a line")
    return keys


def _contents(manifest: Manifest) -> str:
    n = len(manifest.sub_indices)
    return (
        f"{manifest.n_tokens:,} tokens in {manifest.n_documents:,} documents, "
        f"{n} sub-{'index' if n == 1 else 'indices'}, {format_size(manifest.size)} "
        f"({manifest.size / max(1, manifest.n_tokens):.2f} bytes/token)"
    )


def _summary(manifest: Manifest) -> dict[str, object]:
    keep = {"format_version", "requires", "vocab_size", "tokenizer", "created_at", "created_by"}
    totals = {name: getattr(manifest, name) for name in ("n_tokens", "n_documents", "max_token", "size")}
    names = ("name", "n_tokens", "n_documents", "size")
    subs = [{name: getattr(sub, name) for name in names} for sub in manifest.sub_indices]
    return {**manifest.model_dump(mode="json", include=keep), **totals, "sub_indices": subs}


def _progress(quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.fields[tokens]:.1f} M tokens, {task.fields[rate]:.2f} M/s"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        console=Console(file=sys.stderr), disable=quiet,
    )  # fmt: skip


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing was written", err=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, previous)
