"""The metrics that the documentation, the dashboard and the alerts name are those that a drafter has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from prometheus_client import REGISTRY

from freedraft.metrics import Metrics

ROOT = Path(__file__).resolve().parents[1]
SUFFIX = {"counter": ["_total"], "summary": ["_sum", "_count"], "gauge": [""]}


def exported() -> set[str]:
    """Names as Prometheus scrapes them, of everything that sssd shows."""
    import sssd_plugin.datastore.live.metrics
    import sssd_plugin.metrics  # noqa: F401

    Metrics.of("named")
    families = [family for family in REGISTRY.collect() if family.name.startswith("freedraft_")]
    return {family.name + suffix for family in families for suffix in SUFFIX[family.type]}


def named(text: str) -> set[str]:
    return set(re.findall(r"\bfreedraft_[a-z_]+", text))


def test_the_page_explains_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    assert named(page) == exported()


def test_the_dashboard_asks_for_what_there_is() -> None:
    board = json.loads((ROOT / "configs" / "grafana" / "freedraft.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(board["panels"]) >= 8 and all(named(e) and named(e) <= exported() for e in expressions)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(places) == len(board["panels"]), "two panels in one place"


def test_alerts_ask_for_what_there_is() -> None:
    groups = yaml.safe_load((ROOT / "configs" / "prometheus" / "freedraft.yaml").read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) >= 4 and all(named(rule["expr"]) and named(rule["expr"]) <= exported() for rule in rules)
