"""Does vLLM with freedraft give the tokens of plain vLLM, and how far do their logits lie apart?

    python bench/identity.py --model build/model --json build/identity.json

Each arm is an engine in its own process; on a GPU with full CUDA graphs and without torch.compile. Answers: the demo's
prompts twice in a batch of 12, 8 of them one by one, and 12 sampled with seeds, against the plain engine in the same
dtype. Logits: plain's greedy answers are forced on every arm (`bench/lib/forcing.py`), and the log-probabilities of the
same tokens compared. The control of both is plain one by one against plain in a batch: what rounding alone does.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from bench.forced import CHAIN, GRAPHS, OWN, TREE
from bench.lib import forcing
from bench.lib.engine import SKIP_SET_OF_DEMO, in_process
from bench.lib.machine import gpu, machine, rounded
from bench.lib.prompts import BY_KIND, chats
from bench.lib.results import ROOT, write_json
from bench.lib.servers import in_process_environment

FP32, BF16 = {"dtype": "float32", "attention_config": {"backend": "TRITON_ATTN"}}, {"dtype": "bfloat16"}
FIXED, AUTO = CHAIN | {"num_speculative_tokens": 8, "policy": "fixed"}, {"method": "sssd"}
SKIP = {"method": "layerskip", "num_speculative_tokens": 4, "skip_set": str(SKIP_SET_OF_DEMO)}
# Options and speculation. The arms of V1 run on vLLM's model runner V1, the others on V2 where there is a GPU.
ARMS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "plain": (FP32, None), "chain": (FP32, FIXED), "auto": (FP32, AUTO), "layerskip": (FP32, SKIP),
    "plain-v1": (FP32, None), "auto-v1": (FP32, AUTO),
    "plain-bf16": (BF16, None), "chain-bf16": (BF16, FIXED), "auto-bf16": (BF16, AUTO), "tree-bf16": (BF16, TREE),
}  # fmt: skip


def base_of(name: str) -> str:
    """Return the plain arm that an arm is compared with."""
    return "-".join(["plain", *name.split("-")[1:]])


def run(name: str, model: Path, tokens: int, folder: Path) -> dict[str, Any]:
    """Start the engine of one arm, in this process, and ask it. The folder has the answers of the plain arm."""
    import torch

    prompts, plain, (options, speculative) = chats(model, BY_KIND), folder / f"{base_of(name)}.json", ARMS[name]
    options = options | GRAPHS if torch.cuda.is_available() else {"dtype": options["dtype"], "enforce_eager": True}
    options |= {"speculative_config": speculative, "max_model_len": 2048, "max_num_seqs": 32}
    texts, started = [(prompt, [0] * tokens) for prompt in prompts], time.perf_counter()
    engine = forcing.Vllm(folder, texts, model=model, gpu_memory_utilization=0.3, **options)
    result: dict[str, Any] = {"start_s": time.perf_counter() - started}
    engine.forcing.on, every, few = False, range(len(texts)), range(8)

    def ask(*how: Any, **sampling: Any) -> list[list[int]]:
        return [answer.tokens for answer in engine.answers(*how, **sampling)]

    result |= {"greedy": ask(every, len(every)) + ask(every, len(every)), "one": ask(few, 1)}
    result["seeded"] = ask(every, len(every), temperature=0.8, top_p=0.95, top_k=50)
    answers = json.loads(plain.read_text())["greedy"] if plain.exists() else result["greedy"]
    engine.texts = texts = list(zip(prompts, answers, strict=False))
    forcing.save_texts(folder, texts)
    engine.forcing.load(folder)
    engine.forcing.on = engine.forcing.scores = True
    for kind, at_once in {"scores": len(every), **({} if speculative else {"control": 1})}.items():
        forcing.check(engine.answers(every, at_once), texts)
        found = forcing.last_scores(forcing.logged(folder, "scores"))
        places = [range(len(prompt) - 1, len(prompt) + len(answer) - 1) for prompt, answer in texts]
        result[kind] = [found.get((number, at)) for number, each in enumerate(places) for at in each]
    return result


def compared(name: str, found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return how many answers are those of plain, of how many, and the largest and mean difference of the scores that
    both have; of plain itself: the control."""
    row: dict[str, Any] = {"arm": name, "start_s": found["start_s"]}
    pairs = {kind: (found[kind], base[kind]) for kind in ("greedy", "one", "seeded")}
    if name == base_of(name):
        pairs = {"one": (found["one"], found["greedy"][: len(found["one"])])}
    row |= {kind: [sum(a == b for a, b in zip(*each, strict=True)), len(each[0])] for kind, each in pairs.items()}
    scores = zip(found.get("control", found["scores"]), base["scores"], strict=True)
    apart = [abs(ours - plains) for ours, plains in scores if ours is not None and plains is not None]
    return row | {"scores": len(apart), "largest": max(apart), "mean": mean(apart)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "build/model", help="arm layerskip: the demo model only")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="their plain arms are added")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("\n" + json.dumps(run(args.one, args.model, args.tokens, Path(os.environ[forcing.FOLDER]))), flush=True)
        os._exit(0)  # engines' threads may not end
    device, rows, errors, found = gpu().get("gpu"), [], dict[str, str](), dict[str, Any]()
    env = os.environ | OWN if device else in_process_environment()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        forcing.save_texts(folder, [([0], [0])])
        for name in dict.fromkeys(arm for wanted in args.arms for arm in (base_of(wanted), wanted)):
            of_arm = env | {forcing.FOLDER: temporary} | ({"VLLM_USE_V2_MODEL_RUNNER": "0"} if "v1" in name else {})
            given = ["--one", json.dumps(name), "--model", args.model, "--tokens", args.tokens]
            try:
                found[name] = in_process(__file__, *given, env=of_arm)
                (folder / f"{name}.json").write_text(json.dumps(found[name]))
                rows.append(compared(name, found[name], found[base_of(name)]))
            except (KeyError, SystemExit) as error:
                errors[name] = str(error)[-2000:]
            print(errors.get(name) or rows[-1], flush=True)
    figures = {"device": device or machine()["cpu"], "model": args.model.name, "identical": rows, "errors": errors}
    write_json(args.json, rounded(figures, 9))
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
