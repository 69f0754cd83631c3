"""A small and a large model on a machine with a known roofline."""

from __future__ import annotations

from freedraft.cost.hardware import HardwareProfile
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.roofline import Roofline

LLAMA3_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPE = ModelShape(hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152)
PROFILE = HardwareProfile(name="x", peak_flops=9.2e11, bandwidth=5.1e10, source="measured")
ROOFLINE = Roofline(SHAPE, PROFILE)
