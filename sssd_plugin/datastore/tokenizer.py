"""Tokenizers, from a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from freedraft.extras import require
from sssd_plugin.datastore.errors import DatastoreError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def vocab_size(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def load(path: Path | str) -> Tokenizer:
    """Return the tokenizer of a model folder (or of the `tokenizer.json` in one), with truncation and padding off;
    `DatastoreError` if there is none, ValueError if transformers is not installed."""
    path = Path(path)
    remedy = "give the folder of the model, with its tokenizer.json"
    if not path.exists():
        raise DatastoreError(f"no tokenizer at {path}: {remedy}")
    require("reading a tokenizer", "calibrate", "transformers")
    from transformers import AutoTokenizer

    folder = path if path.is_dir() else path.parent
    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        wrong = f"holds no tokenizer that transformers can load ({first_line(error)})"
        raise DatastoreError(f"{folder} {wrong}: {remedy}") from None
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    if tokenizer is None:
        raise DatastoreError(f"the tokenizer of {folder} has no fast version: {remedy}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
