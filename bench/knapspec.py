"""KnapSpec's search on one model, without an engine: what lemma 4.1 certifies, and coarser weights of sublayers.

python bench/knapspec.py --model build/model --data a.jsonl b.jsonl ... --json build/knapspec.json

The model (float32) answers prompts greedily. Sets are searched on tokens of half of the answers, as `freedraft
calibrate knapsack` does; figures are of tokens of the others.
"certified": by number of skipped sublayers, the share of tokens on which the draft has the whole model's top-1 token,
on which the lemma says so from the cosine of its state, and on which the sharpest bound on a cosine would.
"weights": by the ratio of the times of an attention and an MLP sublayer (the head takes as long as an MLP sublayer) and
the largest weight, processor seconds of a search, and tokens per time over plain decoding of the set that it chooses.

python bench/knapspec.py --model build/graded --contexts 256 1024 4096 4096:32768 --json build/knapspec-contexts.json

By context, on texts of Python's library: sets of several searches, see bench/lib/contexts.py.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.lib import contexts
from bench.lib.draft_chains import sample_of
from bench.lib.machine import rounded
from bench.lib.results import write_json
from layerskip_plugin import knapsack_search
from layerskip_plugin.calibrate.host_model import HostModel, Sample
from layerskip_plugin.calibrate.knapsack import best_drafting, protected_sublayers, search
from layerskip_plugin.calibrate.prompts import Prompts, answer, load_tokenizer
from layerskip_plugin.knapsack_search import integer_weights
from layerskip_plugin.pass_times import PassTimes

SKIPPED = (1, 2, 3, 6, 12)
RATIOS, LARGEST = (1, 5, 12), (1, 2, 5, 12)  # attention over MLP; weights


@torch.inference_mode()
def certifying_cosine(states: Tensor, head: Tensor) -> Tensor:
    """float[N]: lemma 4.1, the cosine from which on a draft's state certainly has the same top-1 token:
    1 - xi^2 / (2 |x|^2 max_j |w_i - w_j|^2), with the best token i and the lead xi of its logit.

    The lemma assumes states of equal norm. Without a bias in the head it holds for any norms, which do not change the
    order of logits.

    Args:
        states: float[N, hidden], the whole model's, as the head takes them; head: float[V, hidden].
    """
    states, head = states.float(), head.float()
    logits, tokens = (states @ head.T).topk(2)
    best, norms = head[tokens[:, 0]], head.square().sum(1)
    farthest = (best.square().sum(1, True) + norms - 2 * best @ head.T).amax(1)
    lead = logits[:, 0] - logits[:, 1]
    return 1 - lead.square() / (2 * states.square().sum(1) * farthest)


def sharpest_cosine(state: Tensor, head: Tensor) -> Tensor:
    """Return the least cosine to a state that excludes another top-1 token: that of the angle to the nearest plane on
    which the best token and another one have equal logits."""
    logits = head @ state
    others = torch.arange(len(head)) != logits.argmax()
    lead, apart = (logits.max() - logits)[others], (head[logits.argmax()] - head)[others].norm(dim=1)
    return (1 - (lead / (apart * state.norm())).min().square()).sqrt()


@torch.inference_mode()
def certified(host: HostModel, learn: Sample, held: Sample, protected: list[int]) -> list[dict[str, Any]]:
    final, best = held.gather(lambda t: t.final), held.gather(lambda t: t.best)
    needed = certifying_cosine(final, host.head.weight)
    least = torch.stack([sharpest_cosine(state, host.head.weight) for state in final])
    rows = []
    for found in search(host, learn, protected=protected, max_weight=max(SKIPPED)):
        if found.weight in SKIPPED:
            drafted = host.final_states([found.skip], held)[0]
            cosine = functional.cosine_similarity(drafted, final, dim=-1)
            agrees, certain = host.best(drafted) == best, cosine >= needed
            assert not (certain & ~agrees).any(), "the lemma is wrong"
            row = {"skipped": found.weight, "cosine": cosine.mean().item(), "agreement": agrees.float().mean().item()}
            row |= {"certified": certain.float().mean().item(), "sharpest": (cosine >= least).float().mean().item()}
            rows.append(row)
            print(rounded(row), flush=True)
    return rows


def times_of(host: HostModel, ratio: float) -> PassTimes:
    """Return times in those of an MLP sublayer; verification takes as long as a step."""
    step = host.n_layers * (ratio + 1.0) + 1.0
    return PassTimes(ratio, 1.0, 1.0, lambda n: step)


def of_weights(host: HostModel, learn: Sample, held: Sample, protected: list[int]) -> list[dict[str, Any]]:
    rows = []
    for ratio in RATIOS:
        times = times_of(host, float(ratio))
        for largest in LARGEST:
            if largest > ratio:
                break
            knapsack_search.MAX_WEIGHT = largest
            started = time.process_time()
            found = search(host, learn, protected=protected, weights=integer_weights(float(ratio), 1.0))
            seconds = time.process_time() - started
            chosen = best_drafting(found, times, trials=len(learn))
            assert chosen is not None
            agreement = float(host.scores([chosen.skip], held)[0][0])
            gain = times.best(chosen.skip, agreement)[0] * times.verify(1)
            row = {"ratio": ratio, "largest": largest, "sets": len(found), "seconds": seconds, "over_plain": gain}
            row |= {"attention": len(chosen.skip.attention), "mlp": len(chosen.skip.mlp), "agreement": agreement}
            rows.append(row)
            print(rounded(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", required=True)
    parser.add_argument("--data", type=Path, nargs="+", default=[])
    parser.add_argument("--contexts", nargs="*", default=[], help="only by context")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--prompts", type=int, default=8, help="prompts per file; searches see half of them")
    parser.add_argument("--tokens", type=int, default=64, help="calibration tokens")
    parser.add_argument("--held", type=int, default=512, help="tokens that figures are of")
    options = parser.parse_args()
    results = {}
    for folder in options.model:
        host, tokenizer = HostModel.load(folder, dtype="float32"), load_tokenizer(folder)
        if options.contexts:
            for results[folder.name] in contexts.by_context(host, tokenizer, options.contexts):
                write_json(options.json, results)
            continue
        prompts = [text for each in map(Prompts.load, options.data) for text in each.texts[: options.prompts]]
        answers = answer(host, tokenizer, prompts, 64, 256)
        learn = sample_of(host, answers[::2], options.tokens, 0)
        held = sample_of(host, answers[1::2], options.held, 0)
        protected = sorted(protected_sublayers(host, learn))
        results[folder.name] = {
            "certified": rounded(certified(host, learn, held, protected)),
            "weights": rounded(of_weights(host, learn, held, protected)),
        }
    write_json(options.json, results, data=options.data)


if __name__ == "__main__":
    main()
