"""An engine without drafts and one with them, asked about images: what both say, what was drafted, and whether the
positions of text behind an image are those that Qwen2-VL gives it, in drafts as elsewhere.

python images.py MODEL ROUNDS, on either model runner.
"""

import gc
import json
import os
import sys

from vllm import LLM, SamplingParams
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

from tests.support import images

V2 = os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
if V2:
    from tests.vllm.v2_interpreted import serve
ROOM = {"max_model_len": 192, "max_num_seqs": 8, "limit_mm_per_prompt": {"image": 1, "video": 0}}
ROOM |= {"compilation_config": {"custom_ops": ["-rotary_embedding"]}, "gpu_memory_utilization": 0.2}


def asked():
    """Greedily and with seeds; the first prompt with another image; and one that may say little but where an image
    begins."""
    prompts, greedy = images.prompts(), {"temperature": 0}
    each = [greedy] * 3 + [{"temperature": 0.8, "seed": seed, "top_p": 0.95} for seed in range(3)]
    each += [greedy, greedy | {"allowed_token_ids": [images.START, 9]}]
    seen = [*range(3), *range(3), 7, 0]
    given = [
        {"prompt_token_ids": prompt, "multi_modal_data": {"image": images.image(seed)}}
        for prompt, seed in zip([*prompts, *prompts, prompts[0], prompts[0]], seen, strict=True)
    ]
    return given, [SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False, **one) for one in each]


def note_positions():
    """Of text: how many tokens of steps have been seen, how many stood behind the newest one, and positions that are
    wrong."""
    forward, counts = Qwen2_5_VLForConditionalGeneration.forward, {"tokens": 0, "drafts": 0, "wrong": 0}
    start, end = images.BEFORE + 1, images.BEFORE + 1 + images.TOKENS

    def noted(self, input_ids, positions, *args, **more):
        if layers := get_forward_context().attn_metadata:
            of_step = next(iter(layers.values()))
            starts, lengths = of_step.query_start_loc.tolist(), of_step.seq_lens.tolist()
            for first, last, length in zip(starts, starts[1:], lengths, strict=False):
                prompt = length - (last - first) < end
                for at, index in enumerate(range(length - (last - first), length), first):
                    if start <= index < end:
                        continue
                    expected = index if index < start else index - images.TOKENS + images.FEWER
                    counts["wrong"] += positions[:, at].tolist() != [expected] * 3
                    counts["tokens"] += 1
                    counts["drafts"] += not prompt and at > first
        return forward(self, input_ids, positions, *args, **more)

    Qwen2_5_VLForConditionalGeneration.forward = noted
    return counts


def note_drafts(runner):
    """Ids of all tokens that are drafted."""
    guarded = (runner.speculator if V2 else runner.drafter).guarded
    original, found = guarded.step, set()

    def step(*args, **more):
        if (drafts := original(*args, **more)) is not None:
            for tokens, count in zip(drafts.tokens.tolist(), drafts.counts.tolist(), strict=True):
                found.update(tokens[1:count])
        return drafts

    guarded.step = step
    return found


def served(model, rounds, method, counts):
    llm = LLM(model, enforce_eager=True, dtype="float32", disable_log_stats=False, speculative_config=method, **ROOM)
    worker, found = llm.llm_engine.model_executor.driver_worker.worker, {"answers": []}
    drafted = note_drafts(worker.model_runner) if method else set()
    counts.update(dict.fromkeys(counts, 0))
    for _ in range(rounds):
        outputs = llm.generate(*asked(), use_tqdm=False)
        found["answers"].append([list(output.outputs[0].token_ids) for output in outputs])
    figures = {m.name.rpartition("_num_")[2]: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    found["drafts"] = [figures.get(f"{name}_tokens", 0) for name in ("accepted", "draft")]
    return found | {"positions": dict(counts), "marks drafted": sorted(drafted & {*images.MARKS[2:]})}


def main():
    if V2:
        serve.as_on_devices()
    model, rounds, counts = sys.argv[1], int(sys.argv[2]), note_positions()
    plain = served(model, 1, None, counts)
    print("\n" + json.dumps([plain, served(model, rounds, {"method": "sssd"}, counts)]))


if __name__ == "__main__":
    main()
