"""Lets vLLM's model runner V2 run on a CPU: its kernels in Triton's interpreter, which stands in for a CPU backend.

For processes that have this folder on PYTHONPATH and VLLM_USE_V2_MODEL_RUNNER=1.
"""

import functools
import os

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton.backends import Backend, backends
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.backends.driver import DriverBase
    from triton.language import core
    from triton.runtime import interpreter

    class Driver(DriverBase):
        """Active, and of a device called "cpu", on which the first of a kernel's configurations is the best one."""

        @classmethod
        def is_active(cls):
            return True

        def get_current_target(self):
            return GPUTarget("cpu", 0, 32)

        def get_active_torch_device(self):
            return "cpu"

        def get_benchmarker(self):
            return lambda *args, **kwargs: 1.0

        def map_python_to_cpp_type(self, ty):
            raise NotImplementedError

    backends["cpu"] = Backend(compiler=BaseBackend, driver=Driver)
    # Else it replaces the whole language at each launch and at each call within a kernel, a third of all time.
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda self: None
    # And it lists all types of NumPy whenever it asks for one, a tenth of the rest.
    core.pointer_type.__hash__ = core.dtype.__hash__
    of_scalars = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: of_scalars(kind.scalar)
