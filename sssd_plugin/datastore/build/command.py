"""`freedraft datastore build`, and helpers shared with other commands."""

from __future__ import annotations

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

from freedraft.fingerprints import tokenizer_fingerprint
from sssd_plugin.datastore import tokenizer as tokenizers
from sssd_plugin.datastore.build.builder import StoreBuilder
from sssd_plugin.datastore.build.sorting import format_size, parse_size, peak_resident_bytes
from sssd_plugin.datastore.build.sources import Block, find_inputs, read_pieces, tokenize
from sssd_plugin.datastore.disk.format import Manifest, TokenizerEntry
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.live.runs import SEARCHED

OutPath = Annotated[Path, typer.Argument(metavar="OUT", help="Directory to make.")]
TokenizerOption = Annotated[Path | None, typer.Option(
    "--tokenizer", metavar="DIR", help="Folder of the model (or its tokenizer.json).")]  # fmt: skip
MemoryOption = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Memory that the command may use.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace the datastore at OUT.")]


@contextmanager
def building() -> Iterator[None]:
    """Context of a command that builds: SIGTERM, Ctrl-C and a lack of memory end it without a traceback."""
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


def _vocabulary(path: Path | None, size: int | None, only_ids: bool) -> tuple[Any, TokenizerEntry | None, int]:
    """Return the tokenizer at `path`, if any, its entry and the vocabulary size; only_ids: no input is text."""
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
