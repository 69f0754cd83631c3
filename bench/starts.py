"""Which starts on CUDA succeed: every method, runner, attention, shape and draft length, LoRA, heads, weights.

    python bench/starts.py vllm --json OUT            # then sglang, in its environment, into another file

Each arm starts an engine with random weights, compiles, captures its graphs and ends; it answers no request. An arm is
refused if the front end says why in one line before anything starts. It also works without a GPU, over libraries of
CUDA that run no kernels; the result says whether kernels ran.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from bench.lib.machine import versions
from bench.lib.results import commit, write_json
from layerskip_plugin.skip_set import SkipSet, model_fingerprint

SHAPE: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 768}
SHAPE |= {"intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 12, "num_key_value_heads": 4}
SHAPE |= {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "torch_dtype": "bfloat16"}
SHAPE |= {"vocab_size": 49152, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 64}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "num_nextn_predict_layers": 1}
GLM: dict[str, Any] = EXPERTS | {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_group": 1}
GLM |= {"n_routed_experts": 8, "n_shared_experts": 1, "topk_group": 1, "first_k_dense_replace": 1}
GLM["partial_rotary_factor"] = 0.5
QWEN: dict[str, Any] = EXPERTS | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
QWEN |= {"shared_expert_intermediate_size": 256, "full_attention_interval": 2, "linear_key_head_dim": 128}
QWEN |= {"linear_value_head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 8}
MODELS = {"dense": SHAPE, "experts": SHAPE | GLM, "recurrent": SHAPE | QWEN}  # and heads of the dense one
MODELS["eagle"] = SHAPE | {"num_hidden_layers": 1}  # of vLLM: SGLang's has another architecture
MODELS["eagle3"] = MODELS["eagle"] | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 49152}
MODELS["eagle3"] |= {(READ := "eagle_aux_hidden_state_layer_ids"): [0, 1, 2], "eagle_config": {READ: [0, 1, 2]}}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
INT4, WORDS = INT8 | {"num_bits": 4, "strategy": "group", "group_size": 128}, {"bits": 4, "group_size": 128}
TENSORS: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
TENSORS["config_groups"] = {"group_0": (GROUP := {"targets": ["Linear"], "weights": INT4})}
GROUP = GROUP | {"weights": INT8, "input_activations": INT8 | {"dynamic": True, "strategy": "token"}}
QUANTISED = {"int4": TENSORS, "int8": TENSORS | {"format": "int-quantized", "config_groups": {"group_0": GROUP}}}
QUANTISED["fp8"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
QUANTISED["awq"] = WORDS | {"quant_method": "awq", "zero_point": True, "version": "gemm"}
QUANTISED["gptq"] = WORDS | {"quant_method": "gptq", "desc_act": False, "sym": True}
KV = {"fp8-kv": "fp8_e4m3"}  # models and the types of their KV cache
MODELS |= {kind: SHAPE | {"quantization_config": given} for kind, given in QUANTISED.items()} | dict.fromkeys(KV, SHAPE)
HEADS = {"vllm": ("eagle", "eagle3", "mtp"), "sglang": ("eagle", "eagle3", "nextn")}
METHODS, SHAPES, LENGTHS = ("sssd", "layerskip", "sssd+layerskip"), ("chain", "tree"), (8, None)
RUNNERS = {"vllm": ("V2", "V1"), "sglang": ("-",)}
ATTENTION = {"vllm": ("FLASH_ATTN", "TRITON_ATTN"), "sglang": ("fa3", "triton")}
TREES = ("TRITON_ATTN", "triton")  # attention that verifies trees by default
SAID = re.compile(r"freedraft: method '[\w+]+': .*?drafts are (trees|chains)")
ERROR = re.compile(r"^.*?(\w*(?:Error|Exception)(?:: .+)?)$", re.MULTILINE)
VALUE = re.compile(r".*?Value error, (.*?) \[type=.*", re.DOTALL)  # as pydantic says what a validator raised
Arm = dict[str, Any]


def arms(engine: str) -> dict[str, Arm]:
    """Return the arms by name. length, requests: None for the default, of draft tokens and of requests at a time;
    compiled: whether vLLM compiles the model, as by default, which takes most of a start."""
    found = {}
    for *values, lora in product(METHODS, RUNNERS[engine], ATTENTION[engine], SHAPES, LENGTHS, (False, True)):
        arm = dict(zip(("method", "runner", "attention", "shape", "length"), values, strict=True))
        if "+" in str(arm["method"]) and arm["shape"] == "tree":
            continue  # chains only
        requests = None if lora and arm["length"] is None else 8  # with LoRA, defaults must go together
        name = " ".join(map(str, [engine, *values])) + " lora" * lora
        usual = (arm["length"] is None) == (arm["method"] == "sssd") and not lora  # the others have no default
        usual &= (arm["attention"] in TREES) == (arm["shape"] == "tree")
        found[name] = {"engine": engine} | arm | {"lora": lora, "requests": requests, "compiled": usual}
    own = [(f"sssd+{head}", "dense") for head in HEADS[engine][:2]]
    own += [(method, model) for method in (f"sssd+{HEADS[engine][2]}", "sssd") for model in ("experts", "recurrent")]
    quantised = [("sssd", kind) for kind in (*QUANTISED, *KV)]
    for (method, model), attention in (*product(own, ATTENTION[engine]), *product(quantised, ATTENTION[engine][:1])):
        arm = {"engine": engine, "method": method, "runner": RUNNERS[engine][0], "attention": attention}
        arm |= {"shape": "chain", "length": 3 if "+" in method else None, "lora": False, "requests": 8}
        found[" ".join(map(str, [*list(arm.values())[:6], model]))] = arm | {"compiled": False, "model": model}
    return found


def options(arm: Arm, folder: Path) -> dict[str, Any]:
    """Return the method's options."""
    given = {"shape": arm["shape"]} | ({"skip_set": str(folder / "skip_set.json")} if "layer" in arm["method"] else {})
    if arm["method"] == "layerskip" and arm["shape"] == "tree":
        given["lookahead"] = "confidence"  # drafts that end early: V2's condition for trees
    return given


def start_vllm(arm: Arm, folder: Path) -> None:
    from vllm import LLM

    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(arm["runner"] == "V2"))
    given = {"method": arm["method"]} | options(arm, folder)
    if arm["length"] is not None:
        given["num_speculative_tokens"] = arm["length"]
    if (head := arm["method"].partition("+")[2]) in MODELS:
        given["model"] = str(folder / head)
    engine: dict[str, Any] = {"load_format": "dummy", "max_model_len": 1024, "num_gpu_blocks_override": 512}
    engine["kv_cache_dtype"] = KV.get(arm.get("model", ""), "auto")
    engine |= {"attention_config": {"backend": arm["attention"]}, "enable_lora": arm["lora"]}
    engine |= {} if arm["compiled"] else {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    engine |= {} if arm["requests"] is None else {"max_num_seqs": arm["requests"]}
    LLM(str(folder / arm.get("model", "dense")), speculative_config=given, skip_tokenizer_init=True, **engine)


def start_sglang(arm: Arm, folder: Path) -> None:
    from sglang.srt.entrypoints.engine import Engine

    os.environ |= {f"FREEDRAFT_{name.upper()}": value for name, value in options(arm, folder).items()}
    engine = {"load_format": "dummy", "context_length": 1024, "mem_fraction_static": 0.3, "skip_tokenizer_init": True}
    engine |= {"attention_backend": arm["attention"], "sampling_backend": "pytorch"}
    engine["kv_cache_dtype"] = KV.get(arm.get("model", ""), "auto")
    if (most := arm["requests"]) is not None:
        engine |= {"max_running_requests": most, "cuda_graph_max_bs_decode": most, "cuda_graph_max_bs_prefill": 256}
    if (head := arm["method"].partition("+")[2]) in HEADS["sglang"]:
        engine |= {"speculative_num_steps": arm["length"]}
        engine |= {"speculative_draft_model_path": str(folder / head)} if head in MODELS else {}
    elif arm["length"] is not None:
        engine["speculative_num_draft_tokens"] = arm["length"]
    engine |= {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj"]} if arm["lora"] else {}
    Engine(model_path=str(folder / arm.get("model", "dense")), speculative_algorithm=arm["method"], **engine)


def forked(start: Any, log: Path, limit: float) -> dict[str, Any]:
    """Call `start` in a process of its own and return how it ended."""
    began, result = time.perf_counter(), log.with_suffix(".json")
    if (child := os.fork()) == 0:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        said = {"outcome": "started"}
        try:
            start()
        except BaseException as error:
            own = type(error).__name__ in ("ConfigError", "ValidationError")  # the latter is pydantic's
            said = {"outcome": "refused" if own else "failed", "line": VALUE.sub(r"\1", str(error))}
        result.write_text(json.dumps(said))
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0) and time.perf_counter() - began < limit:
        time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and the engine's processes
    text, said = log.read_text(errors="replace"), {"outcome": "failed", "line": f"no end after {limit:.0f} s"}
    if result.exists():
        said = json.loads(result.read_text())
    if said["outcome"] == "failed" and (errors := ERROR.findall(text)):
        said["line"] = errors[0]
    drafts = SAID.search(text)
    return said | {"drafts": drafts and drafts[1], "s": round(time.perf_counter() - began)}


def check_kernels() -> None:
    import torch

    assert int(torch.arange(5, device="cuda").sum()) == 10


def main() -> int:
    parser = argparse.ArgumentParser(description="Which starts on CUDA succeed?")
    parser.add_argument("engine", choices=list(RUNNERS))
    parser.add_argument("--only", default="", help="a regular expression that an arm's name contains")
    parser.add_argument("--limit", type=float, default=600, help="seconds for an arm")
    parser.add_argument("--logs", type=Path, help="keep the engines' logs there")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # FlashInfer is not needed
    if args.engine == "vllm":  # once for all arms, which are forked; SGLang makes a CUDA context when it is imported
        importlib.import_module("vllm.v1.worker.gpu_worker")
    wanted = {name: arm for name, arm in arms(args.engine).items() if re.search(args.only, name)}
    start, rows = {"vllm": start_vllm, "sglang": start_sglang}[args.engine], {}
    if args.json and args.json.exists():  # what was not asked for is kept
        rows = json.loads(args.json.read_text())["starts"]
    with tempfile.TemporaryDirectory() as temporary:
        folder, logs = Path(temporary), args.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        if args.engine == "sglang":
            MODELS["eagle"] |= {"architectures": ["LlamaForCausalLMEagle"], "tie_word_embeddings": False}
        for model, shape in MODELS.items():
            (folder / model).mkdir()
            (folder / model / "config.json").write_text(json.dumps(shape))
        skipped = SkipSet.of_sublayers([2, 3, 5], SHAPE["num_hidden_layers"], model_fingerprint(SHAPE))
        skipped.save(folder / "skip_set.json")
        ran = forked(check_kernels, folder / "kernels.log", args.limit)["outcome"] == "started"
        for name, arm in wanted.items():
            ended = forked(partial(start, arm, folder), logs / f"{name}.log", args.limit)
            rows[name] = arm | ended | {"kernels_run": ran, "commit": commit()} | versions(args.engine, "torch")
            print(f"{name}: {ended['outcome']}, {ended['s']} s, {ended['drafts']}, {ended.get('line', '')}", flush=True)
            write_json(args.json, {"starts": rows})
    return int(any(rows[name]["outcome"] == "failed" for name in wanted))


if __name__ == "__main__":
    sys.exit(main())
