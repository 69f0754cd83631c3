"""A small and a large model on a machine with a known roofline."""

from types import SimpleNamespace
from typing import Any

from freedraft.cost.hardware import HardwareProfile
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.roofline import Roofline
from freedraft.step import EngineContext

LLAMA3_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPE = ModelShape(hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152)


def profile(**values: Any) -> HardwareProfile:
    """The GPU of arXiv 2411.05894, appendix B."""
    return HardwareProfile(**({"name": "x", "peak_flops": 165e12, "bandwidth": 0.95e12, "source": "measured"} | values))


PROFILE = profile(peak_flops=9.2e11, bandwidth=5.1e10)
ROOFLINE = Roofline(SHAPE, PROFILE)


def engine_context(config: dict[str, Any] = LLAMA3_8B, **values: Any) -> EngineContext:
    return EngineContext(hf_config=SimpleNamespace(to_dict=lambda: config), **({"max_draft_tokens": 8} | values))


def roofline_on(hardware: str) -> Roofline:
    return Roofline(ModelShape.from_config(LLAMA3_8B, dtype="bfloat16"), HardwareProfile.load(hardware))
