"""An engine without drafts and one with them, asked about images: what both say, as a line of JSON.

python -m tests.sglang.images MODEL ROUNDS: in a process of its own, since torchvision cannot be taken in later.
"""

import json
import sys

from tests.sglang.conftest import ids, sglang_engine
from tests.support import images

# Those of test_models, but for the tokenizer and images.
USUAL = dict.fromkeys(("FREEDRAFT_POLICY", "FREEDRAFT_SCORING", "FREEDRAFT_LIVE")) | {"TORCHDYNAMO_DISABLE": "1"}
OPTIONS = {"enable_deterministic_inference": True, "disable_radix_cache": True, "enable_multimodal": True}
OPTIONS |= {"mm_attention_backend": "sdpa"}


def asked(engine):
    """Greedily and with seeds, and the first prompt with another image."""
    said, prompts = {"max_new_tokens": 24, "ignore_eos": True}, images.prompts()
    each = [{"temperature": 0}] * 3 + [{"temperature": 0.9, "top_k": 20, "sampling_seed": seed} for seed in range(3)]
    sampling = [said | one for one in [*each, {"temperature": 0}]]
    seen = [images.image(seed) for seed in [*range(3), *range(3), 7]]
    return engine.generate(input_ids=[*prompts, *prompts, prompts[0]], image_data=seen, sampling_params=sampling)


def main():
    with sglang_engine(sys.argv[1], env=USUAL, **OPTIONS) as engine:
        plain = ids(asked(engine))
    with sglang_engine(sys.argv[1], env=USUAL, speculative_algorithm="sssd", **OPTIONS) as engine:
        rounds = [asked(engine) for _ in range(int(sys.argv[2]))]
    figures = [output["meta_info"] for outputs in rounds for output in outputs]
    found = {"plain": plain, "drafted": [ids(outputs) for outputs in rounds]}
    found |= {"accepted": sum(one["spec_num_correct_drafts"] for one in figures)}
    found |= {"proposed": sum(one["spec_num_proposed_drafts"] for one in figures)}
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
