"""Tokens per step by nodes of a draft (root included), before any were measured."""

from __future__ import annotations

import numpy as np

# SSSD's trees on recorded answers of Llama-3.1-8B (bench/results/replay.json)
TOKENS_PER_STEP = {1: 1.0, 4: 1.546, 8: 1.708, 16: 1.823, 32: 1.926}
# SSSD's chains
CHAIN_TOKENS_PER_STEP = {1: 1.0, 2: 1.307, 3: 1.425, 5: 1.491, 9: 1.52, 17: 1.527, 33: 1.529}


def expected_tokens(nodes: np.ndarray, curve: dict[int, float]) -> np.ndarray:
    """Tokens per step, interpolated linearly in the logarithm of the nodes; constant beyond the last known ones."""
    return np.interp(np.log2(nodes), np.log2(list(curve)), list(curve.values()))
