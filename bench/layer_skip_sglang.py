"""Layer skipping through SGLang's CPU platform, on the deep synthetic model (bench/deep_model.py) where it can pay.

Plain and speculative decoding take turns in one engine, request by request, so that both meet the same machine.
Reported by batch size: M (tokens per speculative step), alpha (share of drafted tokens accepted), c (a draft pass by a
plain step, medians), the ratio of speeds (median over pairs of requests), and its share of
M * alpha / ((M - 1) * c + alpha): what such a drafter can reach at most when verifying costs as much as a plain step
and nothing else costs anything (SWIFT, section 3).

    python bench/layer_skip_sglang.py --model build/deep --json build/layer-skip-sglang.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

LOG = "LAYER_SKIP_BENCH_LOG"
ALGORITHM = "layerskip_in_turns"
PLAIN = "plain"


def register() -> None:
    """Entry point of `sglang.srt.plugins` in the bench's engines: layer skip that leaves "plain" requests alone."""
    from freedraft.engines.sglang.registration import install

    install(ALGORITHM, make_source, runs_model=True)


def make_source(context):
    from layerskip_plugin.sglang import LayerSkipSource
    from layerskip_plugin.sglang import make_source as make

    class InTurns(LayerSkipSource):
        """Writes a line per step: who, when it began and ended drafting, how far, and what its passes took."""

        def width(self, batch_size):
            self._batch = batch_size
            return self.max_nodes

        def draft(self, step, width):
            began = time.perf_counter()
            plain = step.request_ids[0].startswith(PLAIN)
            drafts = not plain and super().width(len(step.request_ids)) > 1
            self.passes = []
            tree = super().draft(step, width if drafts else 1)
            row = {
                "kind": PLAIN if plain else "draft",
                "batch": len(step.request_ids),
                "began": began,
                "ended": time.perf_counter(),
                "passes": self.passes,
                "gained": len(step.tokens),
                "ids": list(step.request_ids),
                "drafted": self._last.drafted.tolist() if drafts else [0] * len(step.request_ids),
                "nodes": int(tree.counts.sum()),
            }
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
            return tree

        def _pass(self, *args):
            began = time.perf_counter()
            super()._pass(*args)
            self.passes.append(time.perf_counter() - began)

    log = Path(os.environ[LOG])
    source = make(context)
    source.__class__ = InTurns
    return source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/deep"), help="folder that bench/deep_model.py wrote")
    parser.add_argument("--skip-set", type=Path, help="default: skip_set.json of the model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lookahead", default="cost")
    parser.add_argument("--length", type=int, default=4, help="of lookahead 'fixed'")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--tree", action="store_true", help="verify trees, not chains")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=6, help="of the demo's twelve")
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    for batch in result["batches"]:
        print(
            f"batch {batch['batch']}: M {batch['M']:.2f}, alpha {batch['alpha']:.3f}, c {batch['c']:.3f}, verify "
            f"{batch['verify']:.2f} of a plain step ({batch['plain_ms']:.1f} ms), {batch['ratio']:.2f}x plain, "
            f"{batch['share']:.2f} of the formula's {batch['formula']:.2f}; same tokens: {batch['same']}"
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(args: argparse.Namespace, folder: Path) -> dict:
    from transformers import AutoTokenizer

    from tests.sglang.conftest import sglang_engine

    sys.path.insert(0, str(Path(__file__).parent))
    from prompts import PROMPTS

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [prompt for kind in zip(*PROMPTS.values(), strict=True) for prompt in kind][: args.prompts]
    chats = [[{"role": "user", "content": text}] for text in texts]
    prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    sampling = {"temperature": 0, "max_new_tokens": args.tokens, "ignore_eos": True}

    info = folder / "layer_skip_bench-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: layer-skip-bench\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nbench = {Path(__file__).stem}:register\n")
    log = folder / "steps.jsonl"
    paths = [str(folder), str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    sys.path[:0] = paths[:2]
    env = {
        "PYTHONPATH": os.pathsep.join(paths),
        LOG: str(log),
        "FREEDRAFT_SKIP_SET": str(args.skip_set or args.model / "skip_set.json"),
        "FREEDRAFT_LOOKAHEAD": args.lookahead,
        "FREEDRAFT_LENGTH": str(args.length),
        "FREEDRAFT_TREE": str(int(args.tree)),
    }
    most = max(args.batches)
    answers: dict[tuple[str, int], list] = {}
    with sglang_engine(
        args.model,
        env=env,
        speculative_algorithm=ALGORITHM,
        speculative_num_draft_tokens=args.nodes,
        dtype=args.dtype,
        max_running_requests=most,
        disable_radix_cache=True,
    ) as engine:
        number = itertools.count()
        for batch in args.batches:
            for kind in (PLAIN, "draft"):  # warm-up: also teaches the policy what steps cost
                ids = [f"{kind}-warm-{next(number)}" for _ in range(batch)]
                engine.generate([prompts[0]] * batch, {**sampling, "max_new_tokens": 24}, rid=ids)
            for start in range(0, len(prompts), batch):
                group = [prompts[(start + i) % len(prompts)] for i in range(batch)]
                for kind in (PLAIN, "draft"):
                    ids = [f"{kind}-{batch}-{next(number)}" for _ in group]
                    outputs = engine.generate(group, sampling, rid=ids)
                    answers.setdefault((kind, batch), []).extend(o["output_ids"] for o in outputs)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    result = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items() if name != "json"}
    result["batches"] = [
        {**figures(steps, batch), "same": answers[PLAIN, batch] == answers["draft", batch]} for batch in args.batches
    ]
    return result


def speeds(steps: list[tuple[float, dict, int]]) -> list[float]:
    """Tokens per second of each group of requests, in the order they came."""
    groups: dict[str, list[float]] = {}
    for seconds, step, gained in steps:
        group = groups.setdefault(step["ids"][0], [0.0, 0.0])
        group[0] += gained
        group[1] += seconds
    return [tokens / seconds for tokens, seconds in groups.values()]


def figures(steps: list[dict], batch: int) -> dict:
    """What full batches of this size did. A step runs from the beginning of its draft to that of the next one."""
    plain, drafting = [], []
    for step, after in itertools.pairwise(steps):
        name = f"{step['kind']}-{batch}-"
        if step["ids"] == after["ids"] and step["batch"] == batch and step["ids"][0].startswith(name):
            seconds = after["began"] - step["began"]
            (plain if step["kind"] == PLAIN else drafting).append((seconds, step, after["gained"]))
    plain_step = statistics.median(seconds for seconds, _, _ in plain)
    tokens = sum(gained for _, _, gained in drafting)
    per_step = tokens / batch / len(drafting)
    drafted = sum(sum(step["drafted"]) for _, step, _ in drafting)
    passes = [seconds for _, step, _ in drafting for seconds in step["passes"]]
    verify = [after - sum(step["passes"]) for after, step, _ in drafting if step["passes"]]
    alpha = (tokens - batch * len(drafting)) / drafted if drafted else 0.0
    c = statistics.median(passes) / plain_step if passes else 0.0
    # Plain and drafting requests came in turns: their speeds are compared pair by pair.
    pairs = [b / a for a, b in zip(speeds(plain), speeds(drafting), strict=False)]
    ratio = statistics.median(pairs)
    formula = per_step * alpha / ((per_step - 1) * c + alpha) if drafted else 1.0
    return {
        "batch": batch,
        "steps": len(drafting),
        "M": per_step,
        "alpha": alpha,
        "c": c,
        "drafted_per_step": drafted / batch / len(drafting),
        "nodes_per_step": sum(step["nodes"] for _, step, _ in drafting) / batch / len(drafting),
        "verify": statistics.median(verify) / plain_step if verify else 1.0,
        "plain_ms": 1e3 * plain_step,
        "pass_ms": 1e3 * statistics.median(passes) if passes else 0.0,
        "ratio": ratio,
        "ratio_spread": [min(pairs), max(pairs)],
        "formula": formula,
        "share": ratio / formula,
    }


if __name__ == "__main__":
    main()
