"""KNN-SSD's premises on one model, without an engine: sets of domains, ways to make them, clusters, unknown domains.

python bench/domains.py --model build/model --data a.jsonl b.jsonl ... --unknown qa rag --json build/domains.json

Domains are those of bench/selection.py. The model (float32) answers prompts greedily; sets and anchors are made as
`freedraft calibrate knn` makes them, but that sublayers which no set may skip are found once, on all domains. Figures
are of held-out prompts: the share of tokens on which a draft pass and the whole model agree, and the speed over plain
decoding that follows for drafts of 5 tokens, if each is accepted as often; a draft pass costs the share c of weights
that it reads.
"transfer": the set of each domain, and of all together, on the prompts of each; "own": by domain, agreement of its own
set minus that of the others' mean and of the set of all domains, with the standard error over prompts.
"choices": anchors and searches of the sets, on all prompts. "clusters": sets of clusters of a log without labels.
"unknown": prompts of domains that no set was made for, routed with and without the similarity floor.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.lib.draft_chains import sample_of, weight_share
from bench.lib.machine import rounded
from bench.lib.results import write_json
from bench.selection import DRAFT, SEED, read_domains
from layerskip_plugin.calibrate import bayesian, knapsack, knn
from layerskip_plugin.calibrate.host_model import HostModel, Sample
from layerskip_plugin.calibrate.prompts import Answered, answer, encode, load_tokenizer
from layerskip_plugin.pass_times import tokens_per_time
from layerskip_plugin.selection.bit_search import BitSearch
from layerskip_plugin.selection.knn import ALL_DOMAINS, Domains
from layerskip_plugin.skip_set import SkipSet

ANSWERED = 8  # as `freedraft calibrate knn`
ANSWER, MAX_PROMPT = 48, 192  # tokens
Prompt = tuple[str, int]  # domain, and place among its held-out prompts


class Data:
    """Prompts of the domains, of which some are held out: answers to learn from, tokens to draft, last states."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.host, self.tokenizer = HostModel.load(options.model, dtype="float32"), load_tokenizer(options.model)
        self.size = round(options.share * self.host.sublayers)
        texts = read_domains(options.data, [*options.categories, *options.unknown])
        self.tokens, self.survivors, self.unknown = options.tokens, options.survivors, options.unknown
        self.known = [name for name in texts if name not in options.unknown]
        self.learn: dict[str, list[Answered]] = {}
        self.states: dict[str, Any] = {}
        self.held: dict[str, list[Sample]] = {}
        self.held_states: dict[str, Any] = {}
        self._agreement: dict[tuple[Prompt, SkipSet], float] = {}
        for name, part in texts.items():
            answers = self._answers(part[: options.held])
            read = [self.host.read(one.tokens, torch.arange(one.prompt, len(one.tokens))) for one in answers]
            self.held[name] = [Sample([text]) for text in read]
            ends = [text.final[one.prompt - 1] for one, text in zip(answers, read, strict=True)]
            self.held_states[name] = torch.stack(ends).numpy(force=True)
            if name in self.known:
                learn = part[options.held :][: options.prompts]
                self.learn[name] = self._answers(learn[:ANSWERED])
                states = [self.host.read(encode(self.tokenizer, text, MAX_PROMPT)).final[-1] for text in learn]
                self.states[name] = torch.stack(states).numpy(force=True)

        everything = [one for part in self.learn.values() for one in part]
        self.kept = knapsack.protected_sublayers(self.host, sample_of(self.host, everything, self.tokens, SEED))

    def _answers(self, texts: Sequence[str]) -> list[Answered]:
        return answer(self.host, self.tokenizer, texts, ANSWER, MAX_PROMPT, batch=8)

    def prompts(self, domain: str) -> list[Prompt]:
        return [(domain, place) for place in range(len(self.held[domain]))]

    def agreement(self, prompt: Prompt, skip: SkipSet) -> float:
        if (prompt, skip) not in self._agreement:
            found = self.host.scores([skip], self.held[prompt[0]][prompt[1]])[0]
            self._agreement[prompt, skip] = float(found[0])
        return self._agreement[prompt, skip]

    def agreements(self, domain: str, skip: SkipSet) -> Any:
        return np.array([self.agreement(prompt, skip) for prompt in self.prompts(domain)])

    def figures(self, choices: Sequence[tuple[Prompt, SkipSet]]) -> dict[str, float]:
        """Return the figures of prompts, each drafted with a set."""
        agreement = float(np.mean([self.agreement(*choice) for choice in choices]))
        c = float(np.mean([weight_share(self.host, skip) for _, skip in choices]))
        speed = tokens_per_time(agreement, c, lambda n: 1.0, DRAFT)
        return {"agreement": agreement, "c": c, "expected_speed": speed}


def searched(data: Data, answers: Sequence[Answered], iterations: int) -> SkipSet:
    """Return the set of these answers; iterations: of Bayesian optimisation, 0: the knapsack search."""
    sample = sample_of(data.host, answers, data.tokens, SEED)
    if iterations:
        space = BitSearch(data.host.n_layers, data.host.fingerprint, size=data.size, seed=SEED)
        return bayesian.search(lambda skips: data.host.scores(skips, sample)[0], space, iterations)
    found = knapsack.search(data.host, sample, max_weight=data.size, protected=data.kept, survivors=data.survivors)
    return found[-1].skip


def sets_of(data: Data, parts: Sequence[Sequence[Answered]], iterations: int) -> list[SkipSet]:
    """Return the sets of the domains, and the one of all."""
    parts = [part[:ANSWERED] for part in parts]
    return [searched(data, part, iterations) for part in (*parts, [one for part in parts for one in part])]


def transfer(data: Data, sets: dict[str, SkipSet], search: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    own: list[dict[str, Any]] = []
    for domain in data.known:
        for name, skip in sets.items():
            figures = data.figures([(prompt, skip) for prompt in data.prompts(domain)])
            rows.append({"search": search, "set": name, "on": domain} | figures)
        mine = data.agreements(domain, sets[domain])
        others = np.mean([data.agreements(domain, sets[n]) for n in data.known if n != domain], 0)
        all_domains = data.agreements(domain, sets[ALL_DOMAINS])
        for name, theirs in (("others", others), (ALL_DOMAINS, all_domains)):
            more = mine - theirs
            error = float(more.std(ddof=1) / len(more) ** 0.5)
            own.append({"search": search, "domain": domain, "over": name, "more": float(more.mean()), "error": error})
    return {"transfer": rows, "own": own}


def routed(data: Data, domains: Domains, names: Sequence[str]) -> list[tuple[Prompt, Any]]:
    """Return the place in `domains.sets` of each held-out prompt of some domains."""
    return [pair for n in names for pair in zip(data.prompts(n), domains.route(data.held_states[n]), strict=True)]


def fitted(data: Data, sets: dict[str, SkipSet], anchors: str) -> Domains:
    return knn.fit([*data.states.values()], data.known, [*sets.values()], anchors=anchors, seed=SEED)


def choices(data: Data, sets: dict[str, dict[str, SkipSet]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for search, found in sets.items():
        for anchors in ("kmeans", "nearest"):
            domains = fitted(data, found, anchors)
            ways = routed(data, domains, data.known)
            right = float(np.mean([data.known.index(name) == way for (name, _), way in ways]))
            figures = data.figures([(prompt, domains.sets[way]) for prompt, way in ways])
            rows.append({"search": search, "anchors": anchors, "routed": right} | figures)
            print(rounded(rows[-1]), flush=True)
    return rows


def of_clusters(data: Data, counts: Sequence[int], all_domains: SkipSet) -> list[dict[str, Any]]:
    """Return figures by number of clusters; 1: the set of all domains."""
    log = [one for part in data.learn.values() for one in part]
    states = np.concatenate([data.states[name][: len(part)] for name, part in data.learn.items()])
    held = [prompt for name in data.known for prompt in data.prompts(name)]
    rows: list[dict[str, Any]] = [{"clusters": 1} | data.figures([(prompt, all_domains) for prompt in held])]
    for count in counts:
        members = knn.clusters(states, count, SEED)
        sets = [*(searched(data, [log[i] for i in part[:ANSWERED]], 0) for part in members), all_domains]
        domains = knn.fit([states[m] for m in members], [str(i) for i in range(len(members))], sets, seed=SEED)
        figures = data.figures([(prompt, sets[way]) for prompt, way in routed(data, domains, data.known)])
        rows.append({"clusters": count, "sizes": [len(part) for part in members]} | figures)
        print(rounded(rows[-1]), flush=True)
    return rows


def of_unknown(data: Data, sets: dict[str, SkipSet]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    ways = {
        "nearest anchor": replace(fitted(data, sets, "nearest"), floor=-1.0),
        "with floor": fitted(data, sets, "kmeans"),
    }
    for domain in data.unknown:
        for name, domains in ways.items():
            found = routed(data, domains, [domain])
            to = [[*sets][way] for _, way in found]
            figures = data.figures([(prompt, domains.sets[way]) for prompt, way in found])
            rows.append({"domain": domain, "set": name, "routed": {n: to.count(n) for n in sets if n in to}} | figures)
        pairs = [(prompt, sets[ALL_DOMAINS]) for prompt in data.prompts(domain)]
        rows.append({"domain": domain, "set": ALL_DOMAINS} | data.figures(pairs))
        print(rounded(rows[-3:]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--categories", nargs="*", default=[], help="split files with categories into these domains")
    parser.add_argument("--unknown", nargs="*", default=[], help="categories that no set is made for")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--prompts", type=int, default=24, help="per domain for anchors; 8 of them for sets")
    parser.add_argument("--held", type=int, default=6, help="held-out prompts per domain")
    parser.add_argument("--share", type=float, default=0.2, help="of sublayers that are skipped")
    parser.add_argument("--tokens", type=int, default=48, help="that sets are searched on")
    parser.add_argument("--survivors", type=int, default=2, help="per weight in the knapsack search")
    parser.add_argument("--iterations", type=int, nargs="*", default=[100], help="of Bayesian optimisation")
    parser.add_argument("--clusters", type=int, nargs="*", default=[2, 3, 5, 8])
    options = parser.parse_args()
    data = Data(options)
    sets: dict[str, dict[str, SkipSet]] = {}
    seconds: dict[str, float] = {}
    results: dict[str, Any] = {"domains": data.known, "held": options.held, "skipped": data.size, "transfer": []}
    results |= {"own": [], "seconds": seconds}

    def save(**more: Any) -> None:
        results.update(more)
        write_json(options.json, {options.model.name: rounded(results)}, data=options.data)

    for iterations in (0, *options.iterations):
        search, started = f"Bayesian {iterations}" if iterations else "knapsack", time.process_time()
        found = sets_of(data, [*data.learn.values()], iterations)
        seconds[search] = (time.process_time() - started) / len(found)
        sets[search] = dict(zip([*data.known, ALL_DOMAINS], found, strict=True))
        for name, rows in transfer(data, sets[search], search).items():
            results[name] += rows
        print(rounded({"seconds": seconds, "own": results["own"]}), flush=True)
        save(choices=choices(data, sets))
        if not iterations:
            save(unknown=of_unknown(data, sets[search]))
            save(clusters=of_clusters(data, options.clusters, sets[search][ALL_DOMAINS]))


if __name__ == "__main__":
    main()
