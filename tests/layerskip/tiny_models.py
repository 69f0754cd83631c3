"""Very small random models of the supported families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = 96
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": WORDS,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def tiny(family: str = "Llama", layers: int = 3, seed: int = 0) -> Any:
    """A random causal language model; its sublayers matter about as much as each other."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | {"num_hidden_layers": layers}))
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
        else:
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    model.generation_config.eos_token_id = None
    return model


def save_folder(path: Path) -> Path:
    """A model folder with a word-level tokenizer; layer 1 hardly does anything, so that it can be skipped."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = tiny()
    for part in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
        part.weight.data *= 0.01
    model.save_pretrained(path)
    words = {f"w{i}": i for i in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w1").save_pretrained(path)
    return path
