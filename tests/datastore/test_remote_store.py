"""Stores at URLs: copied once, checked, and every failure is one line."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sssd_plugin.datastore.disk.format import ROLES
from sssd_plugin.datastore.disk.remote import local_copy
from sssd_plugin.options import SssdOptions
from tests.support.stores import build_store, documents_at, refused, run

fsspec = pytest.importorskip("fsspec")
TEXTS = [[1, 2, 3], [4, 5]]
ALL = sorted(f"{role}.i32" for role in ROLES)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FREEDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store in fsspec's memory, as object storage would hold it: names, no folders."""
    build_store(tmp_path / "made", TEXTS, 10)
    memory = fsspec.filesystem("memory")
    for path in (tmp_path / "made").rglob("*"):
        if path.is_file():
            memory.pipe_file(f"/bucket/{tmp_path.name}/{path.relative_to(tmp_path / 'made')}", path.read_bytes())
    return f"memory://bucket/{tmp_path.name}"


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are fetched."""
    names: list[str] = []
    kind = type(fsspec.filesystem("memory"))
    plain = kind.get_file

    def get_file(self: object, path: str, *arguments: object, **how: object) -> None:
        names.append(path.rpartition("/")[2])
        plain(self, path, *arguments, **how)

    monkeypatch.setattr(kind, "get_file", get_file)
    return names


def test_a_store_is_copied_once_whoever_asks(url: str, fetched: list[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        (copy,) = set(pool.map(local_copy, [url] * 8))
    assert documents_at(copy) == TEXTS and sorted(fetched) == ALL


@pytest.mark.parametrize("name", ALL)
def test_what_is_damaged_or_missing_is_fetched_again(url: str, fetched: list[str], name: str) -> None:
    copy = local_copy(url)
    (file,) = copy.rglob(name)
    content = file.read_bytes()
    for damaged in (content[:-4] + b"abcd", content[:-4], None):
        fetched.clear()
        file.unlink() if damaged is None else file.write_bytes(damaged)
        (copy / "manifest.json").unlink()  # as a killed process leaves a copy that it was fetching
        assert local_copy(url) == copy
        assert fetched == [name] and documents_at(copy) == TEXTS


def test_copies_that_nobody_used_for_a_day_go(url: str) -> None:
    copy = local_copy(url)
    for name, age in (("day", 90_000), ("hour", 3_600)):
        os.utime(shutil.copytree(copy, copy.with_name(name)), (time.time() - age,) * 2)
    local_copy(url)
    assert {path.name for path in copy.parent.iterdir()} == {copy.name, "hour", "lock"}


def test_options_take_a_url(cache: Path, url: str) -> None:
    options = SssdOptions.read({"datastore": url}, {})
    assert options.static_store is not None and options.static_store.parent.parent == cache
    environment = {"FREEDRAFT_DATASTORE": url, "FREEDRAFT_LIVE": "store"}  # each is read for itself
    for fleet in (SssdOptions.read({"datastore": url, "live": "store"}, {}), SssdOptions.read({}, environment)):
        assert (fleet.datastore, fleet.static_store) == (url, None)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("nosuchprotocol://x/y", "fsspec driver"), ("http://127.0.0.1:9/store", "127.0.0.1:9")],
)
def test_what_cannot_be_reached_is_one_line(wrong: str, words: str) -> None:
    with refused(words):
        local_copy(wrong)


def test_a_store_that_is_damaged_there_is_no_copy(cache: Path, tmp_path: Path, url: str) -> None:
    memory = fsspec.filesystem("memory")
    (name,) = [n for n in memory.find(f"/bucket/{tmp_path.name}") if n.endswith("suffix_array.i32")]
    content = bytearray(memory.cat_file(name))
    content[0] ^= 1
    memory.pipe_file(name, bytes(content))
    with refused("corrupted") as error:
        local_copy(url)
    assert f"{url}/" in str(error.value) and str(cache) not in str(error.value)
    assert not [p for p in cache.rglob("*") if "suffix_array" in p.name or p.name == "manifest.json"]
    memory.rm_file(name)
    with refused("no datastore at"):
        local_copy(url)


def test_the_last_copy_that_is_whole(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store is out of reach: not one that a killed process was fetching, nor a damaged one."""
    copy = local_copy(url)
    for name in (f".{copy.name}.1234", "damaged"):
        newer = shutil.copytree(copy, copy.with_name(name))
        os.utime(newer, (2e9, 2e9))
    (newer / "manifest.json").write_bytes(b"")

    def down(*arguments: object, **how: object) -> None:
        raise ConnectionError("down")

    for name in ("ls", "cat_file", "exists"):
        monkeypatch.setattr(type(fsspec.filesystem("memory")), name, down)
    assert local_copy(url) == copy


def test_commands_take_a_url(tmp_path: Path, url: str) -> None:
    assert "5 tokens in 2 documents" in run("info", url).output
    assert run("verify", url).exit_code == 0
    assert run("merge", tmp_path / "all", url, tmp_path / "made").exit_code == 0
    assert documents_at(tmp_path / "all") == [*TEXTS, *TEXTS]
    missing = run("info", "memory://nowhere")
    assert missing.exit_code == 2 and "no datastore at memory://nowhere" in " ".join(missing.stderr.split())
