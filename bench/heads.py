"""What n-grams bring on top of a drafter of vLLM's own, on model runner V2 in Triton's interpreter: counts, no speed.

    python -m bench.heads --json bench/results/heads.json

Models are synthetic: random, of two layers, with an EAGLE head that is right as often as `tests.support.built_head`
builds it, by a factor. Each prompt is asked twice: the second time its answer is known, so that n-grams are right.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.lib.results import ROOT, write_json
from tests.support.built_head import save_model_and_head
from tests.support.prompts import random_ids

K, TOKENS, FACTORS, VOCABULARY = 3, 30, (0.1, 0.3), 24
SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY, "intermediate_size": 96, "bos_token_id": 0, "eos_token_id": 1}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256}
ROOM = {"skip_tokenizer_init": True, "max_model_len": 64, "max_num_batched_tokens": 128, "max_num_seqs": 8}


def arms(head: Path) -> dict[str, dict[str, Any] | None]:
    """vLLM's speculative configuration, by arm."""
    own = {"model": str(head), "num_speculative_tokens": K}
    ours = {"policy": "fixed", "shape": "chain"}
    return {
        "plain": None,
        "head": own | {"method": "eagle"},
        "sssd": ours | {"method": "sssd", "num_speculative_tokens": 15},
        "sssd+head": own | {"method": "sssd+eagle", "policy": "fixed"},
    }


def measure(folder: Path, factor: float) -> dict[str, Any]:
    """By arm: counts, and whether all answers are those of the model alone."""
    sys.path.insert(0, str(ROOT / "tests" / "vllm"))
    from v2_engines import run

    model, head = save_model_and_head(folder, factor, **SHAPE)
    asked = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    case = {"prompts": random_ids([12] * 6, VOCABULARY, first=2, seed=3), "parameters": asked}
    engine = {"model": str(model), "cases": {"first": case, "again": case}, **ROOM}
    configs = arms(head)
    found = run("on_top.py", [engine | {"speculative_config": config} for config in configs.values()])
    plain, table = found[0]["first"]["answers"], {}
    for arm, said in zip(configs, found, strict=True):
        table[arm] = {
            name: {
                "tokens per verification": round(1 + said[name]["accepted"] / max(said[name]["drafts"], 1), 3),
                "rows per verification": round(1 + said[name]["drafted"] / max(said[name]["drafts"], 1), 3),
                "identical": said[name]["answers"] == plain,
            }
            for name in ("first", "again")
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"head tokens": K, "prompts": 6, "answer tokens": TOKENS, "factors": {}}
    for factor in FACTORS:
        with tempfile.TemporaryDirectory() as folder:
            figures["factors"][str(factor)] = measure(Path(folder), factor)
    print(json.dumps(figures, indent=1))
    write_json(arguments.json, figures)
    all_arms = [arm for table in figures["factors"].values() for arm in table.values()]
    if not all(row["identical"] for arm in all_arms for row in arm.values()):
        sys.exit("error: an arm has other answers than plain decoding")


if __name__ == "__main__":
    main()
