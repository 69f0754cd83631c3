"""vLLM's default number of draft tokens for models of today, and what it and others take. Nothing is run.

python -m tests.support.default_lengths --json bench/results/default-lengths.json
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from vllm import EngineArgs

from bench.forced import LLAMA
from bench.lib.results import write_json
from freedraft.cost.explain import draft_tokens
from freedraft.engines.vllm.room import room_of
from tests.support.published import QWEN3_30B, QWEN3_NEXT_80B, QWEN36_27B

MEMORY = 80e9  # bytes of a device
# Dense, as Qwen3.6-27B; vLLM's class of Qwen3-Next has the same states, which are float32 there.
QWEN_27B = QWEN3_NEXT_80B | QWEN36_27B["text_config"] | {
    "model_type": "qwen3_next", "num_experts": 0, "layer_types": 16 * QWEN3_NEXT_80B["layer_types"][:4],
}  # fmt: skip
NAMES = (
    "draft_tokens", "state_bytes_per_request", "requests_by_states", "mask_bytes", "full_graphs", "requests_in_a_graph",
)  # fmt: skip
FLOAT32 = {"mamba_ssm_cache_dtype": "float32"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama-3.1-8B, 256 requests": (LLAMA, {"max_num_seqs": 256}),
    "Llama-3.1-8B, 1,024 requests": (LLAMA, {"max_num_seqs": 1024}),
    "Qwen3-30B-A3B, 2 data-parallel ranks": (QWEN3_30B, {"max_num_seqs": 1024, "data_parallel_size": 2}),
    "Qwen3-Next-80B, 4 tensor-parallel ranks": (QWEN3_NEXT_80B, {"max_num_seqs": 1024, "tensor_parallel_size": 4}),
    "a 27B of Qwen3.6's kind": (QWEN_27B, {"max_num_seqs": 256} | FLOAT32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    path, rows = parser.parse_args().json, []
    for name, (config, given) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            args = EngineArgs(folder, skip_tokenizer_init=True, **given)
            room = room_of(args, args.create_model_config(), MEMORY)
        default, why, taken = draft_tokens(room, trees=False)
        known = {"engine": name, "default": default, "reason": why}
        rows += [known | dict(zip(NAMES, each, strict=True)) for each in taken]
        print(f"{name}: {default} draft tokens: {why}", *taken, sep="\n  ", flush=True)
    write_json(path, {"memory": MEMORY, "rows": rows})


if __name__ == "__main__":
    main()
