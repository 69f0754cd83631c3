"""Whether sampled outputs have the distribution that they should have."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

Output = tuple[int, ...]


def enumerate_outputs(
    model: Path, prompt: Sequence[int], tokens: int, *, temperature: float, top_k: int, top_p: float,
    min_p: float = 0.0, bias: Mapping[int, float] | None = None,
) -> dict[Output, float]:  # fmt: skip
    """Probability of every output of this many tokens, by enumeration with the model itself."""
    import torch
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    paths: dict[Output, float] = {(): 1.0}
    for _ in range(tokens):
        prefixes = list(paths)
        with torch.no_grad():
            logits = whole(torch.tensor([[*prompt, *p] for p in prefixes])).logits[:, -1]
        for token, added in (bias or {}).items():
            logits[:, token] += added
        probs = torch.softmax(logits.double() / temperature, -1)
        grown = {}
        for prefix, row in zip(prefixes, probs, strict=True):
            kept, mass = [], 0.0
            for rank, token in enumerate(sorted(range(len(row)), key=lambda t: -row[t])):
                if rank < top_k and mass < top_p and row[token] >= min_p * row.max():
                    kept.append(token)
                mass += float(row[token])
            total = sum(float(row[t]) for t in kept)
            for token in kept:
                grown[(*prefix, token)] = paths[prefix] * float(row[token]) / total
        paths = grown
    assert math.isclose(sum(paths.values()), 1.0, rel_tol=1e-9)
    return paths


def assert_distribution(outputs: Sequence[Output], expected: dict[Output, float]) -> None:
    """Chi-square of the outputs against their probabilities, at a level of 1e-4."""
    from scipy.stats import chi2

    counts, samples = Counter(outputs), len(outputs)
    assert set(counts) <= set(expected), "a token was sampled that has probability 0"
    # Outputs that are expected fewer than 5 times count as one.
    rare = [path for path, p in expected.items() if p * samples < 5]
    bins = [(p * samples, counts[path]) for path, p in expected.items() if p * samples >= 5]
    if rare:
        bins.append((samples * sum(expected[p] for p in rare), sum(counts[p] for p in rare)))
    statistic = sum((seen - due) ** 2 / due for due, seen in bins if due > 0)
    limit = chi2.isf(1e-4, len(bins) - 1)
    assert len(bins) > 10, "too few outcomes to tell distributions apart"
    assert statistic < limit, f"chi-square {statistic:.1f} over {len(bins)} outcomes, limit {limit:.1f}"
