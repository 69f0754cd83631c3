"""How many launches a decoding step of model runner V2 takes in our own phases: each keeps the host or the device busy
for some 10 us.

    python tests/vllm/test_vllm_v2_launches.py OUT [BEFORE]  # writes counts; BEFORE: counts of another commit, kept

"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest
from test_vllm_v2 import run
from vllm_cases import TINY

from bench.lib.results import write_json
from tests.support.models import save, tiny_model

# Most operations of PyTorch, and kernels of Triton that must be launched, no others; copies to the host and fills of
# memory are operations, too.
BOUNDS = {
    "chain": {
        "match": (0, ["verify_kernel"]),
        "take logits": (0, ["block_maxima_kernel", "top_tokens_kernel"]),
        "copy gained": (0, ["newest_tokens_kernel"]),
        "propose": (0, []),
        "join": (1, ["_combine_sampled_and_draft_tokens_kernel"]),
        "prepare trees": (0, []),
    }
}
BOUNDS["tree"] = BOUNDS["chain"] | {
    "match": (1, ["compact_kernel", "verify_kernel"]),
    "join": (1, ["_combine_sampled_and_draft_tokens_kernel", "tree_queries_kernel"]),
    "prepare trees": (1, []),
}
SSSD = {"method": "sssd", "num_speculative_tokens": 8, "policy": "fixed", "recycle": "on"}


def counted(model):
    # Trees first: vLLM looks for attention once per process, and ours is stock attention for chains.
    given = {shape: SSSD | {"shape": shape} for shape in ("tree", "chain")}
    return run("launches.py", model, given, attention="flash")


@pytest.fixture(scope="module")
def launched(tiny_model):
    return counted(tiny_model)


@pytest.mark.parametrize("shape", BOUNDS)
def test_launches_of_a_step(launched, shape):
    found = launched[shape]
    assert found["sample"]["kernels"], "vLLM's own sampler"
    order = [found["order"].index(name) for name in ("newest_tokens_kernel", "block_maxima_kernel")]
    assert order == sorted(order), "the host waits for tokens before it reads logits"
    assert found["kept"] == 0
    for phase, (eager, kernels) in BOUNDS[shape].items():
        assert len(found[phase]["eager"]) <= eager, f"{phase}: {found[phase]['eager']}"
        assert found[phase]["kernels"] == kernels, phase


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        model = save(tiny_model(seed=7, **TINY), Path(folder))
        found = counted(model)
    figures = {shape: {phase: found[shape][phase] for phase in of} for shape, of in BOUNDS.items()}
    if sys.argv[2:]:
        figures = {"before": json.loads(Path(sys.argv[2]).read_text())} | {"after": figures}
    write_json(Path(sys.argv[1]), figures)
