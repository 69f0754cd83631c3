"""N-grams on top of a drafter that SGLang runs itself ("head"): `--speculative-algorithm SSSD+EAGLE3`.

SGLang compares the algorithm's name in many places. So it becomes the head's before SGLang reads it, and ours an
attribute of ServerArgs, which reaches every process.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from freedraft.config import PREFIX, ConfigError
from freedraft.engines.hooks import stop_start
from freedraft.engines.sglang.guards import refuse_unsupported
from freedraft.method import METHODS, MethodSpec
from freedraft.on_top import NGRAMS

RESOLVE = "sglang.srt.server_args.ServerArgs.resolve_once"
COMPLETE = "sglang.srt.arg_groups.speculative_hook._handle_eagle_family"
CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"

HEADS = ("EAGLE", "EAGLE3", "NEXTN")  # topk 1: they draft one token after the other
K, NODES = 3, 16  # defaults: draft tokens of the head; nodes per request with those of n-grams, root included
_ATTRIBUTE = "_freedraft_on_top"
# Settings of the head that n-grams need as SGLang has them by default
_REFUSED = ("speculative_adaptive", "speculative_use_rejection_sampling", "enable_multi_layer_eagle")


class OnTop(NamedTuple):
    """name: of our method; nodes: --speculative-num-draft-tokens, if given."""

    name: str
    nodes: int | None


def on_top(args: Any) -> OnTop | None:
    """What goes on top of the algorithm of these ServerArgs; None: nothing of ours."""
    found: OnTop | None = getattr(args, _ATTRIBUTE, None)
    return found


def rename(resolve: Callable[[Any], None], args: Any) -> None:
    """Around `ServerArgs.resolve_once`: give SGLang the name of the head."""
    name, plus, head = (whole := args.speculative_algorithm or "").partition("+")
    try:
        if plus and whole.lower() not in METHODS and (spec := METHODS.get(name.lower())) is not None:
            _rename(args, spec, head.upper())
        resolve(args)
        if (ours := on_top(args)) is not None:
            from sglang.srt.arg_groups.overrides import resolution_result

            if (made := resolution_result(args, "speculative_algorithm")) not in ("EAGLE", "EAGLE3"):
                raise _error(ours.name, made, "SGLang runs this drafter otherwise", "start it alone")
    except ConfigError as error:
        stop_start(error)


def _rename(args: Any, spec: MethodSpec, head: str) -> None:
    if head not in HEADS:
        known = ", ".join(f"{spec.name}+{each.lower()}" for each in HEADS)
        raise _error(spec.name, head, "there is no such drafter to go on top of", f"use {known}, or one of both alone")
    if spec.name != "sssd":
        raise _error(spec.name, head, "only sssd drafts on top of others", f"use sssd+{head.lower()}")
    if args.speculative_eagle_topk not in (None, 1):
        raise _error(spec.name, head, "n-grams go behind chains", "start without --speculative-eagle-topk")
    own, nodes = (K if (n := args.speculative_num_steps) is None else n), args.speculative_num_draft_tokens
    if not 1 <= own < (own + 1 if nodes is None else nodes) <= 64:
        remedy = f"set --speculative-num-steps to 1..63 and --speculative-num-draft-tokens to {own + 1}..64"
        raise _error(spec.name, head, f"{own} draft tokens of the head do not go with {nodes or own + 1} nodes", remedy)
    args.speculative_algorithm, args.speculative_eagle_topk = head, 1
    args.speculative_num_steps, args.speculative_num_draft_tokens = own, own + 1
    setattr(args, _ATTRIBUTE, OnTop(spec.name, nodes))


def complete(original: Callable[[Any], None], server_args: Any) -> None:
    """Around SGLang's defaults for EAGLE: add ours."""
    from sglang.srt.arg_groups.overrides import record_foreign_defaults

    if (ours := on_top(server_args)) is None:
        return original(server_args)
    try:
        original(server_args)
        record_foreign_defaults(server_args, "freedraft", partial(_complete, ours))
    except ValueError as error:
        stop_start(ConfigError(str(error)))


def _complete(ours: OnTop, args: Any) -> None:
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.hybrid_arch import mambaish_config

    from freedraft.engines.sglang.algorithm import context_at_start

    spec, head = METHODS[ours.name], args.speculative_algorithm
    for option in _REFUSED:
        if getattr(args, option):
            flag = f"--{option.replace('_', '-')}"
            raise _error(ours.name, head, f"n-grams on top do not go with {flag}", "start without it")
    if os.environ.get(PREFIX + NGRAMS.upper()):
        raise _error(ours.name, head, f"option '{NGRAMS}' is --speculative-num-draft-tokens here", "set that one")
    refuse_unsupported(args, f"{ours.name}+{head}", runs_model=False, head=True)
    options: Any = spec.options.read()
    own = args.speculative_num_steps
    if options.shape == "tree" or options.recycle == "on":
        name = "shape" if options.shape == "tree" else "recycle"
        raise _error(ours.name, head, "n-grams on top are chains by text alone", f"leave option '{name}' out")
    _check_drafter(args, ours.name, head)
    # A recurrent model keeps a state for each node: longer drafts cost more than they bring.
    few = mambaish_config(model_config_of(args)) is not None and not args.enable_linear_replayssm_spec
    args.speculative_num_draft_tokens = ours.nodes or (own + 1 if few else max(own + 1, NODES))
    args.enable_mixed_chunk = False
    args.linear_attn_verify_backend = args.linear_attn_verify_backend or "triton"
    spec.check(options, context_at_start(args, own))


def _check_drafter(args: Any, name: str, head: str) -> None:
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.model_config import ModelConfig

    path, model = args.speculative_draft_model_path, model_config_of(args)
    made = ModelConfig.from_server_args(
        args, model_path=path, model_revision=args.speculative_draft_model_revision, is_draft_model=True
    )
    if made.hf_config.architectures == model.hf_config.architectures:
        remedy = "set --speculative-draft-model-path to the folder or name of one"
        raise _error(name, head, f"{path or 'the model'} is no drafter and brings none", remedy)
    if made.vocab_size != model.vocab_size:
        reason = f"the drafter has a vocabulary of {made.vocab_size}, the model of {model.vocab_size}"
        raise _error(name, head, reason, "use a drafter of this model")


def with_ngrams(create_worker: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    """Around `SpeculativeAlgorithm.create_worker`: ours, which has the head's."""
    made = create_worker(algorithm, server_args)
    if (ours := on_top(server_args)) is None:
        return made
    from freedraft.engines.sglang.on_top import OnTopWorker

    return partial(OnTopWorker, spec=METHODS[ours.name], head=made)


def _error(name: str, head: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(f"--speculative-algorithm {name}+{head.lower()}: {reason}: {remedy}")
