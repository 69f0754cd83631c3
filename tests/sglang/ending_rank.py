"""An engine on two tensor-parallel ranks, one of which fails in the midst of a draft pass, and with it the process.

python -m tests.sglang.ending_rank MODEL FOLDER RANK, where FOLDER is for what each rank writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.sglang.conftest import GREEDY
from tests.sglang.test_tensor_parallel import skipping, two_ranks
from tests.support.conformance import PROMPTS


def main() -> None:
    model, folder, rank = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    env = skipping(model, "empty", FREEDRAFT_LOOKAHEAD="fixed", FREEDRAFT_LENGTH="3")
    with two_ranks(model, folder, env=env, speculative_algorithm="layerskip", skip_tokenizer_init=True) as engine:
        print("ready", flush=True)
        engine.generate(input_ids=PROMPTS[:1], sampling_params=GREEDY, rid=[f"ends{rank}"])
        print("answered", flush=True)


if __name__ == "__main__":
    main()
