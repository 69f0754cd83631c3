"""Training-free speculative decoding for stock vLLM and SGLang: what both plugins share."""

__version__ = "0.2.0"
