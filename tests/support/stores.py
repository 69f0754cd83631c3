"""Stores from documents: building, damaging, looking up by brute force."""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner, Result

from freedraft.tenants import tenant_number
from sssd_plugin.datastore.build.builder import StoreBuilder
from sssd_plugin.datastore.cli import app
from sssd_plugin.datastore.disk.checksum import write_array
from sssd_plugin.datastore.disk.format import Manifest, checksum, file_name, read_manifest
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.index.search import find_ngram
from sssd_plugin.datastore.index.sub_index import DEPTH, SEPARATOR, Snapshot, SubIndex
from sssd_plugin.datastore.live.store import LiveStore

Documents = Sequence[Sequence[int]]


def int32(tokens: Sequence[int]) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def number_in(store: LiveStore, key: str | None) -> int:
    """The number of a tenant in a live store; that of nobody where it has not reached its URL."""
    return -1 if store.key is None else tenant_number(store.key, key)


def joined(documents: Documents) -> list[int]:
    """Tokens of a sub-index: a separator after each document."""
    return [token for document in documents for token in [*map(int, document), SEPARATOR]]


def snapshot_of(sub_indices: Sequence[Documents], vocab_size: int) -> Snapshot:
    return tuple(SubIndex.build(int32(joined(documents)), vocab_size) for documents in sub_indices)


def build_store(target: Path, documents: Iterable[Sequence[int]], vocab_size: int, **settings: Any) -> Manifest:
    with StoreBuilder(target, vocab_size=vocab_size, **settings) as builder:
        for document in documents:
            builder.append(np.array([*document, SEPARATOR], np.int64))
        return builder.finish()


def documents_of(sub: SubIndex) -> list[list[int]]:
    """The documents of a sub-index, as lists."""
    documents: list[list[int]] = [[]]
    for token in sub.tokens[: sub.n].tolist():
        if token == SEPARATOR:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents[-1] == [], "the last document is closed"
    return documents[:-1]


def documents_at(store: Path) -> list[list[int]]:
    """The documents of all sub-indices of a folder."""
    opened = Datastore.open(store)
    return [document for sub in opened.snapshot for document in documents_of(sub)]


def run(*args: object, input: str | None = None) -> Result:
    """A command of `freedraft datastore`."""
    return CliRunner().invoke(app, [str(arg) for arg in args], input=input)


def one_line(*args: object, input: str | None = None, code: int = 2) -> str:
    """The one line with which a command of `freedraft datastore` fails."""
    result = run(*args, input=input)
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@contextmanager
def refused(words: str) -> Iterator[pytest.ExceptionInfo[DatastoreError]]:
    """What happens here raises an error of one line that matches `words`."""
    with pytest.raises(DatastoreError, match=words) as error:
        yield error
    assert "\n" not in str(error.value)


def keys_of(sub: SubIndex) -> NDArray[np.int32]:
    """What each suffix is sorted by, in their order: int32 [m, DEPTH], separators from the end of its document on."""
    places = sub.suffix_array[:, None].astype(np.int64) + np.arange(DEPTH)
    keys = sub.tokens[np.minimum(places, len(sub.tokens) - 1)]
    return np.where(np.logical_or.accumulate(keys == SEPARATOR, 1), SEPARATOR, keys)


def look_up(sub: SubIndex, query: Sequence[int]) -> set[int]:
    """Where `query` occurs, as a draft looks it up."""
    low, high = find_ngram(sub.row[None], 0, int32(query), 0, len(query))
    return set(sub.suffix_array[low:high].tolist())


def brute_force(sub: SubIndex, query: Sequence[int]) -> set[int]:
    tokens, wanted = sub.tokens.tolist(), list(query)
    return {i for i in range(sub.n) if tokens[i : i + len(wanted)] == wanted}


def edit_manifest(store: Path, change: Callable[[dict[str, Any]], None], *, valid_checksum: bool = True) -> None:
    """Apply `change` to the manifest's content, with a checksum that says it is right."""
    path = store / "manifest.json"
    content = json.loads(path.read_bytes())
    change(content)
    if valid_checksum:
        content.pop("checksum")
        content["checksum"] = checksum(content)
    path.write_text(json.dumps(content, indent=1))


def replace_array(store: Path, role: Any, change: Callable[[NDArray[np.int32]], None], sub: int = 0) -> Path:
    """Apply `change` to an array of a sub-index, with checksums that say it is right."""
    entry = read_manifest(store).sub_indices[sub]
    path = store / entry.name / file_name(role)
    array = np.fromfile(path, np.int32)
    change(array)
    path.unlink()
    recorded = write_array(path, array)
    edit_manifest(
        store, lambda content: content["sub_indices"][sub]["files"].update({role: recorded.model_dump(mode="json")})
    )
    return path


def leftovers(folder: Path) -> list[str]:
    """Temporary siblings of a store."""
    return [path.name for path in folder.iterdir() if ".building-" in path.name]


@contextmanager
def read_only_folder() -> Iterator[Path]:
    """A folder with the file `kept` that the process may only read; root is an ordinary user meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "folder"
        folder.mkdir()
        (folder / "kept").write_text("x")
        Path(name).chmod(0o755)
        folder.chmod(0o555)
        root = os.geteuid() == 0
        if root:
            os.setresuid(65534, 65534, 0)
        try:
            yield folder
        finally:
            if root:
                os.setresuid(0, 0, 0)
            folder.chmod(0o755)
        assert [path.name for path in folder.iterdir()] == ["kept"]
