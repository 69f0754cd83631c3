"""docs/departures.csv: the numbers that it gives for us are those of the code. docs/papers.md: its claims, verdicts and
figures are those of bench/results/claims.csv."""

import csv
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from layerskip_plugin import knapsack_search, pass_times
from layerskip_plugin.calibrate import commands, common, disco, knapsack, knn
from layerskip_plugin.lookahead.base import Confidence
from layerskip_plugin.lookahead.records import TOP
from layerskip_plugin.options import SWIFT_KEEPS, LayerSkipOptions
from layerskip_plugin.selection import online_search
from layerskip_plugin.selection.online_search import KnapSpec, Swift
from sssd_plugin.scoring import paper

ROOT = Path(__file__).resolve().parents[1]
NUMBER = re.compile(r"(?<![\w.])\d*\.?\d[\d,]*")


def default(function: object, name: str) -> float:
    return inspect.signature(function).parameters[name].default  # type: ignore[arg-type]


SEARCH_SHARE = 100 * LayerSkipOptions.model_fields["search_share"].default
TOKENS = common.Common.tokens

# By paper and row: the numbers before the reason. Rows without numbers are not here.
HERE: dict[str, dict[str, list[float]]] = {
    "SSSD": {
        "longest prefix looked up in the request": [paper.PREFIX],
        "longest n-gram of the request": [paper.GRAM],
        "occurrences in the request": [paper.OCCURRENCES],
        "shortest prefix looked up in the datastore": [1],  # the end of a loop, as in tests/drafter/literal_trie.py
        "prefixes are shortened while the tree has": [paper.ENOUGH],
        "continuations of a prefix": [paper.SAMPLES, paper.MIN_SAMPLES],
        "longest continuation from the datastore": [paper.BRANCH],
    },
    "Draft & Verify": {},
    "SWIFT": {
        "share of skipped sublayers, r": [default(Swift, "ratio")],
        "S, beta, gamma, patience, stop score": [
            Swift.most, Swift.bayesian, Swift.window, Swift.patience, Swift.stop_score,
        ],
        "never skipped": [SWIFT_KEEPS],
        "searched": [SEARCH_SHARE, online_search.SCORED_TOGETHER],
        "a better set is used": [100 * Swift.min_lead, Swift.confirm],
        "stop score compared with": [online_search.MATCHNESS_RATE],
        "proposals": [online_search.SAMPLES, online_search.SAMPLES, online_search.PARENTS],
        "Gaussian process": [online_search.MAX_OBSERVATIONS],
        "threshold of the early stop": [default(Confidence, "threshold")],
    },
    "KNN-SSD": {
        "anchors of a domain": [knn.MAX_ANCHORS],
        "states": [default(commands.knn, "prompts")],
        "prompts unlike all anchors": [knn.MARGIN],
        "search of a set": [default(commands.knn, name) for name in ("survivors", "tokens", "answered")],
    },
    "DISCO": {
        "top probabilities, k": [TOP],
        "network": [2, disco.HIDDEN],
        "records": [disco.MIN_TOKENS, disco.MIN_TOKENS],
    },
    "KnapSpec": {
        "pruning threshold tau": [knapsack_search.PRUNE],
        "longest draft D": [pass_times.MAX_LENGTH],
        "weight of the slower kind of sublayer": [knapsack_search.MAX_WEIGHT],
        "searched": [SEARCH_SHARE, KnapSpec.window, TOKENS],
        "sets kept per weight": [
            default(commands.knapsack, "survivors"), default(commands.skip_set, "survivors"),
        ],
        "a better set is used": [100 * KnapSpec.min_lead, KnapSpec.confirm],
        "never skipped": [knapsack.PROTECT],
        "early stop of drafts, tau_conf": [default(Confidence, "threshold")],
    },
}  # fmt: skip


def rows(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader((ROOT / path).open(encoding="utf-8")))


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


@pytest.mark.parametrize("name", HERE)
def test_numbers_of_departures_are_those_of_the_code(name: str) -> None:
    written = {row["what"]: numbers(row["here"]) for row in rows("docs/departures.csv") if row["paper"] == name}
    assert {row: found for row, found in written.items() if found} == {
        row: pytest.approx(found) for row, found in HERE[name].items()
    }


def test_claims_of_the_page_are_those_of_the_file() -> None:
    """One line per claim, whose figures are among those of the file."""
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    sections = dict(part.split("\n", 1) for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:])
    assert sections.keys() == HERE.keys()
    claims = rows("bench/results/claims.csv")
    for name, text in sections.items():
        shown = re.findall(r"^\| (?!claim |---)(.*) \|$", text, re.MULTILINE)
        mine = [row for row in claims if row["paper"] == name]
        assert shown == [" | ".join((r["claim"], ": ".join(filter(None, (r["verdict"], r["figure"]))))) for r in mine]
        for row in mine:
            given = numbers(f"{row['here']} {row['in the paper']} {row['claim']}")
            assert [
                n for n in numbers(row["figure"].replace("SmolLM2", "").replace("128 k", "128")) if n not in given
            ] == []


def test_figures_of_claims_are_those_of_the_results() -> None:
    """Of claims whose results are here as JSON."""

    def result(name: str) -> Any:
        return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))

    def only(rows: list[dict[str, Any]], key: str, **where: object) -> float:
        (found,) = (row[key] for row in rows if all(row[name] == value for name, value in where.items()))
        return found

    replayed, policies = result("replay-paper"), result("lookahead")["rows"]
    llama = {"trace": "replay_llama31_8b.jsonl", "budget": 32}
    alone, store, both = (
        only(replayed, "tokens_per_step", arm=arm, **llama) - 1 for arm in ("paper-alone", "paper-store", "paper")
    )
    qwen = {"trace": "replay_qwen2_72b.jsonl", "scoring": "paper"}
    own, other = (
        only(result("replay-stores"), "tokens_per_step", store=f"replay_{name}.jsonl", **qwen) - 1
        for name in ("qwen2_72b", "llama31_8b")
    )
    drafts = result("drafter-stores")["draft_us_per_call"]
    copy = only(result("long-copies-paper"), "tokens_per_step", kind="copy", shape="chain", context=128_000)
    costs = sorted({row["c"] for row in policies})
    rate = {(row["policy"], row["c"]): row["tokens_per_time"] for row in policies}
    fixed = max(value for (policy, c), value in rate.items() if policy.startswith("fixed") and c == 0.3)
    by_cost = [rate["DISCO", c] / rate["dynHeur", c] - 1 for c in costs]
    figures = {
        "request and datastore complement": f"{both / (alone + store):.0%}",
        "retrieval hardly slows": f"{drafts['4 x 128 M, paper, 16 nodes, batch 1']['median']:.0f} us",
        "the model's own answers": f"{own / other - 1:.0%}",
        "quality does not depend": f"{copy:.1f} tokens",
        "the adaptive threshold": f"{rate['Draft & Verify', 0.05]:.2f} times plain",
        "an oracle gains": f"{rate['oracle', 0.3] / fixed - 1:.0%}",
        "DISCO gains": f"{rate['DISCO', 0.3] / fixed - 1:.0%}",
        "31 % over dynHeur": f"{100 * min(by_cost):.0f} to {max(by_cost):.0%}",
        "its F1": f"{only(policies, 'f1', policy='DISCO', c=0.05):.2f} at",
    }
    claims = {row["claim"]: row["figure"] for row in rows("bench/results/claims.csv")}
    for claim, figure in figures.items():
        (shown,) = (text for name, text in claims.items() if name.startswith(claim))
        assert figure.replace("%", " %") in shown, claim
