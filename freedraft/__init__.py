"""Training-free speculative decoding for stock vLLM and SGLang: what both plugins share."""

from freedraft import compile_cache as compile_cache  # before anything is loaded from numba's cache

__version__ = "0.1.0"
