"""Engines in this process, one after the other, and what is left of each model once its engine has been shut down.

Argument: a model folder and a list of speculative configurations, as JSON. Prints whether each one's first layer is
gone.
"""

import gc
import json
import os
import sys
import weakref

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from tests.vllm.v2_interpreted.serve import schedule_asynchronously, take_any_mask


def is_gone(model, speculative_config):
    """Whether an engine leaves nothing of its model; vLLM's own part of that as vLLM's own process does it."""
    given = {"max_num_seqs": 2, "max_model_len": 64, "gpu_memory_utilization": 0.2}
    given |= {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True}
    llm = LLM(model, speculative_config=speculative_config, **given)
    parameters = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    llm.generate([TokensPrompt(prompt_token_ids=[1, 2, 3, 1, 2, 3])], parameters, use_tqdm=False)
    engine = llm.llm_engine
    left = weakref.ref(engine.model_executor.driver_worker.worker.model_runner.model.model.layers[0])
    engine.engine_core.shutdown()
    del llm, engine
    gc.collect()
    return left() is None


def main():
    take_any_mask()
    if os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1":
        schedule_asynchronously()
    model, configs = json.loads(sys.argv[1])
    print("\n" + json.dumps([is_gone(model, config) for config in configs]))


if __name__ == "__main__":
    main()
