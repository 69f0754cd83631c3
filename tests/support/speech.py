"""A random Whisper of two layers, and prompts with speech: a model of an encoder and a decoder."""

import json
from pathlib import Path
from typing import Any

from tests.support.models import save_byte_tokenizer

SHAPE = {"d_model": 64, "num_mel_bins": 80, "max_source_positions": 100, "max_target_positions": 128, "init_std": 0.3}
SHAPE |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "decoder_start_token_id": 1}
SHAPE |= {"suppress_tokens": None, "begin_suppress_tokens": None}
SHAPE |= {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in
          {"layers": 2, "attention_heads": 2, "ffn_dim": 96}.items()}  # fmt: skip


def save_speech_model(folder: Path) -> Path:
    """float32, of two seconds of speech, with a tokenizer of bytes."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    config = transformers.WhisperConfig(vocab_size=save_byte_tokenizer(folder, ""), **SHAPE)
    config.dtype = torch.float32
    torch.manual_seed(7)
    transformers.WhisperForConditionalGeneration(config).float().eval().save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=2).save_pretrained(folder)
    described = folder / "tokenizer_config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"tokenizer_class": "WhisperTokenizer"}))
    return folder


def speech_prompt(tokens: list[int], seed: int) -> dict[str, Any]:
    """For vLLM: noise, and what its text begins with."""
    import numpy as np

    noise = np.random.default_rng(seed).normal(size=16000 + 1000 * seed).astype(np.float32)
    heard = {"prompt": "", "multi_modal_data": {"audio": (noise, 16000)}}
    return {"encoder_prompt": heard, "decoder_prompt": {"prompt_token_ids": [SHAPE["bos_token_id"], *tokens]}}
