"""Training-free speculative decoding for stock vLLM and SGLang: what both plugins share."""

__version__ = "0.1.0"
