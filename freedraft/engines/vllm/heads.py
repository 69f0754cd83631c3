"""N-grams on top of a drafter that vLLM runs ("head"): `{"method": "sssd+mtp", ...}`, with the options of both."""

from typing import Any

from freedraft.config import ConfigError
from freedraft.engines.vllm.context import SCHEDULE
from freedraft.method import MethodSpec
from freedraft.on_top import DEFAULT, MOST, NGRAMS

HEADS = ("mtp", "eagle", "eagle3")  # they draft one token after the other
AUTO = "auto"  # vLLM detects it
_ALONE = {"draft_sample_method": "greedy", "rejection_sample_method": "standard", "parallel_drafting": False}
_ALONE |= {SCHEDULE: None}  # settings of the head that n-grams need as vLLM has them by default


def take(spec: MethodSpec, head: str, given: dict[str, Any]) -> int | None:
    """Take the most n-gram tokens out of what is `given`; None: by default. Raises ConfigError."""
    if head not in (*HEADS, AUTO):
        known = ", ".join(f"'sssd+{name}'" for name in (*HEADS, AUTO))
        raise refusal(spec, f"n-grams go on top of no drafter '{head}': use {known}, or one of both alone")
    if spec.name != "sssd":
        raise refusal(spec, f"only 'sssd' drafts on top of other drafters: use 'sssd+{head}'")
    if head not in ("mtp",) and not given.get("model"):
        raise refusal(spec, f"'sssd+{head}' needs a \"model\": the folder or name of the drafter")
    longest = given.pop(NGRAMS, None)
    if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int) or not 1 <= longest <= MOST):
        raise refusal(spec, f"option '{NGRAMS}' must be a whole number up to {MOST}, not {longest!r}: leave it out")
    return longest


def check(spec: MethodSpec, head: str, config: dict[str, Any], options: Any, *, v2: bool) -> None:
    """Raises ConfigError: settings of the head, or of ours, that do not go together."""
    if not v2:
        raise refusal(spec, f"'sssd+{head}' needs model runner V2 of vLLM: use 'sssd', or '{head}' alone")
    for key, usual in _ALONE.items():
        if config.get(key, usual) not in (usual, None):
            raise refusal(spec, f"'{key}' {config[key]!r} does not go with n-grams on top: leave it out")
    if options.shape == "tree" or options.recycle == "on":
        name = "shape" if options.shape == "tree" else "recycle"
        raise refusal(spec, f"n-grams on top of '{head}' are chains by text alone: leave '{name}' out")


def longest(spec: MethodSpec, made: Any, given: int | None, model_config: Any, parallel_config: Any) -> int:
    """The most n-gram tokens. made: vLLM's SpeculativeConfig of the head. Raises ConfigError: they do not go on it."""
    own, of_head = made.num_speculative_tokens, made.draft_model_config.get_vocab_size()
    if made.method not in HEADS or made.parallel_drafting:
        raise refusal(spec, f"vLLM runs this drafter as '{made.method}': n-grams go on top of {', '.join(HEADS)} only")
    if of_head != (of_model := model_config.get_vocab_size()):
        raise refusal(spec, f"the head has a vocabulary of {of_head}, the model of {of_model}: use one of this model")
    if given is not None and given < own:
        raise refusal(spec, f"option '{NGRAMS}' must be at least the head's {own} tokens, not {given}: leave it out")
    if getattr(made.draft_model_config.hf_config, "num_nextn_predict_layers", 1) > 1 and made.method == "mtp":
        raise refusal(spec, f"n-grams do not go on top of several MTP layers: use '{made.method}' or 'sssd' alone")
    # One state per draft token, or one length for all ranks: longer drafts cost more than they bring.
    recurrent = model_config.is_hybrid or model_config.is_attention_free
    if recurrent or (parallel_config.data_parallel_size > 1 and model_config.is_moe):
        return given or own
    return given or max(own, DEFAULT)


def refusal(spec: MethodSpec, message: str) -> ConfigError:
    """What ends the start of an engine with this method."""
    return ConfigError(f"speculative config of method '{spec.name}': {message}")
