"""The meter of steps on model runner V2: all that it stamps and counts is still there."""

import json
import subprocess
import sys

import pytest
from test_vllm_v2 import LAUNCHES, check_launches
from v2_engines import ROOT

from bench.step_times import COLUMNS, STEP, WINDOW

pytestmark = [pytest.mark.extended, pytest.mark.rare]


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    path = tmp_path_factory.mktemp("step_times") / "step-times.json"
    asked = ["--arms", "plain", "fixed", "--batches", "1", "2", "--steps", "12", "--json", str(path)]
    command = [sys.executable, "bench/step_times.py", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "| fixed | 2 | 0.0 |" in done.stdout
    return json.loads(path.read_text())["arms"]


@pytest.mark.parametrize("arm", ["plain", "fixed"])
def test_a_step_is_the_sum_of_its_phases(arms, arm):
    assert [cell["batch"] for cell in arms[arm]["cells"]] == [1, 2]
    for cell in arms[arm]["cells"]:
        us = cell["us"]
        sums = {"step": STEP} | ({"window": WINDOW} if arm == "fixed" else {})
        assert set(us) == {*COLUMNS} if arm == "fixed" else {"launch", "prepare", *STEP, "step"}
        assert cell["steps"] >= 12 and cell["drafting"] == (cell["steps"] if arm == "fixed" else 0)
        assert all(0 < one["fast"] <= one["median"] for one in us.values())
        for whole, parts in sums.items():
            assert sum(us[part]["mean"] for part in parts) == pytest.approx(us[whole]["mean"], abs=1)


def test_the_host_drafts_while_the_device_lacks_work(arms):
    for cell in arms["fixed"]["cells"]:
        us = {name: one["mean"] for name, one in cell["us"].items()}
        assert us["write"] < us["draft"] < us["window"] < us["bubble"] < us["step"]


def test_counted_launches_are_those_of_a_step(arms):
    check_launches(arms["fixed"]["launches"], LAUNCHES)
    found = arms["plain"]["launches"]
    assert found["sample"]["kernels"] and not any(found[name]["kernels"] or found[name]["eager"] for name in LAUNCHES)
