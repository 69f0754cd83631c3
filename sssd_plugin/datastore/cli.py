"""`freedraft datastore`: build, look at and check datastores."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from freedraft.cli import OneLineGroup
from freedraft.fingerprints import tokenizer_fingerprint
from freedraft.tenants import parse_tenant
from sssd_plugin.datastore import tokenizer as tokenizers
from sssd_plugin.datastore.build import command
from sssd_plugin.datastore.build.builder import merge_stores
from sssd_plugin.datastore.build.sorting import format_size, parse_size
from sssd_plugin.datastore.disk.format import MANIFEST, Isolation, Manifest, digest, read_manifest
from sssd_plugin.datastore.disk.remote import local_copy
from sssd_plugin.datastore.disk.store import Datastore, audit
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.live import maintenance

CHECK_FAILED = 1  # exit code of `verify`
ABOUT = "Build, inspect and verify suffix-array datastores for SSSD."
app = typer.Typer(
    name="datastore", cls=OneLineGroup, help=ABOUT, no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)  # fmt: skip


def _place(text: str) -> Path:
    """Return `text` as a path; for a URL the path of its local copy."""
    try:
        return local_copy(text) if "://" in text else Path(text)
    except DatastoreError as error:
        raise typer.BadParameter(str(error)) from None


StorePath = Annotated[Path, typer.Argument(
    metavar="STORE", help="The datastore's directory, or a URL of one.", parser=_place)]  # fmt: skip
PlaceArgument = Annotated[str, typer.Argument(
    metavar="STORE", help="The datastore's directory, or the URL of servers with `live`.")]  # fmt: skip


app.command()(command.build)


@app.command()
def info(store: StorePath, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Print the contents of a datastore."""
    manifest = read_manifest(store)
    if as_json:
        typer.echo(json.dumps(_summary(manifest), indent=2))
        return
    known = manifest.tokenizer
    typer.echo(f"datastore   {store}")
    typer.echo(f"contents    {command.contents(manifest)}")
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
    tokenizer: command.TokenizerOption = None,
    vocab_size: Annotated[int | None, typer.Option(metavar="N", help="The model's vocabulary size.")] = None,
    full: Annotated[bool, typer.Option(
        "--full", help="Prove the order of every suffix (slow; a byte of memory per token).")] = False,
    erased: Annotated[str | None, typer.Option(
        "--erased", metavar="FILE", help="File of tenants, as for `forget`, that must have no text left.")] = None,
) -> None:  # fmt: skip
    """Check a datastore: checksums, counts, order of the suffixes, and that it fits a model; with --erased, that no
    byte of learnt files names these tenants. Exit code 1 if a check fails."""
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
    typer.echo(f"{store}: OK. {command.contents(manifest)}; checksums match, {order}")


@app.command()
def merge(
    out: command.OutPath,
    stores: Annotated[list[Path], typer.Argument(
        metavar="STORE...", help="Datastores of the same tokenizer.", parser=_place)],
    memory: command.MemoryOption = "2GiB",
    force: command.ForceOption = False,
) -> None:  # fmt: skip
    """Merge datastores, in as few sub-indices as the memory allows. Learnt text is not included."""
    with command.building():
        manifest = merge_stores(out, stores, memory=parse_size(memory), replace=force)
    typer.echo(f"{out}: {command.contents(manifest)}")


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
    """Erase learnt text, on disk and in servers of this host that learn there, or at a URL and in all servers that
    learn there. With --tenants and --before, only text that both select."""
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
    accept: Annotated[bool, typer.Option("--accept", help="Put tenants that were kept apart into one file.")] = False,
) -> None:  # fmt: skip
    """Write learnt text as token ids, -1 after each document. A store built of it drafts for all tenants."""
    documents, n_tokens = maintenance.export(store, out, _tenants(tenants), accept=accept)
    typer.echo(f"{out}: {n_tokens:,} tokens in {documents:,} documents")


@app.command()
def isolation(
    store: StorePath,
    kind: Annotated[Isolation, typer.Argument(help="Value of the server's option.")],
    accept: Annotated[bool, typer.Option("--accept", help="Let all be drafted from one tenant's text.")] = False,
) -> None:
    """Let servers with this isolation use text learnt under another one."""
    if not accept:
        raise DatastoreError(f"requests of everybody may then be drafted from all of {store}: say so with --accept")
    before = maintenance.accept_isolation(store, kind)
    typer.echo(f"{store}: isolation '{kind}', before '{before}'")


def _tenants(source: str | None) -> list[str]:
    """Read keys of tenants from a file: salts are secrets, and arguments are visible to every user of the machine.
    Raises DatastoreError: the file cannot be read, or is empty."""
    if source is None:
        return []
    with reporting("read", Path(source)):
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    keys = [key for line in text.splitlines() if (key := parse_tenant(line))]
    if not keys:
        raise DatastoreError(f"{'standard input' if source == '-' else source} names no tenant: give one a line")
    return keys


def _summary(manifest: Manifest) -> dict[str, object]:
    keep = {"format_version", "vocab_size", "tokenizer", "created_at", "created_by"}
    totals = {name: getattr(manifest, name) for name in ("n_tokens", "n_documents", "max_token", "size")}
    names = ("name", "n_tokens", "n_documents", "size")
    subs = [{name: getattr(sub, name) for name in names} for sub in manifest.sub_indices]
    return {**manifest.model_dump(mode="json", include=keep), **totals, "sub_indices": subs}
