"""Small models with skip sets, and how engines with checks are asked."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from layerskip_plugin.skip_set import SkipSet, model_fingerprint
from tests.sglang.conftest import GREEDY, read_counts, sglang_engine
from tests.support.models import save, tiny_model, weaken
from tests.support.prompts import random_ids

LAYERS, VOCAB = 4, 512
# Of the four layers the last two hardly change the stream, so that some drafts without them are accepted.
SETS = {
    "empty": SkipSet.empty(LAYERS),
    "weak": SkipSet(LAYERS, frozenset({2, 3}), frozenset({2, 3})),
    "mixed": SkipSet(LAYERS, frozenset({0, 3}), frozenset({2})),
    "first": SkipSet(LAYERS, frozenset({0, 1}), frozenset({0})),
}


def prompts(lengths=(3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 40, 64)):
    return random_ids(lengths, VOCAB)


def make_model(folder: Path, kind: str, vocab_size: int = VOCAB, context: int = 512) -> Path:
    """A random model of this family, its upper half scaled down, and the skip sets beside it."""
    model = tiny_model(kind, seed=11, vocab_size=vocab_size, num_hidden_layers=LAYERS, max_position_embeddings=context)
    weaken(model, range(LAYERS // 2, LAYERS), 0.03)
    save(model, folder)
    for name, skip_set in SETS.items():
        replace(skip_set, model=model_fingerprint(model.config)).save(folder / f"{name}.json")
    return folder


def options(folder: Path, log: Path, sets: str = "empty weak mixed first", **more: str) -> dict[str, str]:
    return {
        "LAYERSKIP_TEST_LOG": str(log),
        "FREEDRAFT_SKIP_SET": ",".join(str(folder / f"{name}.json") for name in sets.split()),
        **more,
    }


@contextmanager
def checked_engine(folder: Path, sets: str, changed: dict[str, str], **more):
    """An engine over this model with these skip sets, whose KV pool is looked at around every draft."""
    log, counts = folder / "log.json", folder / "counts.json"
    given = {"speculative_algorithm": "layerskip_checked", "skip_tokenizer_init": True} | more
    with sglang_engine(folder, counts, options(folder, log, sets, **changed), **given) as engine:
        engine.folder, engine.asked, engine.log, engine.counts = folder, 0, log, counts
        yield engine
    read_counts(counts)


def ask(engine, given, word, sampling=GREEDY):
    """All at once; `word` stands in their ids, and may name a skip set for each."""
    names = [word.format(i % 4) + f"-{i}" for i in range(len(given))]
    names = [f"{name}-{engine.asked}" for name in names]
    engine.asked += 1
    return engine.generate(input_ids=given, sampling_params=sampling, rid=names)


def logged(engine):
    """Counts, 0 for what has not been; also before the engine's first step."""
    if not engine.log.exists():
        return Counter()
    log = Counter(json.loads(engine.log.read_text()))
    read_counts(engine.counts)
    assert log["written outside the window"] == 0, "a draft pass wrote into a slot that is not this step's"
    return log
