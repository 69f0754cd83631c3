"""`KeptLayers`: a forward pass through some sublayers of the target, with the target's own modules; `Backbone`: the
modules of decoders that consist of plain pre-norm blocks (see `run_kept`)."""

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from freedraft.draft_model import PassOutputs
from freedraft.engines.draft_round import Sublayer, most_likely, run_kept, sublayers_of
from freedraft.engines.vllm.hooks import AOT_SWITCH

# Families with such blocks as decoder layers. Others may look the same and, for example, scale a residual.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
# Compiled for any number of tokens; vLLM treats 0 and 1 as special.
WARM_UP_TOKENS = 8


class UnsupportedModel(ValueError):
    """The model is not built of blocks that can be skipped. The message is one line."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """The parts of a target, looked up by name and checked. vocab_size: tokens of the head without padding; gather:
    concatenates the logits of all tensor-parallel ranks; None with one rank."""

    embedding: Any
    layers: tuple[Any, ...]
    norm: Any
    head: Any
    vocab_size: int
    scale: float
    gather: Callable[[torch.Tensor], torch.Tensor] | None

    @classmethod
    def of(cls, target: Any) -> Self:
        """Raises UnsupportedModel if `target` has another structure than this module's forward pass assumes."""
        from vllm.distributed import tensor_model_parallel_all_gather
        from vllm.model_executor.layers.layernorm import RMSNorm

        inner = getattr(target, "model", None)
        head, processor = getattr(target, "lm_head", None), getattr(target, "logits_processor", None)
        embedding, layers, norm = (getattr(inner, name, None) for name in ("embed_tokens", "layers", "norm"))
        refused = f"layers of {type(target).__name__} cannot be skipped"
        if any(part is None for part in (embedding, layers, norm, head, processor)):
            raise UnsupportedModel(f"{refused}: it is not a standard decoder")
        assert head is not None and processor is not None and layers is not None
        for index, layer in enumerate(layers):
            if problem := _problem(layer, RMSNorm):
                raise UnsupportedModel(f"{refused}: layer {index} {problem}")
        if type(norm) is not RMSNorm:
            raise UnsupportedModel(f"{refused}: its last norm is not RMSNorm")
        if processor.soft_cap is not None or processor.logits_as_input:
            raise UnsupportedModel(f"{refused}: its logits are capped")
        if len({getattr(layer.self_attn.attn, "sliding_window", None) for layer in layers}) > 1:
            raise UnsupportedModel(f"{refused}: they keep KV of different windows")
        gather = tensor_model_parallel_all_gather if getattr(head, "tp_size", 1) > 1 else None
        return cls(embedding, tuple(layers), norm, head, processor.org_vocab_size, float(processor.scale), gather)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary] before scaling, of normed hidden states [n, H]; of all tensor-parallel ranks together."""
        logits = self.head.quant_method.apply(self.head, hidden, bias=None)
        return (logits if self.gather is None else self.gather(logits))[:, : self.vocab_size]


def _problem(layer: Any, norm_type: type[nn.Module]) -> str | None:
    """Why a layer is not a pre-norm block of attention and MLP on tensors; None if it is one."""
    parts = {name for name, part in layer.named_children() if part is not None}
    if parts != LAYER_PARTS:
        odd = parts ^ LAYER_PARTS
        return f"has other parts than attention, MLP and their norms ({', '.join(sorted(odd))})"
    # Other norms may return a quantised activation instead of a tensor.
    if type(layer.input_layernorm) is not norm_type or type(layer.post_attention_layernorm) is not norm_type:
        return "has norms other than RMSNorm"
    if not hasattr(layer.self_attn, "attn"):
        return "has no attention over paged KV"
    if not {"positions", "hidden_states"} <= set(inspect.signature(layer.self_attn.forward).parameters):
        return "has an attention that takes other inputs than positions and hidden states"
    if not (hasattr(layer.mlp, "gate_up_proj") and hasattr(layer.mlp, "down_proj")):
        return "has no dense MLP"
    return None


class KeptLayers(nn.Module):
    """A draft pass: embedding, the kept sublayers in order, last norm, head, the most likely tokens, without a second
    copy of anything.

    It references the target's modules without registering them, so it follows changes to them. Must be called in vLLM's
    forward context, with attention metadata of one query token per request."""

    backbone: Backbone
    sublayers: list[Sublayer]  # kept

    def __init__(self, backbone: Backbone, skipped: tuple[bool, ...], outputs: PassOutputs) -> None:
        super().__init__()
        each = zip(sublayers_of(backbone.layers), skipped, strict=True)
        kept = [sublayer for sublayer, skips in each if not skips]
        hide = object.__setattr__  # past nn.Module, which would register them as children
        hide(self, "backbone", backbone)
        hide(self, "sublayers", kept)
        self.outputs = outputs

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run the pass over int64 [n], the newest token of each request and its position; see `most_likely`."""
        backbone = self.backbone
        hidden = run_kept(backbone.embedding(input_ids), self.sublayers, backbone.norm, positions=positions)
        return most_likely(backbone.logits(hidden), self.outputs, backbone.scale)


def compiled(vllm_config: Any, backbone: Backbone, skipped: tuple[bool, ...], outputs: PassOutputs) -> KeptLayers:
    """`KeptLayers`, compiled with vLLM's own machinery where the engine compiles; eager where it does not.

    Compiling takes about as long as for the target. `Attention` modules are shared: vLLM's compiled graphs look up
    metadata, slots and KV cache by layer name, so that one `Attention` serves the target and every draft.
    """
    from vllm.compilation.backends import set_model_tag
    from vllm.compilation.decorators import support_torch_compile
    from vllm.config import CompilationMode, set_current_vllm_config
    from vllm.forward_context import set_forward_context

    if vllm_config.compilation_config.mode in (None, CompilationMode.NONE, CompilationMode.STOCK_TORCH_COMPILE):
        return KeptLayers(backbone, skipped, outputs).eval()
    # vLLM's caches identify a compiled function by its qualified name and first line, and a graph by the model's tag.
    key = hashlib.sha256(repr((skipped, *outputs)).encode()).hexdigest()[:12]
    name = f"KeptLayers_{key}"

    def forward(self: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return KeptLayers.forward(self, input_ids, positions)

    forward.__qualname__ = f"{name}.forward"
    # Functions defined here would share one code object, and so the code compiled for another set.
    forward.__code__ = forward.__code__.replace(co_name=f"forward_{key}")

    def init(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        KeptLayers.__init__(self, backbone, skipped, outputs)

    # A pass is not a model that AOT compilation can save and load. Before vLLM 0.33, see `methods`.
    aot: dict[str, Any] = {} if AOT_SWITCH.problem() else {"use_aot_compile": False}
    kind: Any = support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0}, **aot)(
        type(name, (KeptLayers,), {"forward": forward, "__init__": init, "__qualname__": name})
    )
    device = backbone.norm.weight.device
    with set_current_vllm_config(vllm_config), set_model_tag(name):
        module = kind(vllm_config=vllm_config).eval()
        ids = torch.zeros(WARM_UP_TOKENS, dtype=torch.int64, device=device)
        positions = torch.arange(WARM_UP_TOKENS, dtype=torch.int64, device=device)
        with torch.inference_mode(), set_forward_context(None, vllm_config, num_tokens=WARM_UP_TOKENS):
            module(ids, positions)
    return module
