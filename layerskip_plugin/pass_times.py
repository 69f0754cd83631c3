"""`PassTimes`: seconds of the parts of a pass, and resulting tokens per time."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from freedraft.cost.measured import Measured
from layerskip_plugin.skip_set import SkipSet

MAX_LENGTH = 10  # tokens of a draft


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the parts of a pass at one context length and batch."""

    attention: float  # of one sublayer in a draft pass
    mlp: float
    head: float  # and everything else in a draft pass
    verify: Callable[[int], float]  # step time by query tokens per request; `verify(1)`: without drafts

    def draft(self, skip: SkipSet) -> float:
        """t_draft(S) = kept attention * t_attn + kept MLP * t_mlp + t_head."""
        kept = (skip.n_layers - len(skip.attention)) * self.attention + (skip.n_layers - len(skip.mlp)) * self.mlp
        return kept + self.head

    def best(self, skip: SkipSet, acceptance: float, max_length: int = MAX_LENGTH) -> tuple[float, int]:
        """The most tokens per time with a set, and the draft length for it: the maximum over d of
        TPT(S, d) = (1 + a + ... + a^d) / (d * t_draft(S) + t_verify(d + 1))."""
        draft, tokens, rates = self.draft(skip), 1.0, []
        for d in range(1, max_length + 1):
            tokens += acceptance**d
            rates.append(tokens / (d * draft + self.verify(d + 1)))
        return max(rates), 1 + rates.index(max(rates))


def serving_times(measured: Measured, present: SkipSet, batch: int) -> PassTimes | None:
    """Times at a batch size and the context of the newest step; None before steps without drafts are timed there.
    Sublayers: by the roofline, scaled like the passes of the `present` set."""
    if not measured.baseline_known(batch):
        return None
    layers = present.n_layers
    skipped = ((), range(0, 2 * layers, 2), range(1, 2 * layers, 2))  # nothing, all attention, all MLP
    sets = [present, *(replace(SkipSet.of_sublayers(each, layers), window=present.window) for each in skipped)]
    predicted, whole, *without = (float(measured.times.roofline.pass_seconds(s, batch, measured.context)) for s in sets)
    scale = float(measured.pass_seconds(present, batch)) / predicted
    attention, mlp = (scale * (whole - each) / layers for each in without)
    head = scale * whole - layers * (attention + mlp)
    return PassTimes(attention, mlp, head, lambda n: float(measured.step_seconds(batch, batch * n)))
