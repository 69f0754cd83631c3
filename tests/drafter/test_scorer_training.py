"""Training: the scorer learns what a synthetic source does, and its scores become probabilities."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import oracle
import pytest
from drafting import Pair
from numpy.typing import NDArray

from freedraft.method import TOP_TOKENS
from sssd_plugin.scoring.long_contexts import long_rows
from sssd_plugin.scoring.training import LONG_ROWS, train, train_recycled
from sssd_plugin.scoring.weights import (
    FEATURES,
    RECYCLED_FEATURES,
    RECYCLED_SETS,
    SETS,
    Weights,
    initial_weights,
)
from sssd_plugin.trace import Recording, load_recordings
from tests.support.stores import int32

VOCAB = 40
Row = tuple[NDArray[np.int32], NDArray[np.int32]]


def source(seed: int, rows: int) -> list[Row]:
    """Answers of a second-order Markov source that now and then copies a phrase of its own prompt."""
    tables = np.random.default_rng(7)
    following = tables.integers(0, VOCAB, (VOCAB, VOCAB, 3))
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(rows):
        prompt = rng.integers(0, VOCAB, 30).tolist()
        text = list(prompt)
        while len(text) < 160:
            if rng.random() < 0.05:
                start = int(rng.integers(0, 20))
                text += prompt[start : start + 8]
            elif rng.random() < 0.05:
                text.append(int(rng.integers(0, VOCAB)))
            else:
                text.append(int(following[text[-2], text[-1], rng.choice(3, p=(0.7, 0.2, 0.1))]))
        out.append((np.array(prompt, np.int32), np.array(text[30:160], np.int32)))
    return out


@pytest.fixture(scope="module")
def trained() -> NDArray[np.float64]:
    return train(source(0, 96), VOCAB)


def log_loss(weights: NDArray[np.float64], held_out: list[Row], store: oracle.OracleStore) -> float:
    """Mean of -ln P(true next token, or "none of the shortlist"), at every third position."""
    loss, n = 0.0, 0
    for prompt, output in held_out:
        text = [*prompt.tolist(), *output.tolist()]
        for position in range(len(prompt), len(text), 3):
            request = text[:position]
            scored = dict(oracle.score(store, request, request, oracle.ROOT_SAMPLES, weights))
            loss -= math.log(scored.get(text[position], 1 - sum(scored.values())))
            n += 1
    return loss / n


def test_training_lowers_the_loss_on_held_out_text(trained: NDArray[np.float64]) -> None:
    assert trained.shape == (SETS, FEATURES) and np.isfinite(trained).all()
    rows = source(0, 96)
    store = oracle.OracleStore([[t for _, output in rows for t in [*output.tolist(), oracle.SEPARATOR]]], VOCAB)
    held_out = source(1, 4)
    before, after = (log_loss(w, held_out, store) for w in (initial_weights(), trained))
    assert after < before - 0.1, (before, after)
    assert after < log_loss(Weights.load().values, held_out, store)


def test_scores_are_calibrated(trained: NDArray[np.float64], tmp_path: Path) -> None:
    """Over held-out answers, recorded and over long prompts, as in training: as many nodes are accepted as their scores
    add up to, in all and in bins of scores.
    """
    Weights(trained).save(tmp_path / "w.json")
    documents = [output.tolist() for _, output in source(0, 72)]  # as many as a fold of the training had
    pair = Pair([documents], scoring="learned", vocab_size=VOCAB, max_nodes=8, weights=tmp_path / "w.json")
    predicted, accepted = [], []
    recorded = source(2, 40)
    for row, (prompt, output) in enumerate([*recorded, *long_rows(recorded, 40 // LONG_ROWS, seed=1)]):
        text = [*prompt.tolist(), *output.tolist()]
        for position in range(len(prompt), len(text) - 10, 5):
            pair.drafter.replace(str(row), int32(text[:position]))
            batch = pair.drafter.draft([str(row)], max_nodes=8)
            good = [True] * 8
            for i in range(1, batch.counts[0]):
                depth, parent = batch.depths[0, i], batch.parents[0, i]
                good[i] = bool(good[parent] and batch.tokens[0, i] == text[position + depth - 1])
                predicted.append(float(batch.scores[0, i]))
                accepted.append(good[i])
    p, y = np.array(predicted), np.array(accepted)
    assert len(p) > 4000
    assert abs(p.sum() / y.sum() - 1) < 0.08, (p.sum(), y.sum())
    for low, high in ((0.0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 1.0)):
        inside = (p >= low) & (p < high)
        assert inside.sum() > 100
        assert abs(p[inside].mean() - y[inside].mean()) < 0.08, (low, p[inside].mean(), y[inside].mean())


def test_training_is_deterministic(trained: NDArray[np.float64]) -> None:
    """Ranks of a tensor-parallel group, and whoever repeats a training, get the same weights."""
    again = train(source(0, 96), VOCAB)
    assert again.tolist() == trained.tolist()


def with_logits(rows: list[Row], noise: float) -> list[Recording]:
    """Answers with what their source says: the true distribution over eight tokens, or one that knows nothing."""
    rng = np.random.default_rng(3)
    recordings = []
    for prompt, output in rows:
        tokens = np.array([rng.permutation(VOCAB)[:TOP_TOKENS] for _ in output], np.int32)
        log_probs = np.full(tokens.shape, math.log(0.02), np.float32)
        knows = rng.random(len(output)) >= noise
        for i in np.flatnonzero(knows & (tokens != output[:, None]).all(1)):
            tokens[i, 0] = output[i]
        log_probs[:, 0] = math.log(0.8)
        recordings.append(Recording(prompt, output, tokens, log_probs))
    return recordings


def mean_share(recycled: NDArray[np.float64], weights: NDArray[np.float64], test: list[Recording]) -> float:
    """Probability that the oracle gives the true next token, where it has logits of the same text."""
    store = oracle.OracleStore([], VOCAB)
    found = []
    for one in test:
        known: oracle.Logits = {}
        text = [*one.prompt.tolist(), *one.output.tolist()]
        start = len(one.prompt)
        for i in range(start, start + 40):
            oracle.remember(known, text[:i], one.top_tokens[i - start].tolist(), one.top_log_probs[i - start].tolist())
        for i in range(start, start + 40, 4):
            request = text[:i]
            scored = dict(oracle.score(store, request, request, 64, weights, None, 10, known, recycled))
            found.append(scored.get(text[i], 0.0))
    return float(np.mean(found))


def test_recycled_logits_are_trusted_as_they_deserve(trained: NDArray[np.float64]) -> None:
    """N-gram weights stay, and logits that know count for more than logits that do not."""
    before = trained.copy()
    rows = source(3, 48)
    good, bad = (train_recycled(trained, with_logits(rows, noise), VOCAB) for noise in (0.0, 1.0))
    assert good.shape == (RECYCLED_SETS, RECYCLED_FEATURES) and np.isfinite(good).all()
    assert np.array_equal(trained, before)
    test = with_logits(source(4, 6), 0.0)
    shares = [mean_share(recycled, trained, test) for recycled in (good, bad)]
    assert shares[0] > shares[1] + 0.1, shares
    with pytest.raises(ValueError, match="no recording"):
        train_recycled(trained, [], VOCAB)


GOOD_LINE = {
    "prompt": [1, 2],
    "output": [3],
    "top_tokens": [list(range(TOP_TOKENS))],
    "top_log_probs": [[-1.0] * TOP_TOKENS],
}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        json.dumps({k: v for k, v in GOOD_LINE.items() if k != "top_tokens"}),
        json.dumps(GOOD_LINE | {"output": [3, 4]}),
        json.dumps(GOOD_LINE | {"top_log_probs": [[-1.0]]}),
        json.dumps(GOOD_LINE | {"prompt": "text"}),
        json.dumps(GOOD_LINE | {"prompt": [[1]]}),
        json.dumps(GOOD_LINE | {"prompt": [2**40]}),
    ],
)
def test_recordings(tmp_path: Path, line: str) -> None:
    path = tmp_path / "recorded.jsonl"
    path.write_text(json.dumps(GOOD_LINE) + "\n\n" + json.dumps(GOOD_LINE) + "\n")
    loaded = load_recordings(path)
    assert len(loaded) == 2 and loaded[1].output.tolist() == [3] and loaded[1].top_log_probs.shape == (1, TOP_TOKENS)
    path.write_text(json.dumps(GOOD_LINE) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"recorded\.jsonl line 2"):
        load_recordings(path)
    with pytest.raises(ValueError, match="does not exist"):
        load_recordings(tmp_path / "none")


def test_too_few_rows() -> None:
    with pytest.raises(ValueError, match="training needs at least 8 rows"):
        train(source(0, 7), VOCAB)
