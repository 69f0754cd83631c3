"""What a model answers to prompts, kept in a file, and what searches for skip sets measure on the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.lib.machine import timed
from layerskip_plugin.calibrate.host_model import HostModel
from layerskip_plugin.calibrate.prompts import Answered, answer
from layerskip_plugin.calibrate.sample import Sample
from layerskip_plugin.skip_set import SkipSet


def answers_of(
    host: HostModel, tokenizer: Any, texts: Mapping[str, Sequence[str]], tokens: int, cache: Path | None, group: int = 6
) -> dict[str, list[Answered]]:
    """Greedy answers of at most `tokens` tokens to the prompts of each domain.

    Args:
        cache: a JSON file that answers are taken from and added to.
        group: prompts that are answered at a time.
    """
    known = json.loads(cache.read_text()) if cache and cache.is_file() else {}
    for name, prompts in texts.items():
        rows = known.setdefault(name, [])
        while len(rows) < len(prompts):
            part, took = timed(partial(answer, host, tokenizer, prompts[len(rows) :][:group], tokens, 256, batch=group))
            rows += [[a.prompt, a.tokens] for a in part]
            print(f"{len(rows)} answers of {name}: {took:.0f} s", flush=True)
            if cache:
                cache.write_text(json.dumps(known))
    return {name: [Answered(t[: p + tokens], p) for p, t in known[name][: len(texts[name])]] for name in texts}


def sample_of(host: HostModel, answers: Sequence[Answered], tokens: int, seed: int) -> Sample:
    """At most `tokens` tokens, drawn from all of the answers."""
    tokens = min(tokens, sum(len(a.tokens) - a.prompt for a in answers))
    return host.sample([a.tokens for a in answers], tokens, [a.prompt for a in answers], seed)


def weight_share(host: HostModel, skip: SkipSet) -> float:
    """Weights that a draft pass reads, of those that a whole pass reads; the head included."""
    sizes = [
        sum(p.numel() for p in part.parameters()) for layer in host.layers for part in (layer.self_attn, layer.mlp)
    ]
    kept = sum(size for size, skipped in zip(sizes, skip.bits, strict=True) if not skipped)
    head = host.head.weight.numel()
    return (kept + head) / (sum(sizes) + head)
