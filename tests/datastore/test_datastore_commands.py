"""Commands over stores, merging them, and commands over what was learnt."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from freedraft.fingerprints import tokenizer_fingerprint
from freedraft.tenants import tenant_key
from sssd_plugin.datastore.disk.format import TokenizerEntry, digest
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.live.store import LiveStore
from sssd_plugin.datastore.tokenizer import load
from tests.support.stores import build_store, documents_at, documents_of, leftovers, number_in, one_line, run

VOCAB = 100  # of stores made of token ids


@pytest.fixture
def source(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "source.jsonl"
    file.write_text("".join(json.dumps({"text": text[a : a + 900]}) + "\n" for a in range(0, 45_000, 900)))
    return file


def test_build_info_verify(tmp_path: Path, source: Path, tokenizer_folder: Path) -> None:
    out = tmp_path / "store"
    args = ("build", out, source, "--tokenizer", tokenizer_folder, "--sub-index-tokens", 500)
    result = run(*args)
    assert result.exit_code == 0, result.output
    assert "tokens in" in result.stdout and "us/token" in result.stdout
    assert "100%" in result.stderr and "/s" in result.stderr, "progress and rate"
    assert "warning: " in result.stderr and "larger --memory" in result.stderr, "many sub-indices"
    assert "exists: choose another path, or give --force" in one_line(*args, "-q")
    assert run(*args, "-q", "--force").exit_code == 0 and leftovers(tmp_path) == []
    opened = Datastore.open(out, fingerprint=tokenizer_fingerprint(load(tokenizer_folder)))
    manifest = opened.manifest
    assert manifest.n_documents >= 50 and len(manifest.sub_indices) > 1
    assert manifest.tokenizer is not None and manifest.tokenizer.name == tokenizer_folder.name

    result = run("info", out)
    assert f"{manifest.n_tokens:,} tokens" in result.stdout and manifest.tokenizer.fingerprint in result.stdout
    assert digest(out) in result.stdout
    for options in [(), ("--full",), ("--tokenizer", tokenizer_folder), ("--vocab-size", manifest.vocab_size)]:
        result = run("verify", out, *options)
        assert result.exit_code == 0 and "OK" in result.stdout, result.output


def test_token_files_need_no_tokenizer(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, -1, 2**31 - 1], np.int64))
    args = ("build", tmp_path / "s", tmp_path / "a.npy", "-q")
    assert "give --tokenizer (or --vocab-size)" in one_line(*args)
    (tmp_path / "a.txt").write_text("text")
    assert "text needs a tokenizer: give --tokenizer" in one_line(*args, tmp_path / "a.txt", "--vocab-size", 2**31)
    assert run(*args, "--vocab-size", 2**31).exit_code == 0
    assert "not recorded" in run("info", tmp_path / "s").stdout
    assert run("verify", tmp_path / "s", "--full").exit_code == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--memory", "lots"), "'lots' is not a size for --memory"),
        (("--memory", "1MB"), "--memory 976.6 KiB is too little: give at least"),
        (("--sub-index-tokens", "3"), "--sub-index-tokens must be from"),
        (("--vocab-size", "-5"), "vocabulary size must be from 1"),
        (("--field", "body"), "has no field 'body'"),
    ],
)
def test_bad_values(
    tmp_path: Path, source: Path, tokenizer_folder: Path, options: tuple[str, ...], complaint: str
) -> None:
    args = ("build", tmp_path / "out", source, "-q", "--tokenizer", tokenizer_folder)
    assert complaint in one_line(*args, *options)
    assert not (tmp_path / "out").exists() and leftovers(tmp_path) == []


def test_verify_and_info_of_bad_stores(tmp_path: Path, tokenizer_folder: Path) -> None:
    store = tmp_path / "store"
    build_store(store, [[1, 2]], VOCAB, tokenizer=TokenizerEntry(name="other", fingerprint="a" * 64))
    for command, code in (("info", 2), ("verify", 1)):
        assert "no datastore at" in one_line(command, tmp_path / "nowhere")
        assert "is not a datastore" in one_line(command, tmp_path, code=code)
    assert "token ids up to" in one_line("verify", store, "--vocab-size", 2, code=1)
    assert "another tokenizer" in one_line("verify", store, "--tokenizer", tokenizer_folder, code=1)


def learn(directory: Path, texts: dict[str | None, list[int]]) -> None:
    store = LiveStore(VOCAB, directory, isolation="shared")
    for name, text in texts.items():
        store.insert(np.array(text, np.int32), number_in(store, tenant_key(name)))
    store.close()


def learnt_at(directory: Path) -> list[list[int]]:
    store = LiveStore(VOCAB, directory, isolation="shared")
    found = [text for run_ in store.runs.tenants[0].all_runs for text in documents_of(run_.sub)]
    store.close()
    return sorted(found)


def test_forget_tenants_of_a_file_or_of_standard_input(tmp_path: Path) -> None:
    learn(tmp_path, {"a": [1, 2], "b": [3, 4], "c d": [7], None: [5, 6]})
    (tmp_path / "names").write_text("a\n\nnobody\n")
    result = run("forget", tmp_path, "--tenants", tmp_path / "names")
    assert result.exit_code == 0 and "1 documents, 2 tokens" in result.output
    assert learnt_at(tmp_path) == [[3, 4], [5, 6], [7]]
    result = run("forget", tmp_path, "--tenants", "-", input='["c d", ""]\n')
    assert result.exit_code == 0 and "1 documents, 1 tokens" in result.output
    assert run("verify", tmp_path, "--erased", tmp_path / "names").exit_code == 0
    assert "still names this tenant" in one_line("verify", tmp_path, "--erased", "-", input="b\n", code=1)


def test_forget_what_is_old(tmp_path: Path) -> None:
    learn(tmp_path, {"a": [1, 2], "b": [3, 4]})
    time.sleep(1.1)
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    learn(tmp_path, {"a": [7, 8]})
    for tenants, left in ((("--tenants", "-"), [[3, 4], [7, 8]]), ((), [[7, 8]])):
        assert run("forget", tmp_path, "--before", moment, *tenants, input="a").exit_code == 0
        assert learnt_at(tmp_path) == left


def test_forget_says_what_it_needs(tmp_path: Path) -> None:
    for arguments, words in (
        ((tmp_path,), "--tenants FILE"),
        ((tmp_path, "--tenants", "-"), "is empty"),
        ((tmp_path, "--tenants", tmp_path / "none"), "correct the path"),
        ((tmp_path, "--before", "2020-01-01"), "learnt nothing"),
    ):
        assert words in one_line("forget", *arguments)
    learn(tmp_path, {"a": [1]})
    assert "not a time" in one_line("forget", tmp_path, "--before", "yesterday")
    assert learnt_at(tmp_path) == [[1]]


def test_a_wider_isolation_must_be_accepted(tmp_path: Path) -> None:
    LiveStore(VOCAB, tmp_path, isolation="strict").close()
    with pytest.raises(DatastoreError, match="--accept"):
        learnt_at(tmp_path)
    assert "--accept" in one_line("isolation", tmp_path, "shared")
    held = LiveStore(VOCAB, tmp_path)
    assert "stop it first" in one_line("isolation", tmp_path, "shared", "--accept")
    held.close()
    accepted = run("isolation", tmp_path, "shared", "--accept")
    assert accepted.exit_code == 0 and "isolation 'shared', before 'strict'" in accepted.output
    assert learnt_at(tmp_path) == []


def test_merge_stores_of_one_tokenizer(tmp_path: Path) -> None:
    texts = {"a": [[1, 2, 3], [4, 5]], "aa": [[6, 7]], "b": [[8], [9, 10, 11]], "": [[1, 2]]}
    for name, documents in texts.items():
        entry = TokenizerEntry(name=name, fingerprint=name[0] * 64) if name else None
        build_store(tmp_path / f"of {name}", documents, VOCAB, tokenizer=entry)
    a, aa, b, unknown = (tmp_path / f"of {name}" for name in texts)
    for other, words in ((b, "different tokenizers"), (unknown, "do not record")):
        assert words in one_line("merge", tmp_path / "all", a, other)
    assert not (tmp_path / "all").exists()
    assert run("merge", tmp_path / "all", a, aa).exit_code == 0
    assert documents_at(tmp_path / "all") == [*texts["a"], *texts["aa"]]
    assert run("verify", tmp_path / "all", "--full").exit_code == 0


def test_a_build_does_not_replace_what_was_learnt_at(tmp_path: Path) -> None:
    target = tmp_path / "store"
    build_store(target, [[1, 2, 3]], VOCAB)
    learn(target, {None: [4, 5]})
    with pytest.raises(DatastoreError, match="learnt while serving"):
        build_store(target, [[7, 8]], VOCAB, replace=True)
    assert learnt_at(target) == [[4, 5]]
    assert documents_at(target) == [[1, 2, 3]]
