"""Speed of an engine with recorded answers: a model of any shape with random weights, whose answers are forced.

    python bench/forced.py --trace answers.jsonl --tokenizer DIR --batches 1 8 32 --json build/forced.json
    python bench/forced.py --engine sglang --sessions agents.jsonl --tokenizer DIR --json build/forced-sglang.json

Every arm answers the same requests with the recorded tokens (`bench/lib/forcing.py`); a difference is an error. So
drafts are accepted as by the model that gave the answers, and time is the engine's. Only recycled logits are those of
random weights, but for the recorded token. An arm is an engine in its own process, with its defaults but for vLLM's
torch.compile (--compiled); NAME=JSON is one with this speculative configuration. Arm `head` has an EAGLE layer of
random weights, whose tokens are right at random, as often as --head says; `sssd+head` has n-grams on top. Without a
GPU the model is a tiny one, whose times say nothing about a GPU. Texts are asked once, in the order of the file; of
sessions, first turns come first. Before each batch size as many other texts are asked, which are not measured.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

from bench.lib import forcing
from bench.lib.engine import in_process, plugin
from bench.lib.machine import gpu, machine, rounded, versions
from bench.lib.results import PACKAGES, ROOT, write_json
from bench.lib.servers import environment, in_process_environment
from bench.lib.serving import PRESETS
from bench.lib.tables import pivot
from bench.lib.trace import Sessions, Trace, replayed

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256}
LLAMA |= {"hidden_size": 4096}
LLAMA |= {"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "torch_dtype": "bfloat16"}
TINY = LLAMA | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "vocab_size": 49152, "torch_dtype": "float32"}
HEAD = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}  # of the shape otherwise
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
OWN = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}  # variables of an engine on a GPU
CHAIN, TREE = ({"method": "sssd", "shape": shape} for shape in ("chain", "tree"))
NGRAM, SUFFIX, NGRAM_OF_SGLANG = (PRESETS[name].speculative or {} for name in ("ngram", "suffix", "sglang-ngram"))
ARMS: dict[str, dict[str, Any]] = {name: {"plain": None, "chain": CHAIN, "tree": TREE} for name in ("vllm", "sglang")}
ARMS["vllm"] |= {"ngram": NGRAM, "ngram_gpu": NGRAM | {"method": "ngram_gpu"}, "suffix": SUFFIX}
ARMS["vllm"] |= {"rows": CHAIN | {"enable_adaptive_verification": True}}
ARMS["vllm"] |= {"head": {"method": "eagle"}, "sssd+head": {"method": "sssd+eagle"}}
ARMS["sglang"] |= {"ngram": NGRAM_OF_SGLANG}
LEAST, WARM_UP_TOKENS = 8, 32  # requests of a batch size at least
ARCTIC = ROOT / "build" / "arctic"  # built by bench/arctic.sh


def why_not(speculative: dict[str, Any], cuda: bool) -> str | None:
    """Return what an arm lacks here, in words for the user; None if it can run."""
    if speculative.get("method") == "suffix" and not (ARCTIC.is_dir() or importlib.util.find_spec("arctic_inference")):
        return "arctic-inference is not installed: bench/arctic.sh build/arctic"
    method = speculative.get("method", "")
    needs = method in ("ngram_gpu", "NGRAM") or speculative.get("enable_adaptive_verification")
    needs = needs or (method.endswith("eagle") and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1")
    return "it needs a GPU" if needs and not cuda else None


def with_head(speculative: dict[str, Any] | None, folder: Path, tokens: int) -> dict[str, Any] | None:
    """Return the configuration of an arm. The head of EAGLE's arms is in the folder, and drafts this many tokens."""
    if not (speculative or {}).get("method", "").endswith("eagle"):
        return speculative
    return {"model": str(folder / "head"), "num_speculative_tokens": tokens} | (speculative or {})


def recorded(args: argparse.Namespace) -> tuple[list[forcing.Text], int]:
    """Return prompts with answers, in the order in which they are asked, and the size of the vocabulary."""
    if args.sessions:
        sessions = Sessions.load(args.sessions, args.tokenizer)
        rows, size = [row for turns in zip_longest(*sessions.turns.values()) for row in turns], sessions.vocab_size
    else:
        trace = Trace.load(args.trace, args.tokenizer)
        rows, size = trace.rows, trace.vocab_size
    kept = replayed([row for row in rows if row is not None and len(row[0]) <= args.prompt])
    # Of equal lengths, plain decoding would answer in lockstep and read prompts only between answers.
    most = [args.tokens // 2 + 89 * number % args.tokens for number in range(len(kept))]
    return [(p.tolist(), answer[:n].tolist()) for (p, answer), n in zip(kept, most, strict=True)], size


def cells(batches: Sequence[int], rounds: int, texts: int) -> dict[int, range]:
    """Return the numbers of the texts that each batch size asks; others are for the warm-up. Raises ValueError: there
    are too few texts."""
    sizes = [max(LEAST, max(2, rounds) * batch) for batch in batches]
    if (need := sum(sizes) + max(batches)) > texts:
        raise ValueError(f"{need} answers are needed, {texts} fit: fewer --batches or --rounds, or a larger --prompt")
    return {batch: range(end - size, end) for batch, size, end in zip(batches, sizes, accumulate(sizes), strict=True)}


def run(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Start the engine of one arm and measure it, in this process. given: as of `measure`; the folder has the model's
    configuration, the texts and what `forcing` takes."""
    import torch

    cuda, most, own = torch.cuda.is_available(), max(given["batches"]), dict(given["speculative"] or {})
    texts: list[forcing.Text] = json.loads((folder / "texts.json").read_text())
    measured, length = cells(given["batches"], given["rounds"], len(texts)), 64 + max(len(p) + len(a) for p, a in texts)
    texts[-most:] = [(prompt, answer[:WARM_UP_TOKENS]) for prompt, answer in texts[-most:]]
    options = {"dtype": json.loads((folder / "config.json").read_text()).get("torch_dtype", "auto")}
    if given["engine"] == "vllm":
        options |= {"max_model_len": length, "max_num_seqs": most, "speculative_config": given["speculative"]}
        graphs = {} if given["compiled"] else GRAPHS
        options |= {"gpu_memory_utilization": 0.85} | graphs if cuda else {"enforce_eager": True}
    else:
        options |= {"context_length": length, "max_running_requests": most, "sampling_backend": "pytorch"}
        if not cuda:
            options |= {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}
            options |= {"max_total_tokens": 2 * most * length}
        options |= {"speculative_algorithm": own.pop("method").upper()} if own else {}
        if "num_speculative_tokens" in own:
            options["speculative_num_draft_tokens"] = own.pop("num_speculative_tokens")
        os.environ.update({f"FREEDRAFT_{key.upper()}": str(value) for key, value in own.items()})
    started = time.perf_counter()
    engine = {"vllm": forcing.Vllm, "sglang": forcing.Sglang}[given["engine"]](folder, texts, **options)
    result: dict[str, Any] = {"start_s": time.perf_counter() - started, "cells": []}
    for batch, numbers in measured.items():
        engine.answers(range(len(texts) - batch, len(texts)), batch)
        forcing.logged(folder, "step")
        answers = engine.answers(numbers, batch)
        forcing.check(answers, texts)
        result["cells"].append(forcing.figures(answers, batch, forcing.logged(folder, "step")))
    return result


def measure(args: argparse.Namespace, speculative: dict[str, Any] | None, folder: Path, cuda: bool) -> dict[str, Any]:
    """Measure an arm in its own process. Raises SystemExit: it failed, or an answer is not the recorded one."""
    env = os.environ | OWN if cuda else in_process_environment() if args.engine == "vllm" else environment("sglang")
    paths = [plugin(folder / "plugin", "bench.lib.forcing:hook_sglang"), ROOT, ROOT / "kernels", ARCTIC]
    env |= {forcing.FOLDER: str(folder), "PYTHONPATH": os.pathsep.join([*map(str, paths), env.get("PYTHONPATH", "")])}
    given = json.dumps(vars(args) | {"speculative": with_head(speculative, folder, len(args.head))}, default=str)
    return dict(in_process(__file__, "--one", given, env=env), speculative=speculative)


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        print("\n" + json.dumps(run(json.loads(sys.argv[2]), Path(os.environ[forcing.FOLDER]))), flush=True)
        os._exit(0)  # engines' threads may not end
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=list(ARMS), default="vllm")
    parser.add_argument("--arms", nargs="+", help="names, or NAME=JSON; default: all of the engine")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, help='JSONL with "prompt" and "output"')
    what.add_argument("--sessions", type=Path, help='JSONL with "session" and "messages"')
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder, or its tokenizer.json")
    parser.add_argument("--shape", type=Path, help="a model's config.json; default: Llama-3.1-8B's, tiny without a GPU")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="requests at a time")
    parser.add_argument("--rounds", type=int, default=3, help="requests of a batch size, for each one at a time")
    parser.add_argument("--tokens", type=int, default=256, help="half to one and a half of them of each answer")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt at most; others are left out")
    parser.add_argument("--head", type=float, nargs="+", default=[0.85, 0.7, 0.6], help="of each token: share accepted")
    parser.add_argument("--compiled", action="store_true", help="vLLM's default compilation, which takes minutes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, known = gpu().get("gpu", ""), ARMS[args.engine]
    named = {name: text for name, _, text in (arm.partition("=") for arm in args.arms or known)}
    try:
        if not 1 >= args.head[0] >= args.head[-1] >= 0 or args.head != sorted(args.head, reverse=True):
            raise ValueError(f"--head must be falling shares from 1 to 0, not {args.head}")
        if strange := [name for name, text in named.items() if not (text or name in known)]:
            raise ValueError(f"no arm {', '.join(strange)}: {', '.join(known)}, or NAME=JSON")
        wanted = {name: json.loads(text) if text else known[name] for name, text in named.items()}
        texts, vocabulary = recorded(args)
        shape = json.loads(args.shape.read_text()) if args.shape else (LLAMA if device else TINY)
        if vocabulary > shape["vocab_size"]:
            raise ValueError(f"the shape has {shape['vocab_size']} tokens, the tokenizer {vocabulary}")
        asked = cells(args.batches, args.rounds, len(texts)).values()
        texts = texts[: max(numbers.stop for numbers in asked) + max(args.batches)]
    except (KeyError, OSError, ValueError) as error:
        parser.error(str(error))
    figures = {"engine": args.engine, "device": device or machine()["cpu"], "versions": versions(*PACKAGES)}
    figures |= {"shape": shape, "head": args.head, "texts": len(texts), "arms": {}, "errors": {}, "skipped": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text(json.dumps(shape))
        (folder / "texts.json").write_text(json.dumps(texts))
        (folder / "head").mkdir()
        (folder / "head" / "config.json").write_text(json.dumps(shape | HEAD))
        forcing.save_texts(folder, texts, args.head)
        for name, speculative in wanted.items():
            kind, said = "skipped", why_not(speculative or {}, bool(device))
            if not said:
                try:
                    kind, figures["arms"][name] = "done", measure(args, speculative, folder, bool(device))
                except SystemExit as error:
                    kind, said = "errors", str(error).splitlines()[-1]
            figures.get(kind, {})[name] = said
            print(f"{name}: {kind}, {said or 'every answer is the recorded one'}", flush=True)
    rows = [{"arm": name} | cell for name, found in figures["arms"].items() for cell in found["cells"]]
    form = "{tokens_per_s:,.0f} ({step_ms:.2f}, {tpot_ms:.2f}; {tokens_per_step:.2f}; {accepted:.0%})"
    print("tokens/s (ms of a step, of a token; tokens per step; rows accepted), by batch")
    print(pivot(rows, "arm={arm}", "batch", form))
    write_json(args.json, rounded(figures), data=[args.trace or args.sessions])
    return int(bool(figures["errors"]))


if __name__ == "__main__":
    sys.exit(main())
