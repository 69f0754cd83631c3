from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.tokenizer import fingerprint, load
from tests.support.stores import edit_manifest, leftovers, run


def error(*args: object) -> str:
    """The one line with which a command fails."""
    result = run(*args)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@pytest.fixture
def source(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "source.jsonl"
    file.write_text("".join(json.dumps({"text": text[a : a + 900]}) + "\n" for a in range(0, 45_000, 900)))
    return file


@pytest.fixture
def store(tmp_path: Path, source: Path, tokenizer_folder: Path) -> Path:
    result = run("build", tmp_path / "store", source, "--tokenizer", tokenizer_folder, "--quiet")
    assert result.exit_code == 0, result.output
    return tmp_path / "store"


def test_build_info_verify(tmp_path: Path, source: Path, tokenizer_folder: Path) -> None:
    out = tmp_path / "store"
    result = run("build", out, source, "--tokenizer", tokenizer_folder, "--sub-index-tokens", 5_000)
    assert result.exit_code == 0, result.output
    assert "tokens in" in result.stdout and "us/token" in result.stdout
    assert "100%" in result.stderr and "/s" in result.stderr, "progress and rate"
    with Datastore.open(out, fingerprint=fingerprint(load(tokenizer_folder))) as opened:
        manifest = opened.manifest
    assert manifest.n_documents >= 50 and len(manifest.sub_indices) > 1
    assert manifest.tokenizer is not None and manifest.tokenizer.name == tokenizer_folder.name

    result = run("info", out)
    assert result.exit_code == 0
    assert f"{manifest.n_tokens:,} tokens" in result.stdout and manifest.tokenizer.fingerprint in result.stdout
    summary = json.loads(run("info", out, "--json").stdout)
    assert summary["n_tokens"] == manifest.n_tokens and len(summary["sub_indices"]) == len(manifest.sub_indices)
    assert summary["size"] == sum(path.stat().st_size for path in out.rglob("*.i32"))

    for options in [(), ("--full",), ("--tokenizer", tokenizer_folder), ("--vocab-size", manifest.vocab_size)]:
        result = run("verify", out, *options)
        assert result.exit_code == 0 and "good" in result.stdout, result.output


def test_a_warning_when_sub_indices_are_too_many(tmp_path: Path, source: Path, tokenizer_folder: Path) -> None:
    result = run("build", tmp_path / "s", source, "--tokenizer", tokenizer_folder, "--sub-index-tokens", 500, "-q")
    assert result.exit_code == 0
    assert "warning: " in result.stderr and "larger --memory" in result.stderr


def test_token_files_need_no_tokenizer(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, -1, 2**31 - 1], np.int64))
    assert "give --tokenizer (or --vocab-size)" in error("build", tmp_path / "s", tmp_path / "a.npy")
    assert "token id 2147483647 is outside the vocabulary of 100" in error(
        "build", tmp_path / "s", tmp_path / "a.npy", "--vocab-size", 100, "-q"
    )
    assert run("build", tmp_path / "s", tmp_path / "a.npy", "--vocab-size", 2**31, "-q").exit_code == 0
    assert "not recorded" in run("info", tmp_path / "s").stdout
    assert run("verify", tmp_path / "s", "--full").exit_code == 0


def test_force(store: Path, source: Path, tokenizer_folder: Path) -> None:
    args = ("build", store, source, "--tokenizer", tokenizer_folder, "-q")
    assert "exists: choose another path, or give --force" in error(*args)
    assert run(*args, "--force").exit_code == 0
    assert run("verify", store).exit_code == 0
    assert leftovers(store.parent) == []


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--memory", "lots"), "'lots' is not a size for --memory"),
        (("--memory", "1MB"), "--memory 976.6 KiB is too little: give at least"),
        (("--sub-index-tokens", "3"), "--sub-index-tokens must be from"),
        (("--vocab-size", "-5"), "vocabulary size must be from 1"),
        (("--field", "body"), "has no field 'body'"),
        (("--ray", "auto", "--workers", "2"), "not both"),
        (("--tokenizer", "/nowhere"), "no tokenizer at /nowhere"),
    ],
)
def test_bad_values(
    tmp_path: Path, source: Path, tokenizer_folder: Path, options: tuple[str, ...], complaint: str
) -> None:
    args = ("build", tmp_path / "out", source, "-q", "--tokenizer", tokenizer_folder)
    assert complaint in error(*args, *options)
    assert not (tmp_path / "out").exists() and leftovers(tmp_path) == []


def test_verify_and_info_of_bad_stores(tmp_path: Path, store: Path, tokenizer_folder: Path) -> None:
    for command in ("info", "verify"):
        assert "no datastore at" in error(command, tmp_path / "nowhere")
        assert "is not a datastore" in error(command, tmp_path)
    assert "token ids up to" in error("verify", store, "--vocab-size", 5)
    other = tmp_path / "other"
    other.mkdir()
    tokenizer = load(tokenizer_folder)
    tokenizer.add_tokens(["something else"])
    tokenizer.save(str(other / "tokenizer.json"))
    assert "another tokenizer" in error("verify", store, "--tokenizer", other)
    file = next(store.rglob("suffix_array.i32"))
    content = bytearray(file.read_bytes())
    content[77] ^= 4
    file.write_bytes(content)
    assert f"{file} is corrupted" in error("verify", store)
    edit_manifest(store, lambda manifest: manifest.update(format_version=2))
    assert "upgrade freedraft" in error("info", store)
