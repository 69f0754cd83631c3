"""Tokenizers: loading one from a model folder; `fingerprint` ties a store to one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freedraft.fingerprints import HasVocabulary
from freedraft.fingerprints import tokenizer_fingerprint as fingerprint
from sssd_plugin.datastore.errors import DatastoreError, first_line, reporting

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["fingerprint", "load", "vocab_size"]

_NAMED_SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def vocab_size(tokenizer: HasVocabulary) -> int:
    """Return the largest token id plus one."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def load(path: Path | str) -> Tokenizer:
    """Return the tokenizer of a model folder (or of a `tokenizer.json`), with truncation and padding off.

    It has the vocabulary that `transformers.AutoTokenizer` gives the same folder: tokens that only
    `tokenizer_config.json` names are added.

    Raises:
        DatastoreError: no such folder, no tokenizer in it, or `tokenizers` is not installed.
    """
    path = Path(path)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DatastoreError(
            "reading a tokenizer needs the `tokenizers` package: pip install 'freedraft[calibrate]'"
        ) from None
    file = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise DatastoreError(f"no tokenizer at {path}: give the folder of the model, with its tokenizer.json")
    if not file.exists():
        tokenizer = _load_with_transformers(path)
    else:
        with reporting("read", file):
            content = file.read_bytes()
        try:
            tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise DatastoreError(f"{file} is not a tokenizer ({first_line(error)}): download it again") from None
        _add_configured_tokens(tokenizer, file.with_name("tokenizer_config.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_with_transformers(path: Path) -> Tokenizer:
    """Load a folder in another format than tokenizers' own, which transformers can convert."""
    remedy = "give the folder of the model, with its tokenizer.json"
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise DatastoreError(f"{path} has no tokenizer.json: {remedy}, or install transformers") from None
    try:
        loaded = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise DatastoreError(
            f"{path} holds no tokenizer that transformers can load ({first_line(error)}): {remedy}"
        ) from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise DatastoreError(f"the tokenizer of {path} has no fast version: {remedy}")
    return backend


def _add_configured_tokens(tokenizer: Tokenizer, file: Path) -> None:
    """Add the tokens of `tokenizer_config.json` that `tokenizer.json` lacks, in the order of transformers."""
    from tokenizers import AddedToken

    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        raise DatastoreError(f"{file} cannot be read as JSON: download it again") from None
    if tokenizer.padding and not config.get("pad_token"):
        config["pad_token"] = tokenizer.padding["pad_token"]
    added: dict[str, Any] = config.get("added_tokens_decoder") or {}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    entries = [
        *(added[key] for key in sorted(added, key=int)),
        *(config.get(f"{name}_token") for name in _NAMED_SPECIAL_TOKENS),
        *(extra.values() if isinstance(extra, dict) else extra),
    ]
    vocabulary = tokenizer.get_vocab()
    for entry in entries:
        content = entry.get("content") if isinstance(entry, dict) else entry
        if not isinstance(content, str) or content in vocabulary:
            continue
        special = bool(entry.get("special", True)) if isinstance(entry, dict) else True
        tokenizer.add_tokens([AddedToken(content, special=special, normalized=False)])
        vocabulary = tokenizer.get_vocab()
