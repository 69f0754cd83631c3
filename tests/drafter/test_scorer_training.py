"""Training: from files to a file, whose scorer knows a synthetic source better than before."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import oracle

from bench.lib.results import sha256
from bench.scorer.__main__ import main
from freedraft.step import TOP_TOKENS
from sssd_plugin.scoring.weights import NODE_INPUTS, Weights, initial_weights
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


def log_loss(weights: Weights, held_out: list[Row], store: oracle.OracleStore) -> float:
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
    rows = source(0, 64)
    save_word_tokenizer(tmp_path, VOCAB)
    texts = [tuple(" ".join(f"w{t}" for t in part) for part in row) for row in rows]
    turns = [[{"role": "user", "content": p}, {"role": "assistant", "content": o}] for p, o in texts[:8]]
    written = {
        "trace": [{"prompt": p, "output": o} for p, o in texts],
        "sessions": [{"session": str(i), "messages": messages} for i, messages in enumerate(turns)],
        "recorded": [recording(row) for row in rows[:8]],
    }
    paths = {name: tmp_path / f"{name}.jsonl" for name in written}
    for name, lines in written.items():
        paths[name].write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "weights.json"
    files = [part for name, path in paths.items() for part in (f"--{name}", str(path))]
    main([*files, "--tokenizer", str(tmp_path), "--out", str(out)])
    trained = Weights.load(out)
    assert trained.trained_on == {path.name: sha256(path) for path in paths.values()} and "--trace" in trained.recipe
    store = oracle.OracleStore([[t for _, output in rows for t in [*output, oracle.SEPARATOR]]], VOCAB)
    held_out = source(1, 4)
    before, after = (log_loss(w, held_out, store) for w in (initial_weights(), trained))
    assert after < before - 0.1, (before, after)
    assert after < log_loss(Weights.load(), held_out, store)
    assert trained.layer[NODE_INPUTS - 3 : NODE_INPUTS + 1].any(), "what logits were found by counts, too"
