"""Lets vLLM's model runner V2 run on a CPU: its kernels in Triton's interpreter, which stands in for a CPU backend.

For processes that have this folder on PYTHONPATH and VLLM_USE_V2_MODEL_RUNNER=1.
"""

import os
import types

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import triton.backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)
