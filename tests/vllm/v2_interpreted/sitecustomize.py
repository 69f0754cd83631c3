"""Lets vLLM's model runner V2 run on a CPU: its kernels in Triton's interpreter, which stands in for a CPU backend.

For processes that have this folder on PYTHONPATH and VLLM_USE_V2_MODEL_RUNNER=1.
"""

import functools
import os

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton.backends import Backend, backends
    from triton.backends.compiler import BaseBackend
    from triton.backends.driver import DriverBase
    from triton.runtime import interpreter

    class Driver(DriverBase):
        """Active, which is all that is asked before a kernel runs; the interpreter makes no driver."""

        @classmethod
        def is_active(cls):
            return True

    backends["cpu"] = Backend(compiler=BaseBackend, driver=Driver)
    # Else it replaces the whole language at each launch and at each call within a kernel, a third of all time.
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda self: None
