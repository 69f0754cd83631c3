"""`freedraft datastore`: build, look at and check datastores."""

import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from freedraft.cli import OneLineGroup
from freedraft.fingerprints import tokenizer_fingerprint
from freedraft.tenants import parse_tenant
from sssd_plugin.datastore import tokenizer as tokenizers
from sssd_plugin.datastore.build.builder import StoreBuilder, format_size, merge_stores, parse_size, peak_resident_bytes
from sssd_plugin.datastore.build.sources import Block, find_inputs, read_pieces, tokenize
from sssd_plugin.datastore.disk.format import MANIFEST, Isolation, Manifest, TokenizerEntry, digest, read_manifest
from sssd_plugin.datastore.disk.remote import local_copy
from sssd_plugin.datastore.disk.store import Datastore, audit
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.live import maintenance
from sssd_plugin.datastore.live.runs import SEARCHED

CHECK_FAILED = 1  # exit code of `verify`
ABOUT = "Build, check, merge, export and erase datastores for sssd."
app = typer.Typer(
    name="datastore", cls=OneLineGroup, help=ABOUT, no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)  # fmt: skip


def _place(text: str) -> Path:
    try:
        return local_copy(text) if "://" in text else Path(text)
    except DatastoreError as error:
        raise typer.BadParameter(str(error)) from None


OutPath = Annotated[Path, typer.Argument(metavar="OUT", help="Directory to make.")]
TokenizerOption = Annotated[Path | None, typer.Option(
    "--tokenizer", metavar="DIR", help="Folder of the model (or its tokenizer.json).")]  # fmt: skip
MemoryOption = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Memory that the command may use.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace the datastore at OUT.")]
StorePath = Annotated[Path, typer.Argument(
    metavar="STORE", help="The datastore's directory, or a URL of one.", parser=_place)]  # fmt: skip
PlaceArgument = Annotated[str, typer.Argument(
    metavar="STORE", help="The datastore's directory, or the URL of servers with `live`.")]  # fmt: skip


@contextmanager
def building() -> Iterator[None]:
    """SIGTERM, Ctrl-C and a lack of memory end a build without a traceback."""
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing was written", err=True)
        raise typer.Exit(130) from None
    except MemoryError:
        raise DatastoreError("out of memory: give a smaller --memory") from None
    finally:
        signal.signal(signal.SIGTERM, previous)


def contents(manifest: Manifest) -> str:
    n = len(manifest.sub_indices)
    return (
        f"{manifest.n_tokens:,} tokens in {manifest.n_documents:,} documents, "
        f"{n} sub-{'index' if n == 1 else 'indices'}, {format_size(manifest.size)} "
        f"({manifest.size / max(1, manifest.n_tokens):.2f} bytes/token)"
    )


@app.command()
def build(
    out: OutPath,
    inputs: Annotated[list[Path], typer.Argument(
        metavar="INPUT...",
        help="JSON lines (.jsonl), token ids (.npy; -1 between documents), text, or folders of these.")],
    *,
    tokenizer: TokenizerOption = None,
    field: Annotated[list[str] | None, typer.Option(
        help="Field of a JSON line that holds text ('a.b' if nested); may be repeated. (default: text)")] = None,
    glob: Annotated[str, typer.Option(help="Pattern of files in a folder.")] = "**/*",
    memory: MemoryOption = "2GiB",
    sub_index_tokens: Annotated[int | None, typer.Option(
        metavar="N", help="Largest sub-index (default: by memory).")] = None,
    vocab_size: Annotated[int | None, typer.Option(
        metavar="N", help="Upper bound of token ids (default: the tokenizer's; required without one).")] = None,
    force: ForceOption = False,
    workers: Annotated[int, typer.Option(
        metavar="N", min=1, max=1024, help="Threads that sort sub-indices, sharing the memory.")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:  # fmt: skip
    """Build a datastore. OUT appears when it is whole; an interrupted build leaves nothing.

    Reading and tokenising use the cores of this machine (one where TOKENIZERS_PARALLELISM is false). Sorting takes one
    thread for each sub-index: with --workers, several are sorted while more is read.
    """
    start = time.monotonic()
    with building():
        files, fields = find_inputs(inputs, glob), field or ["text"]
        loaded, entry, size = _vocabulary(tokenizer, vocab_size, all(file.kind == "npy" for file in files))
        with StoreBuilder(
            out, vocab_size=size, tokenizer=entry, memory=parse_size(memory), replace=force,
            sub_index_tokens=sub_index_tokens, workers=workers,
        ) as builder:  # fmt: skip
            blocks = tokenize(read_pieces(files, fields), loaded)
            manifest = _fill(builder, blocks, sum(file.size for file in files), quiet)
    seconds, n = time.monotonic() - start, len(manifest.sub_indices)
    rate, peak = f"{seconds / manifest.n_tokens * 1e6:.2f} us/token", format_size(peak_resident_bytes())
    typer.echo(f"{out}: {contents(manifest)}; built in {seconds:.1f} s ({rate}), peak memory {peak}")
    if n > SEARCHED:
        best = f"drafts are best with at most {SEARCHED}: build with a larger --memory"
        typer.echo(f"warning: {n} sub-indices; {best}", err=True)


@app.command()
def info(store: StorePath) -> None:
    """Print the contents of a datastore."""
    manifest = read_manifest(store)
    known = manifest.tokenizer
    typer.echo(f"datastore   {store}")
    typer.echo(f"contents    {contents(manifest)}")
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
        "--full", help="Compare every suffix with the next one, rather than a sample.")] = False,
    erased: Annotated[str | None, typer.Option(
        "--erased", metavar="FILE", help="File of tenants, as for `forget`, that must have no text left.")] = None,
) -> None:  # fmt: skip
    """Check a datastore, that it fits a model, or that tenants are erased. Exit code 1 if a check fails.

    Checksums, counts and the order of the suffixes; with --erased, that no byte of learnt files names these tenants.
    """
    if not store.exists():
        raise DatastoreError(f"no datastore at {store}: correct the path")
    fingerprint = None if tokenizer is None else tokenizer_fingerprint(tokenizers.load(tokenizer))
    tenants = _tenants(erased)
    try:
        learnt = maintenance.verify_live(store, tenants)
        if learnt is not None:
            typer.echo(f"{store}: {learnt}")
        elif erased:
            raise DatastoreError(f"{store} has learnt nothing: correct the path")
        if learnt is not None and not (store / MANIFEST).exists():
            return  # no built store
        opened = Datastore.open(store, vocab_size=vocab_size, fingerprint=fingerprint)
        audit(opened, full=full)
        manifest = opened.manifest
        if fingerprint is not None and manifest.tokenizer is None:
            typer.echo("warning: the store does not record its tokenizer", err=True)
    except DatastoreError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(CHECK_FAILED) from None
    order = "every suffix in order" if full else "suffix order sampled"
    typer.echo(f"{store}: OK. {contents(manifest)}; checksums match, {order}")


@app.command()
def merge(
    out: OutPath,
    stores: Annotated[list[Path], typer.Argument(
        metavar="STORE...", help="Datastores of the same tokenizer.", parser=_place)],
    memory: MemoryOption = "2GiB",
    force: ForceOption = False,
) -> None:  # fmt: skip
    """Merge datastores, in as few sub-indices as the memory allows. Learnt text is not included."""
    with building():
        manifest = merge_stores(out, stores, memory=parse_size(memory), replace=force)
    typer.echo(f"{out}: {contents(manifest)}")


TenantsOption = Annotated[str | None, typer.Option(
    "--tenants", metavar="FILE",
    help="Tenants: a cache_salt a line, or a JSON list, see docs/security.md; '-' is standard input."),
]  # fmt: skip


@app.command()
def forget(
    store: PlaceArgument,
    tenants: TenantsOption = None,
    before: Annotated[str | None, typer.Option(
        metavar="TIME", help="Text learnt before this time, e.g. 2026-01-31 or 2026-01-31T12:00.")] = None,
) -> None:  # fmt: skip
    """Erase learnt text, in a folder or at a URL, and in the servers that learn there.

    With --tenants and --before, only text that both select.
    """
    if tenants is None and before is None:
        raise DatastoreError("say what to forget: --tenants FILE, --before TIME, or both")
    typer.echo(f"{store}: {maintenance.forget(store, _tenants(tenants), maintenance.end_of(before))}")


@app.command()
def export(
    store: PlaceArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT.npy", help="Token ids, for `freedraft datastore build`.")],
    tenants: TenantsOption = None,
    accept: Annotated[bool, typer.Option("--accept", help="Put tenants that were kept apart into one file.")] = False,
) -> None:  # fmt: skip
    """Write learnt text as token ids, -1 after each document. A store built of it drafts for all tenants."""
    documents, n_tokens = maintenance.export(store, out, _tenants(tenants), accept=accept)
    typer.echo(f"{out}: {n_tokens:,} tokens in {documents:,} documents")


@app.command()
def isolation(
    store: StorePath,
    kind: Annotated[Isolation, typer.Argument(help="Value of the server's option.")],
    accept: Annotated[bool, typer.Option("--accept", help="Confirm: all clients profit from all text.")] = False,
) -> None:
    """Let servers with this isolation use text learnt under another one."""
    if not accept:
        raise DatastoreError(f"this lets every client profit from all text in {store}: confirm it with --accept")
    before = maintenance.accept_isolation(store, kind)
    typer.echo(f"{store}: isolation '{kind}', before '{before}'")


def _tenants(source: str | None) -> list[str]:
    if source is None:
        return []
    # From a file: salts are secrets, and arguments are visible to every user of the machine.
    with reporting("read", Path(source)):
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    keys = [key for line in text.splitlines() if (key := parse_tenant(line))]
    if not keys:
        raise DatastoreError(f"{'standard input' if source == '-' else source} is empty: write one cache_salt per line")
    return keys


def _vocabulary(path: Path | None, size: int | None, only_ids: bool) -> tuple[Any, TokenizerEntry | None, int]:
    if path is not None:
        loaded = tokenizers.load(path)
        entry = TokenizerEntry(name=path.resolve().name, fingerprint=tokenizer_fingerprint(loaded))
        return loaded, entry, size or tokenizers.vocab_size(loaded)
    if not only_ids:
        raise DatastoreError("text needs a tokenizer: give --tokenizer, the folder of the model")
    if size is None:
        raise DatastoreError("token ids need a vocabulary: give --tokenizer (or --vocab-size)")
    return None, None, size


def _fill(builder: StoreBuilder, blocks: Iterable[Block], n_bytes: int, quiet: bool) -> Manifest:
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.fields[tokens]:.1f} M tokens, {task.fields[rate]:.2f} M/s"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        console=Console(file=sys.stderr), disable=quiet,
    )  # fmt: skip
    start, n_tokens = time.monotonic(), 0
    task = progress.add_task("reading", total=n_bytes, tokens=0.0, rate=0.0)
    builder.on_phase = lambda phase: progress.update(task, description=phase)
    with progress:
        for block in blocks:
            builder.append(block.tokens)
            n_tokens += len(block.tokens)
            rate = n_tokens / (time.monotonic() - start) / 1e6
            progress.update(task, advance=block.n_bytes, tokens=n_tokens / 1e6, rate=rate)
        return builder.finish()
