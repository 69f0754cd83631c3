import json
from pathlib import Path

import numpy as np
import pytest

WORDS = ["def", "return", "self", "import", "the", "a", "value", "index", "draft", "token", *"():=+\n"]


@pytest.fixture(scope="session")
def text() -> str:
    """Some 60 kB of repetitive text."""
    rng = np.random.default_rng(1)
    return "".join(f"{WORDS[i]}{' ' * (1 + (i % 3 == 0) * 3)}" for i in rng.zipf(1.3, 12_000) % len(WORDS))


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    """A model folder with a small byte-level BPE tokenizer, as transformers would load it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>"], initial_alphabet=alphabet)
    )
    # A tokenizer.json may ask for this; a build must not.
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(length=4)
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
