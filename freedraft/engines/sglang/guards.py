"""What cannot verify trees is refused at start, with the reason and what works instead; never silently wrong."""

from __future__ import annotations

from typing import Any

from freedraft.config import ConfigError

# Which backends read a custom tree mask in TARGET_VERIFY (SGLang 0.5.23), and whether its width may vary from step to
# step.
TREE_BACKENDS = {"triton": True, "flashinfer": True, "fa3": False}
CPU_BACKEND = "torch_native"
# With pages of more than one token, accepted branches may end in the middle of a page: only these backends address
# slots.
PAGED_TREE_BACKENDS = {"flashinfer", CPU_BACKEND}


def widths_for(backend: str, max_nodes: int) -> tuple[int, ...]:
    """The numbers of nodes per request, root included, that steps may have under this attention backend; ascending.

    A small set (powers of two and the maximum): each needs a CUDA graph of its own. On a CPU there are no graphs and
    every node costs, so any width is one. Backends that fix the width when they are built have the maximum only.
    """
    if backend == CPU_BACKEND:
        return tuple(range(1, max_nodes + 1))
    if not TREE_BACKENDS.get(backend, True):
        return (max_nodes,)
    powers = [1 << i for i in range(max_nodes.bit_length()) if 1 << i < max_nodes]
    return (*powers, max_nodes)


def refuse_unsupported(args: Any, name: str, *, cpu_platform: bool, runs_model: bool = False) -> None:
    """Check SGLang's arguments for the speculative algorithm `name`.

    Args:
        args: ServerArgs, or a view of it, once its own defaults are in.
        cpu_platform: whether the freedraft CPU platform is active.
        runs_model: whether it runs the target model to draft.

    Raises:
        ConfigError: an argument does not go with tree verification.
    """
    flag = f"--speculative-algorithm {name.lower()}"

    def refuse(reason: str, remedy: str) -> None:
        raise ConfigError(f"{flag} {reason}: {remedy}")

    nodes = args.speculative_num_draft_tokens
    if nodes is not None and not 1 <= nodes <= 256:
        refuse(f"cannot verify {nodes} nodes per request", "set --speculative-num-draft-tokens to 1..256, say 16")
    if getattr(args, "pp_size", 1) > 1:
        refuse("does not run under pipeline parallelism", "use --tp-size instead of --pp-size")
    if runs_model and args.tp_size > 1:
        refuse("does not run under tensor parallelism yet", "use --tp-size 1, or --speculative-algorithm sssd")
    if getattr(args, "enable_lora", False) or getattr(args, "lora_paths", None):
        refuse("does not go with LoRA adapters", "serve a merged model, or use --speculative-algorithm ngram")
    if getattr(args, "disaggregation_mode", "null") not in (None, "null"):
        refuse("does not run under prefill-decode disaggregation", "serve without --disaggregation-mode")
    if getattr(args, "enable_dp_attention", False):
        refuse("does not run under DP attention", "start without --enable-dp-attention, or with --dp-size replicas")
    if getattr(args, "enable_two_batch_overlap", False):
        refuse("does not go with two-batch overlap", "start without --enable-two-batch-overlap")
    if getattr(args, "dllm_algorithm", None):
        refuse("does not go with diffusion language models", "start without --dllm-algorithm")
    if getattr(args, "speculative_adaptive", False):
        refuse("chooses its own width per batch", "start without --speculative-adaptive")
    if getattr(args, "speculative_draft_model_path", None):
        refuse("has no draft model", "start without --speculative-draft-model-path")
    thresholds = (args.speculative_accept_threshold_single, args.speculative_accept_threshold_acc)
    if any(t is not None and t != 1.0 for t in thresholds):
        refuse(
            "is lossless and accepts nothing by threshold", "leave both --speculative-accept-threshold options at 1.0"
        )
    if getattr(args, "enable_deterministic_inference", False):
        refuse(
            "cannot repeat the sampled tokens of plain decoding seed by seed",
            "start without --enable-deterministic-inference (the distribution is the same)",
        )
    for option in ("dcp_size", "attn_cp_size"):
        if (getattr(args, option, 1) or 1) > 1:
            refuse("does not run under context parallelism", f"start without --{option.replace('_', '-')}")
    backend = decode_backend(args)
    _check_backend(args, backend, refuse, cpu_platform)


def _check_backend(args: Any, backend: str | None, refuse: Any, cpu_platform: bool) -> None:
    if args.device == "cpu" and not cpu_platform:
        refuse("needs tree attention, which stock SGLang lacks on a CPU", "set SGLANG_PLATFORM=freedraft_cpu")
    usable = {CPU_BACKEND} if cpu_platform else set(TREE_BACKENDS)
    if backend is not None and backend not in usable:
        refuse(
            f"cannot verify trees on attention backend {backend}",
            f"use --attention-backend {' or '.join(sorted(usable))}",
        )
    page = getattr(args, "page_size", None)
    if page is not None and page > 1 and backend is not None and backend not in PAGED_TREE_BACKENDS:
        remedy = "use --page-size 1, or --attention-backend flashinfer"
        refuse(f"cannot compact trees on pages of {page} tokens with attention backend {backend}", remedy)


def decode_backend(args: Any) -> str | None:
    """The attention backend that runs the verifying pass; None where SGLang has not chosen one."""
    return getattr(args, "decode_attention_backend", None) or args.attention_backend
