"""The demo model, very small random models, and what a model goes on with by itself."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_MODEL = Path(os.environ.get("FREEDRAFT_TEST_MODEL", REPOSITORY / "build" / "model"))

VOCAB_SIZE = 96
SHAPE = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3}
SHAPE |= {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}


def tiny_model(family: str = "Llama", *, seed: int, **changes: Any) -> Any:
    """A random causal language model of this family, float32, of SHAPE but for the changes.

    The wide initial range makes its next-token probabilities uneven.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    names = [family + ending for ending in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")]
    kind = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    config = kind.config_class(**SHAPE | changes)
    config.dtype = torch.float32
    return kind(config).float().eval()


def weaken(model: Any, layers: Sequence[int], factor: float) -> None:
    """Scale what these layers add to the stream, so that most drafts without them are right."""
    for index in layers:
        layer = model.model.layers[index]
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight.data *= factor


def save(model: Any, folder: Path, tokenizer: Path | None = None) -> Path:
    """The model in Hugging Face layout, with the tokenizer of the model in `tokenizer`."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (tokenizer / name).is_file():
                shutil.copy(tokenizer / name, folder)
    return folder


def save_adapter(model: Path, folder: Path, seed: int) -> Path:
    """A random LoRA adapter of a saved model, strong enough that it answers otherwise than the model alone."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    config, generator = AutoConfig.from_pretrained(model), torch.Generator().manual_seed(seed)
    hidden, inner, rank, tensors = config.hidden_size, config.intermediate_size, 4, {}
    parts = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for layer in range(config.num_hidden_layers):
        for part, size in parts.items():
            name = f"base_model.model.model.layers.{layer}.mlp.{part}.lora_"
            tensors[f"{name}A.weight"] = torch.randn(rank, size[1], generator=generator) / size[1] ** 0.5
            tensors[f"{name}B.weight"] = torch.randn(size[0], rank, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*parts]}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def save_word_tokenizer(folder: Path, vocab_size: int) -> None:
    """A word-level tokenizer for the words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w1").save_pretrained(folder)


def save_byte_tokenizer(folder: Path, chat_template: str) -> int:
    """A tokenizer whose tokens are bytes and the ends of texts and of a chat's turns; the number of its tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ends = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*ends, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": ends[2], "bos_token": ends[1], "pad_token": ends[2], "unk_token": ends[0]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **special)
    fast.save_pretrained(folder)
    return len(fast)


def continuations(model: Path | Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """What the model itself goes on with, greedily and past any end of text: no engine has to start. model: its folder,
    or itself, where SGLang's configurations have replaced those of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    whole = model
    if isinstance(model, Path):
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    out = []
    for prompt in prompts:
        ids, past, new = torch.tensor([list(prompt)]), None, []
        for _ in range(tokens):
            with torch.no_grad():
                answer = whole(ids, past_key_values=past, use_cache=True)
            past, ids = answer.past_key_values, answer.logits[:, -1].argmax(-1, keepdim=True)
            new.append(int(ids))
        out.append(new)
    return out


def rough_model(family: str = "Llama", seed: int = 0) -> Any:
    """A tiny model of three layers whose sublayers matter about as much as each other, norms included."""
    import torch

    model = tiny_model(family, seed=seed, num_hidden_layers=3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
        else:
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    model.generation_config.eos_token_id = None
    return model
