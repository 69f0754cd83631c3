"""What an API server needs to run model runner V2 here as on GPUs: a plugin of vLLM, for all its processes.

For processes that have this folder on PYTHONPATH and SERVED_AS_ON_GPUS set.
"""

from __future__ import annotations

import os


def install():
    if os.environ.get("SERVED_AS_ON_GPUS") and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        from tests.vllm.v2_interpreted import serve

        serve.take_any_mask()
        serve.filter_as_on_cpus()
        serve.schedule_asynchronously()
    if os.environ.get("GATED"):
        import gated

        gated.install()
