import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from freedraft.fingerprints import tokenizer_fingerprint
from sssd_plugin.datastore import tokenizer
from sssd_plugin.datastore.build import sources
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.index.sub_index import SEPARATOR
from tests.support.stores import refused


def token_stream(paths: list[Path], folder: Path | None, fields: tuple[str, ...] = ("text",)) -> list[int]:
    loaded = tokenizer.load(folder) if folder else None
    pieces = sources.read_pieces(sources.find_inputs(paths), fields)
    return [int(t) for block in sources.tokenize(pieces, loaded) for t in block.tokens]


def encode(folder: Path, *documents: str) -> list[int]:
    loaded = tokenizer.load(folder)
    return [t for d in documents for t in [*loaded.encode(d, add_special_tokens=False).ids, SEPARATOR]]


def texts(paths: list[Path]) -> list[str]:
    documents = [""]
    for piece in sources.read_pieces(sources.find_inputs(paths)):
        documents[-1] += str(piece.content)
        if piece.last:
            documents.append("")
    return documents[:-1]


def test_jsonl(tmp_path: Path, tokenizer_folder: Path) -> None:
    rows = [
        {"text": "def draft", "meta": {"answer": "the token"}, "a.b": "index"},
        {"text": None, "meta": {"answer": ""}, "a.b": "x"},
        {"text": "é \u2028 return", "meta": {"answer": "self"}, "a.b": "y"},
    ]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows[:2]) + "\n\n" + json.dumps(rows[2], ensure_ascii=False))
    plain = encode(tokenizer_folder, "def draft", "", "é \u2028 return")
    assert token_stream([file], tokenizer_folder) == plain
    nested = token_stream([file], tokenizer_folder, ("meta.answer", "a.b"))
    assert nested == encode(tokenizer_folder, "the token", "index", "", "x", "self", "y")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2 is not JSON"),
        ("\udcff", "line 2 is not JSON"),
        ('{"other": 1, "more": 2}', r"line 2 has no field 'text'.*\(other, more\)"),
        ('["text"]', "line 2 has no field 'text'"),
        ('{"text": 5}', "line 2: field 'text' is a int, not a string"),
    ],
)
def test_bad_json_lines(tmp_path: Path, tokenizer_folder: Path, line: str, complaint: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n", errors="surrogateescape")
    with pytest.raises(DatastoreError, match=complaint) as caught:
        token_stream([file], tokenizer_folder)
    assert str(file) in str(caught.value)


def test_text_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfsecond\r\n")
    (tmp_path / "a.py").write_bytes(b"first \xff")
    (tmp_path / "sub" / "c.md").write_text("third")
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "binary.bin").write_bytes(b"a\0b")
    assert texts([tmp_path]) == ["first \ufffd", "second\n", "third"]
    assert [i.path.name for i in sources.find_inputs([tmp_path], "**/*.md")] == ["c.md"]
    assert texts([tmp_path / "b.txt"]) == ["second\n"]


def test_inputs_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\0\0")
    (tmp_path / "a.txt").write_text("x")
    for words, given in {
        "nowhere does not exist: correct the path": (tmp_path / "nowhere",),
        r"matches '\*.rs': correct --glob": (tmp_path, "*.rs"),
        r"--glob '/etc/\*' is not a pattern": (tmp_path, "/etc/*"),
        "is binary: inputs are": (tmp_path / "binary",),
    }.items():
        with pytest.raises(DatastoreError, match=words):
            sources.find_inputs([given[0]], *given[1:])


def test_long_documents_in_pieces_are_tokenised_alike(
    tmp_path: Path, tokenizer_folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE_CHARS", 700)
    monkeypatch.setattr(sources, "BATCH_CHARS", 3_000)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}))
    assert token_stream([tmp_path], tokenizer_folder) == encode(tokenizer_folder, text, text)
    endless = "x" * 60_000
    for content in (text, endless):
        (tmp_path / "a.txt").write_text(content)
        pieces = list(sources.read_pieces(sources.find_inputs([tmp_path / "a.txt"])))
        assert max(len(piece.content) for piece in pieces) <= 1_400 and len(pieces) > 30
        assert "".join(str(piece.content) for piece in pieces) == content
        assert sum(piece.n_bytes for piece in pieces) == len(content.encode())


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint32, np.int64, ">i4"])
def test_token_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: type) -> None:
    monkeypatch.setattr(sources, "_BLOCK_TOKENS", 3)
    np.save(tmp_path / "a.npy", np.array([1, 2, 3, 4, 40_000], dtype))
    np.save(tmp_path / "b.npy", np.array([5, SEPARATOR, 6], np.int64))
    expected = [1, 2, 3, 4, 40_000, SEPARATOR, 5, SEPARATOR, 6, SEPARATOR]
    assert token_stream([tmp_path], None) == expected


def test_bad_token_files(tmp_path: Path) -> None:
    np.save(tmp_path / "float.npy", np.zeros(3))
    np.save(tmp_path / "flat.npy", np.zeros((3, 3), np.int32))
    np.save(tmp_path / "object.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "empty.npy").write_text("")
    for name in ("float", "flat", "object", "text", "empty"):
        with pytest.raises(DatastoreError, match=f"{name}.npy (must hold|is not a .npy)"):
            token_stream([tmp_path / f"{name}.npy"], None)


def test_nothing_is_cut_off_or_padded(tokenizer_folder: Path, text: str) -> None:
    loaded = tokenizer.load(tokenizer_folder)
    assert len(loaded.encode(text).ids) > 1_000
    assert len(loaded.encode("a").ids) == 1
    assert loaded.decode(loaded.encode(text).ids) == text


def test_fingerprint_tells_tokenizers_apart(tokenizer_folder: Path) -> None:
    """And is that of the tokenizer that engines load."""
    loaded = tokenizer.load(tokenizer_folder)
    before = tokenizer_fingerprint(loaded)
    assert before == tokenizer_fingerprint(tokenizer.load(tokenizer_folder / "tokenizer.json"))
    assert before == tokenizer_fingerprint(AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True))
    loaded.add_tokens(["brand new"])
    assert tokenizer_fingerprint(loaded) != before
    assert tokenizer.vocab_size(loaded) == max(loaded.get_vocab().values()) + 1


def test_tokenizers_that_cannot_be_loaded(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    (shutil.copytree(tokenizer_folder, tmp_path / "model") / "tokenizer_config.json").write_text("{")
    (tmp_path / "empty").mkdir()
    for folder, words in {
        "nowhere": "no tokenizer at .*nowhere: give the folder of the model",
        ".": "holds no tokenizer that transformers can load",
        "model": "holds no tokenizer that transformers can load",
        "empty": "give the folder of the model, with its tokenizer.json",
    }.items():
        with refused(words):
            tokenizer.load(tmp_path / folder)
