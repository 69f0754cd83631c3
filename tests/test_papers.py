"""docs/papers.md: the numbers that its tables of departures give for us are those of the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from layerskip_plugin import candidate_tree, knapsack_search, pass_times
from layerskip_plugin.calibrate import commands, common, disco, knapsack, knn
from layerskip_plugin.lookahead import Confidence, DraftVerify
from layerskip_plugin.lookahead.records import TOP
from layerskip_plugin.options import SWIFT_KEEPS, LayerSkipOptions
from layerskip_plugin.selection import bit_search, online_search
from layerskip_plugin.selection.online_search import KnapSpec, Swift
from sssd_plugin.scoring import paper

PAGE = Path(__file__).resolve().parents[1] / "docs" / "papers.md"
NUMBER = re.compile(r"(?<![\w.])\d*\.?\d[\d,]*")


def default(function: object, name: str) -> float:
    return inspect.signature(function).parameters[name].default  # type: ignore[arg-type]


SEARCH_SHARE = 100 * LayerSkipOptions.model_fields["search_share"].default
TOKENS, PROMPTS = common.Common.tokens, common.Common.prompts
ADAPTIVE = [default(DraftVerify, name) for name in ("target", "memory", "step", "inertia")]

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
    "Draft & Verify": {
        "target acceptance, memory of the rate, step, inertia of the threshold": ADAPTIVE,
        "first threshold": [default(DraftVerify, "threshold")],
        "evaluations of the search": [default(commands.bayesian, "iterations")],
        "evaluated on": [TOKENS, PROMPTS],
        "proposals": [bit_search.SAMPLES, bit_search.SAMPLES, bit_search.PARENTS],
    },
    "SWIFT": {
        "share of skipped sublayers, r": [default(Swift, "ratio")],
        "S, beta, gamma, patience, stop score": [
            Swift.most, Swift.bayesian, Swift.window, Swift.patience, Swift.stop_score,
        ],
        "never skipped": [SWIFT_KEEPS],
        "searched": [SEARCH_SHARE, online_search.SCORED_TOGETHER],
        "a better set is used": [100 * Swift.min_lead, Swift.confirm],
        "stop score compared with": [online_search.MATCHNESS_RATE],
        "Gaussian process": [bit_search.MAX_OBSERVATIONS],
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


def departures() -> dict[str, dict[str, str]]:
    """By paper and row, the cell "here" without its reason."""
    found: dict[str, dict[str, str]] = {}
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        name, text = section.split("\n", 1)
        (part,) = re.findall(r"^### Departures.*?\n(.*?)(?=^### )", text, re.MULTILINE | re.DOTALL)
        lines = [line.strip("| ") for line in part.splitlines() if line.startswith("| ")]
        rows = [[cell.strip() for cell in line.split(" | ")] for line in lines]
        found[name] = {row[0]: row[-1].split(": ")[0] for row in rows if row[0]}
    return found


@pytest.mark.parametrize("name", HERE)
def test_numbers_of_departures_are_those_of_the_code(name: str) -> None:
    written = {
        row: [float(number.replace(",", "")) for number in NUMBER.findall(cell)]
        for row, cell in departures()[name].items()
    }
    assert {row: numbers for row, numbers in written.items() if numbers} == {
        row: pytest.approx(numbers) for row, numbers in HERE[name].items()
    }


def test_every_paper_has_its_departures() -> None:
    assert departures().keys() == HERE.keys()


def test_candidates_by_confidence_are_swifts() -> None:
    assert candidate_tree.CANDIDATES == (10, 5, 3, 1) and candidate_tree.CONFIDENCES == (0.5, 0.8, 0.95)
