"""A random Qwen2.5-VL of two layers with the processor of published ones, and prompts with an image each.

Engines read images by torchvision, which is installed aside (`make build/torchvision`): PyPI's needs CUDA's PyTorch.
"""

import json
import os
from pathlib import Path
from typing import Any

from tests.support.model_classes import SHAPE
from tests.support.models import REPOSITORY, save_byte_tokenizer
from tests.support.prompts import random_ids

TORCHVISION = REPOSITORY / "build" / "torchvision"
MARKS = START, END, IMAGE, VIDEO = range(259, 263)  # behind the bytes and the ends of texts and of turns
NAMES = [f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")]
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
PATCHES = {"patch_size": 14, "temporal_patch_size": 2}
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", "merge_size": 2}
PROCESSOR |= {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280} | PATCHES

BEFORE = 6  # tokens of a prompt before its image
SIZE = (56, 84)  # pixels of an image: 2 by 3 tokens, behind which positions go on as if they were 3
TOKENS, FEWER = 6, 3


def add_torchvision(patch: Any) -> None:
    """To the path of processes that the test starts; skips the test where it is not installed. patch: pytest's."""
    import pytest

    if not TORCHVISION.is_dir():
        pytest.skip("needs torchvision: make build/torchvision")
    patch.setenv("PYTHONPATH", str(TORCHVISION), prepend=os.pathsep)


def save_image_model(folder: Path) -> Path:
    """float32, with a tokenizer of bytes; it hardly ever says a mark."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    save_byte_tokenizer(folder, "")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": NAMES})
    assert tokenizer.convert_tokens_to_ids(NAMES) == [*MARKS]
    tokenizer.save_pretrained(folder)
    marks = {"vision_start_token_id": START, "vision_end_token_id": END}
    config = transformers.Qwen2_5_VLConfig(
        text_config=SHAPE | AXES | {"vocab_size": len(tokenizer)},
        vision_config=VISION | PATCHES | {"fullatt_block_indexes": [1], "window_size": 112},
        image_token_id=IMAGE, video_token_id=VIDEO, tie_word_embeddings=False, **marks,
    )  # fmt: skip
    config.dtype = torch.float32
    torch.manual_seed(7)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).float().eval()
    model.lm_head.weight.data[START:] = 0
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def image(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*SIZE, 3), dtype=np.uint8))


def prompts() -> list[list[int]]:
    """Token ids with one mark, which the processor repeats, and text of several lengths behind the image."""
    texts = random_ids([BEFORE + length for length in (5, 12, 20)], 256, first=5, seed=1)
    return [[*text[:BEFORE], START, IMAGE, END, *text[BEFORE:]] for text in texts]
