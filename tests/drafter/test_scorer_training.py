"""Training: from files to a file, whose scorer knows a synthetic source better than before."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import oracle
from numpy.typing import NDArray

from bench.scorer.__main__ import main
from bench.scorer.training import initial_weights
from freedraft.step import TOP_TOKENS
from sssd_plugin.scoring.weights import Weights
from tests.support.models import save_word_tokenizer

VOCAB = 40
Row = tuple[list[int], list[int]]


def source(seed: int, rows: int) -> list[Row]:
    """Answers of a second-order Markov source that now and then copies a phrase of its own prompt."""
    following = np.random.default_rng(7).integers(0, VOCAB, (VOCAB, VOCAB, 3))
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
        out.append((prompt, text[30:160]))
    return out


def recording(row: Row) -> dict[str, list]:
    """An answer with logits that know it."""
    prompt, output = row
    tokens = [[token, *(t for t in range(TOP_TOKENS) if t != token)][:TOP_TOKENS] for token in output]
    log_probs = [[math.log(0.8), *[math.log(0.02)] * (TOP_TOKENS - 1)]] * len(output)
    return {"prompt": prompt, "output": output, "top_tokens": tokens, "top_log_probs": log_probs}


def log_loss(weights: NDArray[np.float64], held_out: list[Row], store: oracle.OracleStore) -> float:
    """Mean of -ln P(true next token, or "none of the shortlist"), at every third position."""
    losses = []
    for prompt, output in held_out:
        text = [*prompt, *output]
        for position in range(len(prompt), len(text), 3):
            request = text[:position]
            scored = dict(oracle.score(store, request, request, oracle.ROOT_SAMPLES, weights))
            losses.append(-math.log(scored.get(text[position], 1 - sum(scored.values()))))
    return float(np.mean(losses))


def test_training_lowers_the_loss_on_held_out_text(tmp_path: Path) -> None:
    rows = source(0, 48)
    save_word_tokenizer(tmp_path, VOCAB)
    words = [{"prompt": p, "output": o} for p, o in ((" ".join(f"w{t}" for t in x) for x in row) for row in rows)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, words)))
    (tmp_path / "recorded.jsonl").write_text("\n".join(json.dumps(recording(row)) for row in rows[:8]))
    files = [str(tmp_path / name) for name in ("trace.jsonl", "weights.json", "recorded.jsonl")]
    main([files[0], "--tokenizer", str(tmp_path), "--out", files[1], "--recorded", files[2]])
    trained = Weights.load(Path(files[1]))
    assert trained.trained_on == "trace"
    store = oracle.OracleStore([[t for _, output in rows for t in [*output, oracle.SEPARATOR]]], VOCAB)
    held_out = source(1, 4)
    before, after = (log_loss(w, held_out, store) for w in (initial_weights(), trained.values))
    assert after < before - 0.1, (before, after)
    shipped = Weights.load()
    assert after < log_loss(shipped.values, held_out, store)
    assert not np.allclose(trained.recycled, shipped.recycled)
