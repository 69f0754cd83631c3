"""Calibration in vLLM, bf16, against the reference in transformers, fp32: the same tokens, the same sets.

    python bench/calibration.py --model build/model --json build/calibration.json

Random sets of 3 to 15 sublayers are scored by both, and the knapsack search is run in both. Reported: Spearman's rank
correlation of the scores, the search's sets, and memory: what the process held when the engine had answered the
prompts, and how much more it held at most while it calibrated. A second copy of the weights would be in that.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib.engine import ROOT, in_process
from bench.lib.machine import rounded, timed
from bench.lib.prompts import BY_KIND, chats
from bench.lib.results import write_json

SETTINGS = {"dtype": "bfloat16", "enforce_eager": True, "max_num_seqs": 16}
MAX_MODEL_LEN = 512
SHARE = 0.2


def memory(name: str) -> float:
    """MB of this process: "VmRSS" now, "VmHWM" at most since the last reset."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) / 1e3


def calibrated(model: Any, weights: float, texts: Any, args: argparse.Namespace) -> dict[str, Any]:
    """What a model says of the sets, in how much time and memory."""
    from layerskip_plugin.calibrate.knapsack import search
    from layerskip_plugin.calibrate.sample import Sample

    rng = np.random.default_rng(0)
    places = np.arange(2, model.sublayers - 2)
    sets = [model.skip(rng.choice(places, rng.integers(3, 16), replace=False).tolist()) for _ in range(args.sets)]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    sample, reading = timed(lambda: Sample.spread(model, texts["tokens"], args.tokens, texts["prompts"], seed=0))
    (agreement, cosine), scoring = timed(lambda: model.scores(sets, sample))
    size = round(SHARE * model.sublayers)
    found, searching = timed(lambda: search(model, sample, max_weight=size))
    return {
        "weights_mb": weights,
        "before_mb": before,
        "more_at_most_mb": memory("VmHWM") - before,
        "seconds": {"reading": reading, "scoring": scoring, "searching": searching},
        "agreement": agreement.tolist(),
        "cosine": cosine.tolist(),
        "found": [[each.weight, each.agreement, list(each.skip.sublayers)] for each in found],
    }


def engine(args: argparse.Namespace) -> dict[str, Any]:
    from layerskip_plugin.calibrate.vllm import VllmModel

    model = VllmModel(args.model, MAX_MODEL_LEN, SETTINGS)
    asked = chats(args.model, BY_KIND[: args.prompts])
    answers = model.generate(asked, 48)
    texts = {"tokens": [a + b for a, b in zip(asked, answers, strict=True)], "prompts": [len(a) for a in asked]}
    args.texts.write_text(json.dumps(texts))
    parameters = model.runner.model.parameters()
    return calibrated(model, sum(p.numel() * p.element_size() for p in parameters) / 1e6, texts, args)


def reference(args: argparse.Namespace) -> dict[str, Any]:
    from layerskip_plugin.calibrate.host_model import HostModel

    empty = memory("VmRSS")
    model = HostModel.load(args.model)
    loaded = memory("VmRSS") - empty
    weights = sum(p.numel() * p.element_size() for p in model.model.parameters()) / 1e6
    result = calibrated(model, weights, json.loads(args.texts.read_text()), args)
    return result | {"loading_mb": loaded}


PARTS = {"vllm": engine, "transformers": reference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "model")
    parser.add_argument("--sets", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--texts", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(PARTS[args.part](args)), flush=True)
        return
    from scipy.stats import spearmanr

    sizes = ("--model", args.model, "--sets", args.sets, "--tokens", args.tokens, "--prompts", args.prompts)
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts.json"
        parts = {name: in_process(__file__, "--part", name, "--texts", texts, *sizes) for name in PARTS}
    ours, theirs = parts["vllm"], parts["transformers"]
    sets = [{weight: skip for weight, _, skip in part["found"]} for part in (ours, theirs)]
    same = [weight for weight in sets[0] if sets[0][weight] == sets[1].get(weight)]
    figures = {
        "engine": SETTINGS,
        "sets": args.sets,
        "tokens": args.tokens,
        "spearman": {key: float(spearmanr(ours[key], theirs[key]).statistic) for key in ("agreement", "cosine")},
        "searched": {"weights": len(sets[0]), "the_same_set": len(same)},
        "parts": parts,
    }
    figures = rounded(figures)
    print(json.dumps({key: figures[key] for key in ("spearman", "searched")}, indent=1))
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
