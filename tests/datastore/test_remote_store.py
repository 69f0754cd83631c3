"""Stores at URLs: copied once, checked, and every failure is one line."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sssd_plugin.datastore.cli import app
from sssd_plugin.datastore.disk.bucket import local_copy
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.options import SssdOptions
from tests.support.stores import build_store, documents_of

fsspec = pytest.importorskip("fsspec")
TEXTS = [[1, 2, 3], [4, 5]]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store in fsspec's memory, as object storage would hold it: names, no folders."""
    build_store(tmp_path / "made", TEXTS, 10)
    memory = fsspec.filesystem("memory")
    for path in (tmp_path / "made").rglob("*"):
        if path.is_file():
            memory.pipe_file(f"/bucket/{tmp_path.name}/{path.relative_to(tmp_path / 'made')}", path.read_bytes())
    return f"memory://bucket/{tmp_path.name}"


def test_a_store_is_copied_once(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    copy = local_copy(url, cache)
    with Datastore.open(copy) as store:
        assert documents_of(store.snapshot.sub_indices[0]) == TEXTS
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "get_file", None)
    assert local_copy(url, cache) == copy


def test_options_take_a_url(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREEDRAFT_CACHE", str(tmp_path / "cache"))
    options = SssdOptions.read({"datastore": url}, {})
    assert options.static_store is not None and options.static_store.parent.parent == tmp_path / "cache"
    environment = {"FREEDRAFT_DATASTORE": url, "FREEDRAFT_LIVE": "true"}  # each is read for itself
    for fleet in (SssdOptions.read({"datastore": url, "live": True}, {}), SssdOptions.read({}, environment)):
        assert (fleet.datastore, fleet.static_store) == (url, None)
    with pytest.raises(DatastoreError, match="no datastore at memory://nowhere") as error:
        _ = SssdOptions.read({"datastore": "memory://nowhere"}, {}).static_store
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("nosuchprotocol://x/y", "fsspec driver"), ("memory://bucket/none", "no datastore at"),
     ("http://127.0.0.1:9/store", "127.0.0.1:9")],
)  # fmt: skip
def test_what_cannot_be_reached_is_one_line(tmp_path: Path, wrong: str, words: str) -> None:
    with pytest.raises(DatastoreError, match=words) as error:
        local_copy(wrong, tmp_path / "cache")
    assert "\n" not in str(error.value)


def test_a_damaged_file_leaves_nothing_in_the_cache(tmp_path: Path, url: str) -> None:
    memory = fsspec.filesystem("memory")
    (name,) = [n for n in memory.find(f"/bucket/{tmp_path.name}") if n.endswith("suffix_array.i32")]
    content = bytearray(memory.cat_file(name))
    content[0] ^= 1
    memory.pipe_file(name, bytes(content))
    with pytest.raises(DatastoreError, match="corrupted") as error:
        local_copy(url, tmp_path / "cache")
    assert url in str(error.value) and [p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()] == ["lock"]
    memory.rm_file(name)
    with pytest.raises(DatastoreError, match="no datastore at"):
        local_copy(url, tmp_path / "cache")


def test_the_last_copy_that_is_whole(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store is out of reach: not one that a killed process was fetching, nor what is removed or damaged."""
    cache = tmp_path / "cache"
    copy = local_copy(url, cache)
    for name in (f".{copy.name}.1234", "removed", "damaged"):
        newer = shutil.copytree(copy, copy.with_name(name), symlinks=True)
        os.utime(newer, (2e9, 2e9))
    (newer / "manifest.json").write_bytes(b"")
    stat = Path.stat

    def vanished(path: Path, **how: bool) -> os.stat_result:
        if path.name == "removed":
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return stat(path, **how)

    def down(*arguments: object, **how: object) -> None:
        raise ConnectionError("down")

    for name in ("ls", "cat_file", "exists"):
        monkeypatch.setattr(type(fsspec.filesystem("memory")), name, down)
    monkeypatch.setattr(Path, "stat", vanished)
    assert local_copy(url, cache) == copy


def test_a_copy_that_a_power_cut_damaged_is_fetched_again(tmp_path: Path, url: str) -> None:
    cache = tmp_path / "cache"
    copy = local_copy(url, cache)
    (copy / "manifest.json").write_bytes(b"")
    assert local_copy(url, cache) == copy
    with Datastore.open(copy) as store:
        assert documents_of(store.snapshot.sub_indices[0]) == TEXTS


def test_commands_take_a_url(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREEDRAFT_CACHE", str(tmp_path / "cache"))
    run = CliRunner().invoke
    assert "5 tokens in 2 documents" in run(app, ["info", url]).output
    assert run(app, ["verify", url]).exit_code == 0
    assert run(app, ["merge", str(tmp_path / "all"), url, str(tmp_path / "made")]).exit_code == 0
    with Datastore.open(tmp_path / "all") as store:
        assert store.n_tokens == 10
    missing = run(app, ["info", "memory://nowhere"])
    assert missing.exit_code == 2 and "no datastore at memory://nowhere" in " ".join(missing.stderr.split())
