from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sssd_plugin.datastore import tokenizer
from sssd_plugin.datastore.errors import DatastoreError

EOS = {"content": "<eos>", "special": True}


def configured(source: Path, target: Path, **config: Any) -> Path:
    shutil.copytree(source, target)
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return target


def test_nothing_is_cut_off_or_padded(tokenizer_folder: Path, text: str) -> None:
    loaded = tokenizer.load(tokenizer_folder)
    assert len(loaded.encode(text).ids) > 1_000
    assert len(loaded.encode("a").ids) == 1
    assert loaded.decode(loaded.encode(text).ids) == text


def test_fingerprint_tells_tokenizers_apart(tokenizer_folder: Path) -> None:
    loaded = tokenizer.load(tokenizer_folder)
    before = tokenizer.fingerprint(loaded)
    assert len(before) == 64
    assert before == tokenizer.fingerprint(tokenizer.load(tokenizer_folder / "tokenizer.json"))
    loaded.add_tokens(["brand new"])
    assert tokenizer.fingerprint(loaded) != before
    assert tokenizer.vocab_size(loaded) == max(loaded.get_vocab().values()) + 1


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"pad_token": "<pad>", "bos_token": "<s>"},
        {"extra_special_tokens": ["<x1>", "<x2>"], "pad_token": "<pad>"},
        {"added_tokens_decoder": {"0": EOS, "400": {"content": "<tool>", "special": False}}, "unk_token": "<unk>"},
    ],
)
def test_fingerprint_equals_that_of_transformers(
    tokenizer_folder: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = configured(tokenizer_folder, tmp_path / "model", **config)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours = tokenizer.load(folder)
    assert ours.get_vocab() == theirs.get_vocab()
    assert tokenizer.fingerprint(ours) == tokenizer.fingerprint(theirs)
    sample = "def draft(self):\n    return <tool> the value"
    assert ours.encode(sample, add_special_tokens=False).ids == theirs(sample, add_special_tokens=False).input_ids


def test_tokenizers_that_cannot_be_loaded(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    (configured(tokenizer_folder, tmp_path / "model") / "tokenizer_config.json").write_text("{")
    (tmp_path / "empty").mkdir()
    for folder, words in {
        "nowhere": "no tokenizer at .*nowhere: give the folder of the model",
        ".": "holds no tokenizer that transformers can load",
        "model": "holds no tokenizer that transformers can load",
        "empty": "give the folder of the model, with its tokenizer.json",
    }.items():
        with pytest.raises(DatastoreError, match=words) as error:
            tokenizer.load(tmp_path / folder)
        assert "\n" not in str(error.value)
