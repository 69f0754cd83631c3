"""vLLM's model runners on a GPU, with and without freedraft: are tokens identical, and how long does a step take?

    python bench/first_hour.py --model build/model --json OUT      # ten minutes

Each arm is an engine in its own process, with full CUDA graphs and without torch.compile. Identical tokens: the demo's
prompts with the given model, twice in a batch of 12, 8 one by one and 12 sampled with seeds, against the plain engine
in the same dtype. Step times: the shape of Llama-3.1-8B with random weights, prompts of 512 tokens, answers of 200. Its
greedy answers run into cycles, so nearly all drafts are accepted; at temperature 1 none is.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from bench.lib.engine import SKIP_SET_OF_DEMO
from bench.lib.machine import rounded
from bench.lib.prompts import BY_KIND, chats
from bench.lib.results import ROOT, write_json

SHAPE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "vocab_size": 128256}
SHAPE |= {"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
SHAPE |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "torch_dtype": "bfloat16"}
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
FP32 = {"dtype": "float32", "attention_config": {"backend": "TRITON_ATTN"}} | GRAPHS
BF16 = {"dtype": "bfloat16"} | GRAPHS
CHAIN = {"method": "sssd", "num_speculative_tokens": 8, "shape": "chain", "policy": "fixed"}
AUTO, TREE = {"method": "sssd"}, {"method": "sssd", "shape": "tree"}
SKIP = {"method": "layerskip", "num_speculative_tokens": 4, "skip_set": str(SKIP_SET_OF_DEMO)}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
Arm = tuple[dict[str, Any], dict[str, Any] | None, dict[str, str]]  # options, speculation, environment
SAME: dict[str, Arm] = {
    "plain": (FP32, None, {}),
    "chain": (FP32, CHAIN, {}),
    "auto": (FP32, AUTO, {}),
    "layerskip": (FP32, SKIP, {}),
    "plain-v1": (FP32, None, V1),
    "v1": (FP32, AUTO, V1),
    "plain-bf16": (BF16, None, {}),
    "auto-bf16": (BF16, AUTO, {}),
    "tree-bf16": (BF16, TREE, {}),
}
BASE = {"v1": "plain-v1", "auto-bf16": "plain-bf16", "tree-bf16": "plain-bf16"}
STEPS: dict[str, Arm] = {"8b-plain": (BF16, None, {}), "8b-chain": (BF16, CHAIN, {}), "8b-auto": (BF16, AUTO, {})}
STEPS["8b-chain-mp"] = (BF16 | {"distributed_executor_backend": "mp"}, CHAIN, {})
ARMS = SAME | STEPS
BATCHES = (1, 8, 32)


def arm(name: str, model: str) -> dict[str, Any]:
    """Run the engine of one arm and return its answers and times."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    timing = name in STEPS
    options, speculative, _ = ARMS[name]
    options = options | {"max_model_len": 2048, "max_num_seqs": 32, "seed": 0, "skip_tokenizer_init": True}
    options |= {"enable_prefix_caching": False, "disable_log_stats": False}
    options |= {"load_format": "dummy"} if timing else {}
    started = time.perf_counter()
    llm = LLM(model, speculative_config=speculative, gpu_memory_utilization=0.8 if timing else 0.3, **options)
    result: dict[str, Any] = {"start_s": time.perf_counter() - started, "device": torch.cuda.get_device_name()}
    llm.llm_engine.step = step = Mock(wraps=llm.llm_engine.step)  # type: ignore[method-assign]

    def counted(name: str) -> int:
        found: list[Any] = [m for m in llm.get_metrics() if m.name.endswith(f"spec_decode_num_{name}_tokens")]
        return sum(metric.value for metric in found)

    def ask(prompts: list[list[int]], tokens: int, temperature: float = 0.0, **sampling: Any) -> list[Any]:
        """Return the answers, and figures over all of them."""
        seeds = sampling.pop("seeds", [None] * len(prompts))
        sampling |= {"max_tokens": tokens, "ignore_eos": True, "detokenize": False, "temperature": temperature}
        drafted, accepted, first, start = counted("draft"), counted("accepted"), step.call_count, time.perf_counter()
        parameters = [SamplingParams(seed=seed, **sampling) for seed in seeds]
        answers = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], parameters, use_tqdm=False)
        said = {"s": time.perf_counter() - start, "steps": step.call_count - first}
        given = [list(answer.outputs[0].token_ids) for answer in answers]
        said |= {"tokens": sum(map(len, given)), "drafted": counted("draft") - drafted}
        return [given, said | {"accepted": counted("accepted") - accepted}]

    if timing:
        result["speed"] = {}
        for temperature in (0.0, 1.0):
            for batch in BATCHES:
                prompts = [[(1 + 7 * i + j * (j % 13)) % 100000 + 5 for j in range(512)] for i in range(batch)]
                ask(prompts, 200, temperature)
                runs = [ask(prompts, tokens, temperature)[1] for tokens in (200, 200, 1)]
                result["speed"][f"{temperature} {batch}"] = runs
        return result
    prompts = chats(Path(model), BY_KIND)
    result["greedy"] = [ask(prompts, 128) for _ in range(2)]
    result["one"] = [ask([prompt], 128) for prompt in prompts[:8]]
    result["seeded"] = [ask(prompts, 96, 0.8, top_p=0.95, top_k=50, seeds=range(len(prompts)))]
    return result


def same(found: Any, base: Any, kind: str) -> list[int]:
    """Return how many answers have the tokens of the plain engine, and how many there are."""
    ours, theirs = ([tokens for given, _ in arm[kind] for tokens in given] for arm in (found, base))
    return [sum(a == b for a, b in zip(ours, theirs, strict=True)), len(theirs)]


def summary(raw: dict[str, Any]) -> dict[str, Any]:
    """Compute the rows of the results page from the arms' answers."""
    identical, steps = [], []
    for name, found in raw.items():
        base = raw.get(BASE.get(name, "plain"), {})
        if not name.startswith("plain") and "greedy" in found and "greedy" in base:
            row = {"arm": name, "start_s": found["start_s"]}
            row |= {kind: same(found, base, kind) for kind in ("greedy", "one", "seeded")}
            identical.append(row | {"steps": [[r["steps"] for _, r in arm["greedy"]] for arm in (found, base)]})
        for cell, (first, last, prompts) in found.get("speed", {}).items():
            temperature, batch = cell.split()
            # The faster of two runs, without prefill.
            times = [1e3 * (run["s"] - prompts["s"]) / (run["steps"] - prompts["steps"]) for run in (first, last)]
            row = {"arm": name, "temperature": float(temperature), "batch": int(batch), "step_ms": min(times)}
            row |= {"steps": last["steps"], "tokens_per_s": last["tokens"] / last["s"], "busy": None}
            steps.append(row | {key: last[key] for key in ("drafted", "accepted")})
    errors = {name: found["error"] for name, found in raw.items() if "error" in found}
    devices = {found["device"] for found in raw.values() if "device" in found}
    return {"device": ", ".join(devices), "identical": identical, "steps": steps, "errors": errors}


def main() -> int:
    parser = argparse.ArgumentParser(description="Same tokens and step times on a GPU.")
    parser.add_argument("--model", default=str(ROOT / "build" / "model"), help="arm layerskip: the demo model only")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return int(args.json.write_text(json.dumps(arm(args.one, args.model))) == 0)
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        for name in args.arms:
            file = Path(folder) / f"{name}.json"
            command = [sys.executable, __file__, "--one", name, "--json", str(file)]
            command += ["--model", folder if name in STEPS else args.model]
            done = subprocess.run(command, env=os.environ | V2 | ARMS[name][2], stderr=subprocess.PIPE, text=True)
            raw[name] = {"error": done.stderr[-2000:]} if done.returncode else json.loads(file.read_text())
            print(name, "failed" if done.returncode else f"{raw[name]['start_s']:.0f} s to start", flush=True)
    write_json(args.json, rounded(summary(raw)))
    return int(any("error" in found for found in raw.values()))


if __name__ == "__main__":
    sys.exit(main())
