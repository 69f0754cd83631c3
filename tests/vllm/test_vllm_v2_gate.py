"""Steps of model runner V2 that are launched before their drafts are there: a thread stands for the device's stream."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
from test_vllm_tensor_parallel import CORES, INTERPRETED, PROMPTS, SHAPE, answers
from test_vllm_tensor_parallel import SSSD as LIVE
from test_vllm_tensor_parallel import TREES as TREES_OF_RANKS
from v2_engines import CRAMPED, OFF, SMALL, SSSD, serve
from vllm_cases import greedy_case, seeded_case

from tests.support import prompts as texts
from tests.support.models import continuations, save, tiny_model

BY_SCORE = INTERPRETED | {"INTERPRETED_ATTENTION": "flash", "ADAPTIVE": "1"}
TREES = {"num_speculative_tokens": 8, "shape": "tree"}


@pytest.fixture
def check(tiny_answers, plain_seeded):
    def checked(found):
        """What happened in an engine, and at its gate."""
        assert found["gated"] == tiny_answers and found["gated, seeded"] == plain_seeded
        engine, gate = found["engine"], found["engine"]["gate"]
        assert engine["drafted"] > engine["accepted"] > 25 and not gate["shut"]
        events = gate["events"]
        assert events.count("open") > 25 and events.count("drafting") == events.count("open")
        return engine, gate

    return checked


def gated(model, prompts, speculative=SSSD, attention="", **given):
    cases = {"gated": greedy_case(prompts, abort=6, gated=True), "gated, seeded": seeded_case()}
    return serve(model, attention, cases=cases, speculative_config=speculative, **SMALL | given)


def test_nothing_but_drafting_comes_between_tokens_and_the_gate(on_cpu, check):
    """And a step runs what was queued at the gate in its order. The stream waits by our kernel."""
    engine, gate = check(on_cpu["chains"])
    assert not engine["failures"] and not any(gate["operations"]) and engine["preempted"] > 0
    events = [event for event in gate["events"] if event != "replay"]
    assert events == ["drafting", "open", "drafts"] * (len(events) // 3)


@pytest.mark.extended
def test_the_likeliest_draft_tokens_of_the_batch_are_verified(tiny_model, live_prompts, check):
    """As many as a forecast says, in steps that are launched before the drafts are there."""
    engine, gate = check(gated(tiny_model, live_prompts, attention="flash", gate={"adaptive": True}, **CRAMPED))
    assert not engine["failures"] and not any(gate["operations"]) and engine["preempted"] > 0
    chosen, learnt = gate["by score"]["chosen"], gate["by score"]["learnt"]
    assert len(chosen) > 25 and len(learnt) > 25 and all(learnt), "drafts are learnt from before they are overwritten"
    uneven = 0
    for budget, scores, counts in chosen:
        assert sum(counts) == budget and max(counts) <= 3
        taken = [p for row, n in zip(scores, counts, strict=True) for p in row[:n]]
        left = [p for row, n in zip(scores, counts, strict=True) for p in row[n:]]
        assert min(taken) >= max(left, default=0.0)
        uneven += max(counts) > min(counts) + 1
    assert uneven > 5 and len({budget for budget, _, _ in chosen}) > 3


@pytest.mark.extended
@pytest.mark.parametrize(("drafter", "options"), [("raises", {}), ("sleeps", TREES)])
def test_a_step_does_not_wait_for_a_drafter_that_fails(tiny_model, live_prompts, check, drafter, options):
    attention = "flash" if options else ""
    engine, gate = check(gated(tiny_model, live_prompts, SSSD | options, attention, gate={"drafter": drafter}))
    assert sum(gate["broken"]) > 3 and engine["trees"] == bool(options)
    assert engine["failures"] == (sum(gate["broken"]) if drafter == "raises" else 0)


@pytest.mark.extended
def test_a_step_after_structured_output_has_its_drafts_before(demo_model):
    """They go back to the scheduler, which cuts them by the grammar; the others' next steps are gated again."""
    from transformers import AutoTokenizer

    tokenizer, choice = AutoTokenizer.from_pretrained(demo_model), ["red, red, red", "blue"]
    ids = [tokenizer(prompt)["input_ids"][:40] for prompt in (texts.ECHO, texts.SHORT[1])]
    each = [{}, {"structured_outputs": {"choice": choice}}]
    case = {"prompts": ids, "parameters": {"temperature": 0, "max_tokens": 16}, "each": each, "gated": True}
    plain = case | {"each": [one | OFF for one in each]}
    options = {"speculative_config": SSSD | {"live": "off"}, "max_model_len": 128, "max_num_seqs": 2}
    found = serve(demo_model, cases={"plain": plain, "drafts": case}, **options)
    engine, gate = found["engine"], found["engine"]["gate"]
    assert found["drafts"] == found["plain"]
    assert tokenizer.decode(found["drafts"][1], skip_special_tokens=True) in choice
    assert found["drafts"][0] == continuations(demo_model, ids[:1], 16)[0]
    assert engine["accepted"] > 2 and sum(gate["at once"]) > 0 and gate["events"].count("open") > 3
    assert not engine["failures"] and not gate["shut"]


@pytest.mark.extended
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize("changed", [INTERPRETED, TREES_OF_RANKS, BY_SCORE], ids=["chains", "trees", "by score"])
def test_two_ranks_verify_what_opens_the_first_ones_gate(tmp_path, changed):
    model = save(tiny_model(seed=7, **SHAPE), tmp_path)
    events = tmp_path / "events.json"
    found = answers(model, 2, changed | {"GATED": str(events)}, speculative_config=LIVE)
    plain = continuations(model, PROMPTS, 30)
    assert found["answers"] == [plain, plain] and found["accepted"] > 40, "of fewer rows by score"
    seen = json.loads(events.read_text())
    assert seen.count("open") > 10 and seen.count("drafting") == seen.count("open")


class Device:
    """A stream that another thread runs up to a gate."""

    def __init__(self):
        from freedraft.engines.vllm.v2.gate import Gate

        self.flag = torch.zeros(1, dtype=torch.int32)
        self.waited: list[threading.Thread] = []
        self.gate = Gate(self.flag, self.wait)

    def wait(self, number):
        def spin():
            while self.flag[0] < number:
                time.sleep(1e-3)

        self.waited.append(threading.Thread(target=spin))
        self.waited[-1].start()

    def passed(self, within=5.0):
        self.waited[-1].join(within)
        return not self.waited[-1].is_alive()


def test_a_gate_that_nobody_opens_opens_itself_and_is_then_given_up(caplog):
    from freedraft.engines.vllm.v2 import gate as module

    device = Device()
    for late in range(module._PATIENCE):
        assert device.gate.usable, late
        device.gate.close()
        if not late:  # a step may take its time
            assert not device.passed(4 * module.LONGEST)
        device.gate.watch()
        assert device.passed()
        with device.gate.writing() as in_time:
            assert not in_time
    assert not device.gate.usable
    device = Device()
    for _ in range(3 * module._PATIENCE):  # a late one now and then
        device.gate.close()
        with device.gate.writing() as in_time:
            assert in_time and device.gate.shut
        assert device.passed()
        device.gate.close()
        device.gate.open()
        assert device.passed() and device.gate.usable
    watch = device.gate._watch
    device.gate.give_up()
    watch.join(5.0)
    assert not watch.is_alive() and not device.gate.usable


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_writing_is_never_interrupted(error):
    """The watchdog waits for a writer, however long it takes; the gate opens though the writer fails or ends."""
    from freedraft.engines.vllm.v2.gate import LONGEST

    device = Device()
    device.gate.close()
    device.gate.watch()
    with pytest.raises(error, match="on purpose"), device.gate.writing() as in_time:
        assert in_time
        time.sleep(4 * LONGEST)
        assert device.gate.shut
        raise error("on purpose")
    assert device.passed()


@pytest.mark.parametrize(("given", "word"), [({}, None), ({"blocking": "1"}, "unset it"), ({"connector": True}, "KV")])
def test_where_a_step_waits_for_its_drafts_as_before(tiny_model, monkeypatch, given, word):
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    from freedraft.engines.vllm.v2.gate import why_no_gate

    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", given.get("blocking", "0"))
    connector = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both") if "connector" in given else None
    arguments = EngineArgs(str(tiny_model), skip_tokenizer_init=True, kv_transfer_config=connector)
    reason = why_no_gate(arguments.create_engine_config())
    assert reason is None if word is None else word in reason


@pytest.mark.parametrize("code", [0, 801], ids=["waits", "not supported"])
def test_a_stream_waits_by_the_driver_where_that_can(monkeypatch, code):
    from freedraft.engines.vllm.v2 import gate as module

    calls = []

    def wait(stream, address, number, flags):
        calls.append((stream, address, number, flags))
        return code

    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: types.SimpleNamespace(cuStreamWaitValue32=wait))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=7))
    flag = torch.zeros(1, dtype=torch.int32)
    waiting = module.stream_wait(flag)
    assert calls == [(7, flag.data_ptr(), 0, 0)] and waiting.__name__ == ("by_kernel" if code else "by_driver")
    if not code:
        waiting(3)
        assert calls[1:] == [(7, flag.data_ptr(), 3, 0)]


def test_a_process_that_was_forked_has_a_watchdog():
    code = (
        "import os, torch; from freedraft.engines.vllm.v2.gate import Gate; import time\n"
        "gate = Gate(torch.zeros(1, dtype=torch.int32), lambda number: None); gate.close(); gate.open()\n"
        "if os.fork() == 0:\n"
        "    gate.close(); gate.watch(); time.sleep(0.5); os._exit(gate.shut)\n"
        "os._exit(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
