"""The speculative algorithm as SGLang's core sees it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sglang.srt.runtime_context import get_platform
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from freedraft.config import ConfigError
from freedraft.cost.default_length import CHAIN
from freedraft.cost.hardware import CPU
from freedraft.engines import hooks
from freedraft.engines.hooks import stop_start
from freedraft.engines.sglang.guards import BACKENDS, refuse_unsupported, state_shape, verify_backend, widths_for
from freedraft.engines.sglang.hooks import DISTRIBUTIONS, TESTED_VERSIONS
from freedraft.engines.sglang.room import fitting_nodes
from freedraft.fingerprints import hardware_name, tokenizer_fingerprint
from freedraft.method import REPLACED, MethodSpec
from freedraft.step import EngineContext


def published_config(args: Any) -> Any:
    """Return the model's published config; SGLang rounds sizes in its own copy to what its ranks can share."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    return get_config(args.model_path, trust_remote_code=args.trust_remote_code, revision=args.revision)


def context_at_start(args: Any, head: int = 0) -> EngineContext:
    """Build the context in the front-end process, from ServerArgs with this plugin's defaults applied. head: see
    `EngineContext`."""
    config = published_config(args)
    nodes, together = args.speculative_num_draft_tokens, args.attn_dp_size > 1
    return EngineContext(
        hf_config=config,
        vocab_size=getattr(config.get_text_config(), "vocab_size", None),
        max_draft_tokens=nodes - 1,
        widths=None if together else widths_for(verify_backend(args) or "", nodes, least=head + 1),
        lengths=(nodes - 1,) if together else None,
        head=head,
        kv_dtype=str(args.kv_cache_dtype),
        page_size=args.page_size,
        tensor_parallel=args.tp_size,
        device=CPU if args.device == "cpu" else None,
    )


def context_of_worker(target_worker: Any, widths: tuple[int, ...], head: int) -> EngineContext:
    """Build the context in a scheduler; each data-parallel replica and attention rank has its own. head: see
    `EngineContext`."""
    from sglang.srt.runtime_context import get_parallel

    replica, together, most = get_parallel().dp_rank or 0, get_parallel().attn_dp_size > 1, widths[-1] - 1
    runner, tokenizer = target_worker.model_runner, target_worker.tokenizer
    return EngineContext(
        hf_config=published_config(runner.server_args), vocab_size=runner.model_config.vocab_size,
        max_draft_tokens=most, widths=None if together else widths, lengths=(most,) if together else None, head=head,
        dtype=str(runner.model_config.dtype).removeprefix("torch."), kv_dtype=str(runner.kv_cache_dtype),
        page_size=runner.page_size, tensor_parallel=runner.server_args.tp_size, rank=replica, gives_logits=head == 0,
        device=CPU if runner.device == "cpu" else None, hardware=hardware_name(str(runner.device)),
        tokenizer_fingerprint=partial(tokenizer_fingerprint, tokenizer) if tokenizer else lambda: None,
    )  # fmt: skip


def start_line(runner: Any, method: str, backend: str, widths: Sequence[int], *, trees: bool) -> str:
    """Return the start line of a server with captured CUDA graphs. runner: SGLang's ModelRunner; backend: attention
    backend of verification; widths: supported numbers of nodes per request, root included."""
    args, version = runner.server_args, hooks.installed_version(DISTRIBUTIONS)
    parts = [
        f"overlap scheduling {'off' if args.disable_overlap_schedule else 'on'}",
        f"CUDA graphs {'off' if runner.decode_cuda_graph_runner is None else 'on'}",
        f"attention {backend}",
    ]
    ranks = {"tensor": args.tp_size, "pipeline": args.pp_size, "data": args.dp_size}
    lengths = f"{'trees' if trees else 'chains'} of up to {widths[-1] - 1} draft tokens, {len(widths)} sizes"
    return hooks.start_line(method, "SGLang", version, TESTED_VERSIONS, parts, ranks, [lengths])


class Replaced(CustomSpecAlgo):
    """An algorithm that there is no more."""

    def handle_server_args(self, server_args: Any) -> None:
        stop_start(ConfigError(REPLACED[self.name.lower()]))


class TreeAlgorithm(CustomSpecAlgo):
    """Speculative algorithm that verifies draft trees built on the host.

    `is_ngram` is True so that SGLang's core uses its NGRAM branches: relay of accepted tokens under overlap scheduling,
    dummy input for graph capture, manager of external corpora.
    """

    spec: MethodSpec
    # Set by the worker. Called with the batch of each overlapped decoding step while the previous step is still running
    receive_step: Callable[[Any], Any] | None = None
    # Called with a batch of prompts that another server has read, and their first tokens, int64 [B]
    take_prompts: Callable[[Any, Any], Any]

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    # Called by SGLang's core, missing from CustomSpecAlgo 0.5.23.

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def build_disagg_draft_input(self, batch: Any, last_tokens_tensor: Any, future_map: Any) -> Any:
        from sglang.srt.managers.overlap_utils import RelayPayload

        made = self.take_prompts(batch, last_tokens_tensor)
        if batch.enable_overlap:
            made.future_indices = batch.req_pool_indices
            future_map.publish(made.future_indices, batch.seq_lens)
            future_map.stash(made.future_indices, RelayPayload.from_ngram(made))
        return made

    def create_future_map(self, device: Any, *args: Any, **kwargs: Any) -> Any:
        from freedraft.engines.sglang.drafting import EarlyFutureMap

        return EarlyFutureMap(device, self, *args, **kwargs)

    def handle_server_args(self, server_args: Any) -> None:
        """Fill in defaults and reject unsupported settings. Raises ConfigError: an argument is incompatible with tree
        verification, or an option is invalid."""
        try:
            self._complete(server_args)
        except ValueError as error:
            stop_start(ConfigError(str(error)))

    def _complete(self, args: Any) -> None:
        refuse_unsupported(args, self.name, runs_model=self.spec.runs_model)
        options, platform = self.spec.options.read(), get_platform()
        shape, unseen = getattr(options, "shape", None), args.device != "cpu" and (platform.is_hip or platform.is_xpu)
        backend, together = verify_backend(args) or "", args.attn_dp_size > 1
        flat = backend in BACKENDS and BACKENDS[backend].full != "tree"
        if (unseen or flat or together) and shape == "tree":
            where = "ROCm or XPU" if unseen else "DP attention" if together else f"attention backend {backend}"
            raise ConfigError(f"--speculative-algorithm {self.spec.name}: no trees on {where}: unset 'shape'")
        chains = "chain" in (shape, state_shape(args, self.spec.name)) or unseen or flat or together
        args.linear_attn_verify_backend = args.linear_attn_verify_backend or "triton"  # FlashInfer's is refused
        if args.max_running_requests is None:
            args.max_running_requests = 48 * args.attn_dp_size
        args.speculative_num_draft_tokens = fitting_nodes(args, self.spec.default_length or CHAIN, trees=not chains)
        # FA3 reads the tree mask only with topk > 1, in a second call per layer. topk * steps stays within the number
        # of nodes, so that SGLang reserves no more slots.
        args.speculative_eagle_topk = 1 if chains else 2
        args.speculative_num_steps = max(1, args.speculative_num_draft_tokens // 2)
        args.enable_mixed_chunk = False
        self.spec.check(options, context_at_start(args))
