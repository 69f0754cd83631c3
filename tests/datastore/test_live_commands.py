"""Commands over what was learnt, and merging stores."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from freedraft.tenants import tenant_key
from sssd_plugin.datastore.disk.format import TokenizerEntry
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.live.opening import open_live
from tests.support.stores import build_store, documents_at, documents_of, run

VOCAB = 100


def learn(directory: Path, texts: dict[str | None, list[int]]) -> None:
    store = open_live(directory, VOCAB, isolation="shared")
    for name, text in texts.items():
        store.insert(np.array(text, np.int32), store.tenant(tenant_key(name)))
    store.close()


def learnt(directory: Path) -> list[list[int]]:
    store = open_live(directory, VOCAB, isolation="shared")
    found = [text for run_ in store.tenants[0].all_runs for text in documents_of(run_.sub)]
    store.close()
    return sorted(found)


def test_forget_tenants_of_a_file_or_of_standard_input(tmp_path: Path) -> None:
    learn(tmp_path, {"a": [1, 2], "b": [3, 4], "c d": [7], None: [5, 6]})
    (tmp_path / "names").write_text("a\n\nnobody\n")
    result = run("forget", tmp_path, "--tenants", tmp_path / "names")
    assert result.exit_code == 0 and "1 documents, 2 tokens" in result.output
    assert learnt(tmp_path) == [[3, 4], [5, 6], [7]]
    result = run("forget", tmp_path, "--tenants", "-", input='["c d", ""]\n')
    assert result.exit_code == 0 and "1 documents, 1 tokens" in result.output
    assert run("verify", tmp_path, "--erased", tmp_path / "names").exit_code == 0
    left = run("verify", tmp_path, "--erased", "-", input="b\n")
    assert left.exit_code == 1 and "still names this tenant" in left.stderr


def test_forget_what_is_old(tmp_path: Path) -> None:
    learn(tmp_path, {"a": [1, 2], "b": [3, 4]})
    time.sleep(1.1)
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    learn(tmp_path, {"a": [7, 8]})
    for tenants, left in ((("--tenants", "-"), [[3, 4], [7, 8]]), ((), [[7, 8]])):
        assert run("forget", tmp_path, "--before", moment, *tenants, input="a").exit_code == 0
        assert learnt(tmp_path) == left


def test_forget_says_what_it_needs(tmp_path: Path) -> None:
    for arguments, words in (
        ((tmp_path,), "--tenants FILE"),
        ((tmp_path, "--tenants", "-"), "names no tenant"),
        ((tmp_path, "--tenants", tmp_path / "none"), "correct the path"),
        ((tmp_path, "--before", "2020-01-01"), "learnt nothing"),
    ):
        result = run("forget", *arguments)
        assert result.exit_code == 1 and words in result.stderr and result.stderr.count("\n") == 1
    learn(tmp_path, {"a": [1]})
    assert "not a time" in run("forget", tmp_path, "--before", "yesterday").stderr
    assert learnt(tmp_path) == [[1]]


def test_a_wider_isolation_must_be_accepted(tmp_path: Path) -> None:
    open_live(tmp_path, VOCAB, isolation="strict").close()
    with pytest.raises(DatastoreError, match="--accept"):
        learnt(tmp_path)
    refused = run("isolation", tmp_path, "shared")
    assert refused.exit_code == 1 and "--accept" in refused.stderr
    held = open_live(tmp_path, VOCAB)
    assert "stop it first" in run("isolation", tmp_path, "shared", "--accept").stderr
    held.close()
    accepted = run("isolation", tmp_path, "shared", "--accept")
    assert accepted.exit_code == 0 and "isolation 'shared', before 'strict'" in accepted.output
    assert learnt(tmp_path) == []


def test_merge_stores(tmp_path: Path) -> None:
    texts = [[[1, 2, 3], [4, 5]], [[6, 7]], [[8], [9, 10, 11]]]
    for number, documents in enumerate(texts):
        build_store(tmp_path / str(number), documents, VOCAB, sub_index_tokens=64)
    result = run("merge", tmp_path / "all", *(tmp_path / str(number) for number in range(3)))
    assert result.exit_code == 0, result.output
    assert documents_at(tmp_path / "all") == [text for documents in texts for text in documents]
    assert run("verify", tmp_path / "all", "--full").exit_code == 0


def test_stores_of_different_tokenizers_are_not_merged(tmp_path: Path) -> None:
    makers = [TokenizerEntry(name=c, fingerprint=c * 64) for c in "ab"]
    for maker in makers:
        build_store(tmp_path / maker.name, [[1, 2]], VOCAB, tokenizer=maker)
    build_store(tmp_path / "c", [[1, 2]], VOCAB)
    for other, words in (("b", "different tokenizers"), ("c", "do not record")):
        result = run("merge", tmp_path / "all", tmp_path / "a", tmp_path / other)
        assert result.exit_code == 1 and words in result.stderr
    assert not (tmp_path / "all").exists()


def test_a_build_does_not_replace_what_was_learnt(tmp_path: Path) -> None:
    target = tmp_path / "store"
    build_store(target, [[1, 2, 3]], VOCAB)
    learn(target, {None: [4, 5]})
    with pytest.raises(DatastoreError, match="learnt while serving"):
        build_store(target, [[7, 8]], VOCAB, replace=True)
    assert learnt(target) == [[4, 5]]
    assert documents_at(target) == [[1, 2, 3]]
