"""Checks at start: setups that cannot verify drafts are rejected with the reason and what works instead."""

import os
from typing import Any, Literal, NamedTuple

from freedraft.config import ConfigError
from freedraft.engines.hooks import check
from freedraft.engines.sglang.hooks import LORA_HOOKS
from freedraft.engines.sglang_cpu import selected

CPU_BACKEND = "torch_native"

Shape = Literal["tree", "chain"]


class AttentionBackend(NamedTuple):
    """Draft shapes that an attention backend verifies correctly in TARGET_VERIFY (read in SGLang 0.5.23).

    Attributes:
        mla: shape for models with multi-head latent attention; None if neither. windows: with sliding windows.
        fixed_width: whether it is built for one number of nodes per request, so that each width needs its own.
        pages: whether MLA and windows also work with KV pages of several tokens.
        full: shape for models with neither.
    """

    mla: Shape | None
    windows: Shape | None
    fixed_width: bool = False
    pages: bool = True
    full: Shape | None = "tree"


BACKENDS = {
    # Windows are counted from a node's index instead of its position, which differ in trees.
    "triton": AttentionBackend(mla="tree", windows="chain"),
    # MLA is planned as causal, ignoring the mask; with windows, the mask does not match the keys that are read.
    "flashinfer": AttentionBackend(mla="chain", windows=None),
    # With MLA or windows, slots of nodes are read as numbers of pages.
    "fa3": AttentionBackend(mla="tree", windows="tree", fixed_width=True, pages=False),
    CPU_BACKEND: AttentionBackend(mla="tree", windows="tree"),
    # These read no mask: nodes see those before them, as those of EAGLE with topk 1. MLA on FA4 needs one kind of GPU.
    **dict.fromkeys(("fa4", "trtllm_mha"), AttentionBackend(None, "chain", fixed_width=True, full="chain")),
    **dict.fromkeys(
        ("flashmla", "trtllm_mla", "cutedsl_mla"), AttentionBackend("chain", None, fixed_width=True, full=None)
    ),
}

WITH_TREES = sorted(name for name, able in BACKENDS.items() if able.full == "tree" and name != CPU_BACKEND)


# Options of SGLang that are refused when they are on, given or above 1: why, and what works instead
REFUSED = {
    "pp_size": ("does not run under pipeline parallelism", "use --tp-size instead of --pp-size"),
    "disaggregation_mode": ("does not run under prefill-decode disaggregation", "serve without --disaggregation-mode"),
    # SGLang 0.5.23 turns the first one into the second and clears it.
    **dict.fromkeys(
        ("enable_dp_attention", "attn_dp_size"),
        ("does not run under DP attention", "start without it (--attn-dp-size), or with --dp-size replicas"),
    ),
    "enable_watermark": ("does not watermark what it accepts", "start without --enable-watermark"),
    "enable_two_batch_overlap": ("does not go with two-batch overlap", "start without --enable-two-batch-overlap"),
    "enable_pdmux": ("does not run under PD multiplexing", "start without --enable-pdmux"),
    "dllm_algorithm": ("does not go with diffusion language models", "start without --dllm-algorithm"),
    "speculative_adaptive": ("chooses its own width per batch", "start without --speculative-adaptive"),
    "speculative_draft_model_path": ("has no draft model", "start without --speculative-draft-model-path"),
    "speculative_eagle_topk": ("takes no --speculative-eagle-topk", "use --speculative-num-draft-tokens"),
    "speculative_num_steps": ("takes no --speculative-num-steps", "use --speculative-num-draft-tokens"),
    "tokenizer_worker_num": ("is unknown to further front-end processes", "start without --tokenizer-worker-num"),
    # SGLang 0.5.23 takes the last token of a turn for one whose KV was computed.
    "enable_streaming_session": ("does not go with streaming sessions", "start without --enable-streaming-session"),
    # Accepted KV is moved to the front; what SGLang captures stays with the slots of the nodes.
    "enable_return_routed_experts": ("returns no routed experts", "start without --enable-return-routed-experts"),
    "enable_return_indexer_topk": ("returns no indexer's tokens", "start without --enable-return-indexer-topk"),
    "dcp_size": ("does not run under context parallelism", "start without --dcp-size"),
    "attn_cp_size": ("does not run under context parallelism", "start without --attn-cp-size"),
}

OF_NGRAMS = ("disaggregation_mode", "enable_dp_attention", "attn_dp_size")
OF_HEADS = ("speculative_draft_model_path", "speculative_eagle_topk", "speculative_num_steps")

REFUSED_MODELS = {
    **dict.fromkeys(
        ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
        "sparse attention of MiniMax-M3, whose KV does not move",
    ),
    # SGLang 0.5.23 takes a verification of several requests for their prefill, and ends.
    **dict.fromkeys(
        ("LlavaLlamaForCausalLM", "LlavaQwenForCausalLM", "LlavaMistralForCausalLM", "LlavaVidForCausalLM"),
        "LLaVA in this form, which cannot verify several requests",
    ),
    "GlmImageForConditionalGeneration": "GLM-Image, whose next positions are not those of a text",
}


def widths_for(
    backend: str, max_nodes: int, *, adapters: bool = False, together: bool = False, least: int = 1
) -> tuple[int, ...]:
    """Return the numbers of nodes per request, root included, that steps may have on this attention backend, from
    `least` on; ascending.

    A small set on GPUs (powers of four and the maximum): each needs CUDA graphs, and their memory, for all batch sizes;
    with LoRA adapters one, since SGLang keeps their inputs for graphs of one width; also one if ranks that draft by
    themselves run a step `together`. On a CPU there are no graphs and every node costs time, so every width is allowed.
    """
    if together or (adapters and backend != CPU_BACKEND):
        return (max_nodes,)
    if backend == CPU_BACKEND:
        return tuple(range(least, max_nodes + 1))
    powers = {1 << i for i in range(0, max_nodes.bit_length(), 2) if least < 1 << i < max_nodes}
    return tuple(sorted(powers | {least, max_nodes}))


def shape_for(name: str, backend: str, config: Any, window: int | None, page: int = 1) -> Shape:
    """Return the draft shape of the speculative algorithm `name` for a model, with KV pages of `page` tokens. Raises
    ConfigError: this attention backend verifies no drafts of the model."""
    from sglang.srt.configs.model_config import AttentionArch

    def shape_of(able: AttentionBackend) -> Shape | None:
        latent, windowed = config.attention_arch == AttentionArch.MLA, window is not None and window > -1
        shapes: list[Shape | None] = [able.mla if latent else able.full]
        if windowed:
            shapes.append(able.windows)
        if page > 1 and not able.pages and (latent or windowed):
            shapes.append(None)
        if config.attention_chunk_size is not None and able is not BACKENDS[CPU_BACKEND]:
            shapes.append(None)
        return None if None in shapes else "chain" if "chain" in shapes else "tree"

    shape = shape_of(BACKENDS[backend]) if backend in BACKENDS else None
    if shape is None:
        others = [name for name in WITH_TREES if shape_of(BACKENDS[name]) is not None]
        raise ConfigError(
            f"--speculative-algorithm {name} verifies no drafts of {config.hf_config.architectures[0]} on attention "
            f"backend {backend} and KV pages of {page} tokens, for its kind of attention: "
            + (f"use --attention-backend {' or '.join(others)}" if others else "start without it")
        )
    return shape


def refuse_unsupported(args: Any, name: str, *, runs_model: bool, head: bool = False) -> None:
    """Check SGLang's arguments for the speculative algorithm `name`. runs_model: see `MethodSpec`; head: whether
    another drafter runs, with its own settings. Raises ConfigError: an argument does not go with tree verification."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.server_args import ServerArgs

    flag = f"--speculative-algorithm {name.lower()}"

    def refuse(reason: str, remedy: str) -> None:
        raise ConfigError(f"{flag} {reason}: {remedy}")

    nodes = args.speculative_num_draft_tokens
    if nodes is not None and not 1 <= nodes <= 256:
        refuse(f"cannot verify {nodes} nodes per request", "set --speculative-num-draft-tokens to 1..256, say 16")
    adapters = getattr(args, "enable_lora", False) or getattr(args, "lora_paths", None)
    if adapters and (runs_model or args.attn_dp_size > 1 or check(LORA_HOOKS)):
        other = "sssd" if runs_model else "ngram without DP attention"
        refuse("does not go with LoRA adapters", f"serve a merged model, or use --speculative-algorithm {other}")
    for option, (reason, remedy) in REFUSED.items():
        if (head and option in OF_HEADS) or (option in OF_NGRAMS and not (head or runs_model)):
            continue
        given = getattr(args, option, None) or 0
        if given > 1 if option.endswith(("_size", "_num")) else given not in (0, "null"):
            refuse(reason, remedy)
    usual = ServerArgs(model_path=args.model_path)
    for option in (name for name in dir(usual) if name.startswith("speculative_ngram_")):
        read = option == "speculative_ngram_external_corpus_max_tokens"  # see `let_corpora_through`
        if not read and getattr(args, option) != getattr(usual, option):
            refuse(f"does not read --{option.replace('_', '-')}", "start without it; option 'datastore' names a corpus")
    # A draft node needs a mask of packed bits, and a grammar that steps back.
    if (backend := args.grammar_backend) not in (None, "none", "xgrammar", "llguidance"):
        refuse(f"does not go with --grammar-backend {backend}", "use --grammar-backend xgrammar or llguidance")
    if (config := model_config_of(args)).is_encoder_decoder:
        refuse("does not serve an encoder, whose KV comes before that of the tokens", "start without it")
    if runs_model and mambaish_config(config) is not None:
        refuse("does not skip recurrent layers", "use --speculative-algorithm sssd")
    if getattr(config, "use_ngram_embedding", False) or getattr(config, "use_engram", False):
        refuse("does not serve embeddings of several tokens, which would mix a tree's branches", "start without it")
    if (architecture := config.hf_config.architectures[0]) in REFUSED_MODELS:
        refuse(f"does not serve {REFUSED_MODELS[architecture]}", "start without it")
    if args.linear_attn_verify_backend == "flashinfer":  # it reads and writes states as if all steps were as wide
        refuse("does not go with --linear-attn-verify-backend flashinfer", "use --linear-attn-verify-backend triton")
    if os.environ.get("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "0").lower() in ("1", "true", "yes", "y"):
        refuse("cannot read its trees from graphs of metadata", "unset SGLANG_ENABLE_METADATA_GLUE_GRAPH")
    thresholds = (args.speculative_accept_threshold_single, args.speculative_accept_threshold_acc)
    if any(t is not None and t != 1.0 for t in thresholds):
        refuse(
            "is lossless and accepts nothing by threshold", "leave both --speculative-accept-threshold options at 1.0"
        )
    if args.device == "cpu" and not selected():
        refuse("needs tree attention, which stock SGLang lacks on a CPU", "set SGLANG_PLATFORM=freedraft_cpu")
    usable = {CPU_BACKEND} if selected() else set(BACKENDS) - {CPU_BACKEND}
    if (backend := verify_backend(args)) is not None and backend not in usable:
        phase = "decode" if args.speculative_attention_mode == "decode" else "prefill"
        option = "" if backend == args.attention_backend else f" (--{phase}-attention-backend)"
        refuse(
            f"cannot verify trees on attention backend {backend}{option}",
            f"use --attention-backend {CPU_BACKEND if selected() else ' or '.join(WITH_TREES)}",
        )


def state_shape(args: Any, name: str) -> Shape:
    """Return the draft shape of the speculative algorithm `name` that a model's recurrent states can follow, by
    SGLang's arguments. Raises ConfigError: SGLang keeps no states of drafts, or on XPU those of one width only."""
    from sglang.srt import configs
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs import hybrid_arch

    config = model_config_of(args)
    if (states := hybrid_arch.mambaish_config(config)) is None:
        return "tree"
    forward_only = configs.JetNemotronConfig | configs.JetVLMConfig | configs.ZayaConfig  # read in SGLang 0.5.23
    if args.device == "xpu" or isinstance(states, configs.MambaConfig | configs.FalconMambaConfig | forward_only):
        raise ConfigError(
            f"--speculative-algorithm {name} does not serve {config.hf_config.architectures[0]}, whose states SGLang "
            "cannot take back: start without it"
        )
    mamba2 = configs.FalconH1Config | configs.NemotronHConfig | configs.GraniteMoeHybridConfig | configs.Mamba2Config
    able = hybrid_arch.hybrid_gdn_config(config) or (isinstance(states, mamba2) and args.mamba_backend == "triton")
    if hybrid_arch.kimi_linear_config(config) is not None:
        able = args.linear_attn_verify_backend in (None, "triton", "helion")
    in_order = args.enable_linear_replayssm_spec or getattr(states, "ple_layer_ids", None)  # Qwen4-Exp
    return "tree" if able and not in_order else "chain"


def verify_backend(args: Any) -> str | None:
    """Return the attention backend of the verification pass; None if SGLang has not chosen one yet."""
    decodes = args.speculative_attention_mode == "decode"
    own = args.decode_attention_backend if decodes else args.prefill_attention_backend
    return own or args.attention_backend


def verify_backend_of(model_runner: Any) -> str:
    """Return the attention backend of the verification pass from a ModelRunner, which makes the final choice."""
    from sglang.srt.runtime_context import get_spec

    decodes = get_spec().speculative_attention_mode == "decode"
    own = model_runner.decode_attention_backend_str if decodes else model_runner.prefill_attention_backend_str
    return str(own)
