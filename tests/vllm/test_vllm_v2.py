"""Model runner V2, which GPUs are served by, on this CPU: its kernels run in Triton's interpreter, in processes of
their own. Async scheduling is on."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm_cases import TINY, alone, greedy_case, recycled, save_sets, seeded_case, token_prompts, two_skip_sets

from freedraft.step import EngineContext
from tests.support import prompts as texts
from tests.support import repeat_drafter
from tests.support.models import continuations, save, save_byte_tokenizer, weaken
from tests.support.models import tiny_model as make_tiny
from tests.support.v2_drafting import Decoding

FOLDER = Path(__file__).parent / "v2_interpreted"
ROOT = Path(__file__).parents[2]
TOKENS = 30
SMALL = {"skip_tokenizer_init": True, "max_model_len": 64, "max_num_batched_tokens": 64}
CRAMPED = {"num_gpu_blocks_override": 9, "block_size": 32}
SSSD = {"method": "sssd", "num_speculative_tokens": 3, "policy": "fixed", "live": "store"}


def serve(model, timeout=840, attention="", **given):
    return run("serve.py", model, given, timeout, attention)


def run(script, model, given, timeout=840, attention="", v2=True):
    """What a script of `v2_interpreted` says, on its last line, of a model and of what it is given."""
    pytest.importorskip("triton")
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": str(int(v2)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_AOT_COMPILE": "0",
        "INTERPRETED_ATTENTION": attention,
        "PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(FOLDER / script), str(model), json.dumps(given)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def served(tiny_model, tiny_answers, live_prompts):
    """What an engine with too little room for all requests says, which is asked one case after the other."""
    long = token_prompts([3 * prompt["prompt_token_ids"] for prompt in live_prompts[:2]])
    cases = {"greedy": greedy_case(live_prompts), "aborted": greedy_case(live_prompts, abort=6)}
    cases |= {name: greedy_case(long, 10) for name in ("long", "long again")}
    cases |= {"seeded": seeded_case() | {"abort": 6}, "seeded, alone": alone(seeded_case(), 2)}
    # Steps of three and four requests are not drafted for: what they gain is taken later.
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 4, 0], [5, 64, 3]]}
    return serve(tiny_model, cases=cases, speculative_config=SSSD | schedule, max_num_seqs=32, **SMALL | CRAMPED)


@pytest.mark.extended
@pytest.mark.parametrize("v2", [True, False])
def test_an_engine_that_has_ended_leaves_no_model(tiny_model, tmp_path, v2):
    """In a process that goes on, as notebooks and trainers do; without speculation, too."""
    (file,) = save_sets(tiny_model, tmp_path, skip=({1}, set()))
    skipping = {"method": "layerskip", "num_speculative_tokens": 2, "skip_set": file, "lookahead": "fixed"}
    assert run("end.py", tiny_model, [None, skipping], v2=v2) == [True, True]


def test_all_draft_lengths_have_graphs_however_few_requests_there_are():
    """By vLLM's own function, of the sizes of graphs; a user's table ends with the largest batch."""
    pytest.importorskip("triton")
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    from freedraft.engines.vllm.v2.lengths import GraphLengths, whole_table

    def lengths(table):
        build = whole_table(build_dynamic_sd_schedule_lookup)
        return set(build(table, vllm_max_batch_size=2, vllm_num_speculative_tokens=8)[1:])

    assert lengths(GraphLengths((0, 1, 2, 4, 8))) == {0, 1, 2, 4, 8}
    assert lengths([(1, 2, 8), (3, 9, 4), (10, 20, 0)]) == {8}


def test_steps_of_every_length_find_a_full_graph(tiny_model):
    """By vLLM's own lists and dispatch, where a graph of the step's length and LoRAs holds it."""
    pytest.importorskip("triton")
    from vllm.config import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    from freedraft.engines.vllm.v2.lengths import GraphLengths, put_nearest_first

    lengths, loras, most = (0, 4, 8), (0, 2), 256
    speculative = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 1, "num_speculative_tokens": 8}
    config = EngineArgs(
        str(tiny_model), skip_tokenizer_init=True, max_num_seqs=most, speculative_config=speculative
    ).create_engine_config()
    config.speculative_config.num_speculative_tokens_per_batch_size = GraphLengths(lengths)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    config.compilation_config.cudagraph_capture_sizes = sizes
    config.compilation_config.max_cudagraph_capture_size = sizes[-1]
    manager = CudaGraphManager.__new__(CudaGraphManager)  # whose constructor wants a device
    manager.vllm_config, manager.compilation_config = config, config.compilation_config
    manager.cudagraph_mode, manager.lora_capture_cases = CUDAGraphMode.FULL_AND_PIECEWISE, list(loras)
    manager.max_num_reqs, manager.decode_query_len, manager.varlen_decode = most, 9, False
    manager.ubatch_runner, manager._candidates, manager._capture_descs = None, {}, {}
    manager._lora_dispatch_map, manager._max_lora_case = manager._build_lora_dispatch_map()
    manager._graphs_captured = True
    manager._init_candidates()
    graphs = [graph for graphs in manager._capture_descs.values() for graph in graphs]

    def missed():
        count = 0
        for length, batch, active in itertools.product(lengths, range(1, most + 1), loras):
            own = [g for g in graphs if (g.uniform_token_count, g.num_active_loras) == (1 + length, active)]
            found = manager.dispatch(batch, batch * (1 + length), 1 + length, active)
            full = found.cg_mode == CUDAGraphMode.FULL
            assert not full or found == min((g for g in own if g.num_reqs >= batch), key=lambda g: g.num_tokens)
            count += not full and any(g.num_reqs >= batch for g in own)
        return count

    assert missed() > 200, "vLLM finds them itself: the wrapper can go"
    put_nearest_first(manager._candidates, graphs)
    assert missed() == 0


def test_the_state_behind_a_prompt_is_that_of_its_last_token(monkeypatch):
    """And not that of placeholders, with which vLLM fills a step up."""
    pytest.importorskip("triton")
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    from freedraft.engines.vllm.v2.drafting import Drafting
    from freedraft.guarded_method import GuardedMethod

    states_by_id: dict[str, list[float]] = {}
    ours = Drafting.__new__(Drafting)
    ours.guarded = GuardedMethod(repeat_drafter.SPEC, repeat_drafter.RepeatOptions(), EngineContext())
    monkeypatch.setattr(
        ours.guarded.method, "set_prompt_state", lambda name, state: states_by_id.update({name: state.tolist()})
    )
    batch = InputBatch.make_dummy(3, 8, InputBuffers(max_num_reqs=4, max_num_tokens=8, device=torch.device("cpu")))
    assert batch.query_start_loc_np.tolist() == [0, 2, 5, 8]
    a, b, c = batch.req_ids
    ours.guarded.in_prompt = {a, b, c}
    batch.num_draft_tokens_per_req = np.array([0, 2, 0], np.int32)
    states = torch.arange(8.0)[:, None]
    ours._set_prompt_states(batch, states, np.array([True, True, False]))
    assert states_by_id == {a: [1.0], b: [2.0]} and ours.guarded.in_prompt == {c}
    batch.num_draft_tokens_per_req = None
    ours._set_prompt_states(batch, states, np.array([False, False, True]))
    assert states_by_id[c] == [7.0]


@pytest.mark.parametrize("extra_args", [{"freedraft": "off"}, {"freedraft": ["off"]}, {"freedraft": 1}])
def test_off_for_one_request(tiny_model, extra_args):
    """The others have their drafts; a batch of such requests is not waited for. What is no "off" is ignored."""
    pytest.importorskip("triton")
    texts, off = np.tile(np.arange(2, 12, dtype=np.int32), (2, 20)), extra_args["freedraft"] == "off"
    waited: list[int] = []
    for rows in (2, 1):
        decoding = Decoding(tiny_model, texts[:rows], 40, SSSD | {"live": "off"}, extra_args)
        count = decoding.drafting.guarded.metrics.undrafted("off")._value
        before = count.get()
        waited.clear()
        decoding.launch(2, SimpleNamespace(synchronize=lambda: waited.append(1), record=int))
        drafted = decoding.draft()
        assert drafted == bool(waited) == (rows == 2 or not off)
        if drafted:
            assert decoding.drafting.requests.drafted.tolist() == [3] * (rows - 1) + [0 if off else 3]
        decoding.drafting.catch_up()
        assert count.get() - before == off
        assert decoding.drafting.guarded.metrics.failures._value.get() == 0
        decoding.drafting.guarded.close()


def test_steps_that_nobody_drafts_after_are_taken_later(tiny_model, monkeypatch):
    """All at once, before the next draft."""
    pytest.importorskip("triton")
    texts, calls = np.tile(np.arange(2, 12, dtype=np.int32), (2, 20)), []
    decoding = Decoding(tiny_model, texts, 40, SSSD | {"live": "off"})
    guarded = decoding.drafting.guarded
    update = guarded.method.update
    monkeypatch.setattr(guarded.method.controller, "rests", lambda: True)
    monkeypatch.setattr(guarded.method, "update", lambda step: (calls.append(step.batch_size), update(step)))
    for _ in range(4):
        decoding.launch(1)
    assert not calls
    assert decoding.draft() and decoding.drafts.tolist() == texts[:, 44:47].tolist()
    assert calls == [3 * 2, 2] and not guarded.metrics.failures._value.get()
    guarded.close()


def test_an_error_of_the_driver_in_a_step_is_the_engines(tiny_model, caplog, monkeypatch):
    """Raised as it is, without a line of ours before it, by the wait for a step's tokens. One that leaves the device as
    it was costs drafts."""
    pytest.importorskip("triton")
    monkeypatch.setattr(logging.getLogger("freedraft"), "propagate", True)
    texts = np.tile(np.arange(2, 12, dtype=np.int32), (2, 20))
    decoding = Decoding(tiny_model, texts, 40, SSSD | {"live": "off"})

    def fail(error):
        raise error

    def drafted_after(error):
        decoding.launch(2, SimpleNamespace(synchronize=lambda: fail(error), record=int) if error else None)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="freedraft"):
            return decoding.draft()

    assert drafted_after(None) and decoding.drafts.tolist() == 2 * [[4, 5, 6]]
    assert not drafted_after(torch.OutOfMemoryError("CUDA out of memory"))
    (line,) = (record.getMessage() for record in caplog.records if record.name.startswith("freedraft"))
    assert "steps have no drafts" in line
    fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(torch.AcceleratorError) as raised:
        drafted_after(fault)
    assert raised.value is fault and not caplog.records
    decoding.drafting.guarded.close()


def test_runs_there_with_async_scheduling(served):
    engine = served["engine"]
    assert engine["v2"] and engine["async"]
    assert not engine["failures"]
    assert engine["tokens on the host"], "they would take gigabytes of the device's memory"
    assert engine["drafted"] > 200 and 0 < engine["accepted"] < engine["drafted"]


def test_no_step_waits_for_its_own_tokens(served):
    """The one that verifies the drafts does, when it is ready but for them; what was said before has left by then."""
    early, waits = served["engine"]["waits"]
    assert early == 0 and waits > 50


def test_nothing_is_drafted_for_requests_that_have_lost_their_slots(served):
    """Between the launch of a step and its end, by aborts, preemption and their ends; nor are they observed."""
    gone, at_all = served["engine"]["gone"]
    assert gone == 0 and at_all > 100 and served["engine"]["left"] > 5


@pytest.mark.parametrize("case", ["greedy", "aborted"])
def test_greedy_answers_are_the_models_own(served, tiny_answers, case):
    assert served[case] == tiny_answers


def test_requests_were_preempted_and_found_in_the_prefix_cache(served):
    assert served["engine"]["preempted"] > 0 and served["engine"]["cached"] > 0
    assert served["long"] == served["long again"]


def test_a_seed_gives_the_tokens_of_an_engine_without_drafts(served, plain_seeded):
    assert served["seeded"] == plain_seeded and served["seeded, alone"] == plain_seeded[2:3]
    drafted, accepted = served["engine"]["counts"]["seeded"]
    assert accepted > 10 and drafted - accepted > 10


def test_requests_end_and_are_learnt_whole(served, tiny_answers):
    engine = served["engine"]
    assert engine["held"] == [0, 0, 0]
    learnt = [document for tokens in engine["learnt"] for document in split(tokens)]
    whole = [document[8:] for document in learnt if len(document) == 8 + TOKENS]  # behind the end of its prompt
    # Each answer twice: greedy, and after the abort.
    assert sorted(whole) == sorted(2 * tiny_answers)


def test_logits_of_verified_drafts_are_recycled(served, tiny_answers, live_prompts):
    """Rejected drafts say what would have followed them, too."""
    checked, said = recycled(served, tiny_answers, live_prompts)
    assert checked > 50 and said > 1.5 * checked


def split(tokens):
    documents: list[list[int]] = [[]]
    for token in tokens:
        if token < 0:
            documents.append([])
        else:
            documents[-1].append(token)
    return [document for document in documents if document]


@pytest.mark.extended
def test_draft_lengths_are_learnt_while_serving(tiny_model, tiny_answers, live_prompts):
    """vLLM's scheduler drafts what our worker has learnt. Requests that vLLM makes up to compile kernels teach
    nothing."""
    cases = {f"{i} at once": greedy_case(live_prompts[:i]) for i in (1, 2, len(live_prompts))}
    options = SSSD | {"policy": "auto", "hardware": "h100", "num_speculative_tokens": 4, "isolation": "shared"}
    given = {"skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 32, "warm_up": True}
    found = serve(tiny_model, cases=cases, speculative_config=options, **given)
    assert found["warm up"]["before"] and found["warm up"]["before"] == found["warm up"]["after"]
    assert max(found["warm up"]["steps"]) > 32
    for name, case in cases.items():
        assert found[name] == tiny_answers[: len(case["prompts"])]
    engine = found["engine"]
    assert not engine["failures"]
    assert engine["graph lengths"] == 2 * [[0, 1, 4]], "when memory is profiled, and when they are captured"
    # At first by the cost model, which has one length for batches this small; then by what steps take and accept.
    assert {length for first, _, length in engine["schedule"] if first <= len(live_prompts)} == {4}
    assert len(engine["verified"]) >= 3 and len(engine["decided"]) >= 3
    assert set(engine["verified"]) | set(engine["lookup"]) <= {0, 1, 4}


@pytest.fixture(scope="module")
def skipped(tiny_model, live_prompts, tmp_path_factory):
    """An engine with too little room for all requests, whose model drafts trees for itself, with two skip sets."""
    sets = tmp_path_factory.mktemp("skip_sets")
    early = {"lookahead": "confidence", "threshold": 0.3, "num_speculative_tokens": 6, "shape": "tree"}
    cases = {name: greedy_case(live_prompts, skip_set=name) for name in ("empty", "some")}
    cases |= {"chains": cases["some"] | {"chains": [*range(len(live_prompts))]}}
    cases |= {"mixed": cases["some"] | {"chains": [1, 3, 4], "abort": 6}, "seeded": seeded_case()}
    given = {"speculative_config": two_skip_sets(tiny_model, sets, **early), "max_num_seqs": 16, "attention": "flash"}
    return serve(tiny_model, cases=cases, drafts=True, kv=True, **given, **SMALL | CRAMPED)


def test_layer_skipping_leaves_greedy_answers_alone(skipped, tiny_answers):
    for case in ("empty", "some", "chains", "mixed"):
        assert skipped[case] == tiny_answers, case
    engine = skipped["engine"]
    assert engine["v2"] and engine["async"] and not engine["failures"] and engine["preempted"] > 0
    assert engine["held"][1:] == [0, 0]


def test_layer_skipping_verifies_siblings(skipped, tiny_answers, live_prompts):
    """And accepts some. The KV cache then holds what plain decoding leaves, so that the same is drafted for a text
    whether its request has trees or chains, and with all layers the model's own next token."""
    engine = skipped["engine"]
    worst, pairs = engine["kv"]
    assert engine["trees"] and pairs > 100 and worst < 1e-4
    branches = {name: case["branches"] for name, case in engine["by case"].items()}
    assert branches["some"] > 10 and branches["mixed"] > 5 and branches["seeded"] > 5
    assert branches["empty"] == branches["chains"] == 0

    def drafts(case):
        return {tuple(text): drafted for text, drafted in engine["by case"][case]["drafts"] if drafted}

    trees, chains = drafts("some"), drafts("chains")
    shared = [(trees[text], chains[text]) for text in trees.keys() & chains.keys()]
    assert len(shared) > 50 and all(one[: len(other)] == other[: len(one)] for one, other in shared)
    texts = [(*p["prompt_token_ids"], *answer) for p, answer in zip(live_prompts, tiny_answers, strict=True)]
    following = {text[:i]: text[i] for text in texts for i in range(12, len(text))}
    whole = {text: drafted for text, drafted in drafts("empty").items() if text in following}
    assert len(whole) > 20 and all(drafted[0] == following[text] for text, drafted in whole.items())


def test_layer_skipping_leaves_the_tokens_of_a_seed_alone(skipped, plain_seeded):
    assert skipped["seeded"] == plain_seeded


def accepted_one_after_the_other(folder, requests, **options):
    """int [requests]: draft tokens accepted of each, alone in its engine, where drafts pay."""
    model = make_tiny(seed=7, **TINY | {"num_hidden_layers": 8})
    skipped = range(1, 7)
    weaken(model, skipped, 0.05)
    (file,) = save_sets(save(model, folder), folder, skip=(skipped, skipped))
    ids = texts.random_ids([12] * requests, 24, first=2, seed=3)
    cases = {f"{i}": greedy_case(token_prompts([prompt]), 40) for i, prompt in enumerate(ids)}
    method = {"method": "layerskip", "num_speculative_tokens": 4, "skip_set": file} | options
    given = {"speculative_config": method, "seconds": [0.02, 1e-4], "max_num_seqs": 4, "gpu_memory_utilization": 0.2}
    found = serve(folder, cases=cases, **given, **SMALL)
    assert not found["engine"]["failures"]
    assert [found[name] for name in cases] == [[answer] for answer in continuations(folder, ids, 40)]
    return np.array([found["engine"]["counts"][name][1] for name in cases])


def test_layer_skipping_drafts_by_default(tmp_path):
    assert accepted_one_after_the_other(tmp_path, 6).sum() > 20 * 6


@pytest.mark.extended
def test_layer_skipping_by_default_drafts_as_at_a_fixed_length(tmp_path):
    by_default = accepted_one_after_the_other(tmp_path, 12)
    fixed = accepted_one_after_the_other(tmp_path, 12, lookahead="fixed")
    assert fixed.min() > 10 and by_default.sum() >= 0.9 * fixed.sum(), (by_default, fixed)


@pytest.mark.extended
def test_recurrent_layers(tmp_path):
    """Whose states are those of the accepted tokens: in steps with drafts, in steps without, and after aborts."""
    shape = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
    model = save(make_tiny("FalconH1", seed=7, mamba_chunk_size=16, **TINY | shape), tmp_path)
    ids = texts.random_ids([12, 12, 30, 5], 24, first=2, seed=3)
    cases = {"few": greedy_case(token_prompts(ids), 16), "aborted": greedy_case(token_prompts(ids), 16, abort=6)}
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 3, 0], [4, 64, 3]]}
    given = {"cases": cases, "speculative_config": SSSD | {"live": "memory"} | schedule, "max_num_seqs": 8}
    found = run("recurrent.py", model, given | SMALL | {"max_model_len": 128})
    plain = continuations(model, ids, 16)
    assert found["few"] == plain and found["aborted"] == plain
    assert found["engine"]["v2"] and not found["engine"]["failures"] and found["engine"]["accepted"] > 5


@pytest.mark.extended
def test_draft_passes_that_cannot_be_built(tiny_model, tiny_answers, live_prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("FAILING", "model 1 0")
    cases, options = {"few": greedy_case(live_prompts[:2], 8)}, two_skip_sets(tiny_model, tmp_path)
    found = serve(tiny_model, cases=cases, speculative_config=options, max_num_seqs=3, **SMALL)
    assert found["few"] == [answer[:8] for answer in tiny_answers[:2]]
    assert found["engine"]["accepted"] == 0 and found["engine"]["v2"]


def test_graphs_of_draft_passes_that_cannot_be_captured(tiny_model, monkeypatch, caplog):
    """Here, where there is no device: one line, eager passes, and no second try in this process. On attention whose
    replays are unknown nothing is tried."""
    from vllm.config import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.utils import AttentionGroup

    from freedraft.engines.vllm.draft_graphs import DraftGraphs
    from freedraft.engines.vllm.draft_model import PagedDraftModel

    runner, model = GPUModelRunner.__new__(GPUModelRunner), PagedDraftModel.__new__(PagedDraftModel)
    runner.max_num_reqs = 4
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
    model.group = AttentionGroup(CPUAttentionBackend, ["layer"], spec, 0)
    model.runner, model.device = runner, torch.device("cpu")
    model.vllm_config = EngineArgs(str(tiny_model), skip_tokenizer_init=True).create_engine_config()
    model.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    graphs = [DraftGraphs(model, 8) for _ in range(2)]
    model.device = torch.device("cuda")
    monkeypatch.setattr(DraftGraphs, "failed", False)
    monkeypatch.setattr(logging.getLogger("freedraft"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="freedraft"):
        graphs[0].capture([])
        assert not DraftGraphs.failed
        model.group = AttentionGroup(TritonAttentionBackend, ["layer"], spec, 0)
        for each in graphs:
            each.capture([])
    unknown, line = (record.getMessage() for record in caplog.records if record.name.startswith("freedraft"))
    assert "without CUDA graphs (attention CPU_ATTN)" in unknown
    assert "without CUDA graphs" in line and DraftGraphs.failed


def test_structured_output(demo_model, tmp_path):
    """With a grammar, drafts go back to the scheduler, which cuts them."""
    from transformers import AutoTokenizer

    vocab_size = save_byte_tokenizer(tmp_path, (demo_model / "chat_template.jinja").read_text())
    model = save(make_tiny(seed=7, **TINY | {"vocab_size": vocab_size}), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    parameters = {"temperature": 0, "max_tokens": 16, "structured_outputs": {"choice": ["red, red, red", "blue"]}}
    given = {"cases": {"choice": {"prompts": [tokenizer("red, red, blue, red, red, ")["input_ids"]]}}}
    given["cases"]["choice"]["parameters"] = parameters
    options = SSSD | {"live": "off", "policy": "knee", "knee": 12}
    found = serve(model, speculative_config=options, max_num_seqs=2, max_model_len=128, **given)
    assert tokenizer.decode(found["choice"][0], skip_special_tokens=True) in ("red, red, red", "blue")
    assert not found["engine"]["failures"]
    # By the cost model, what vLLM schedules for a batch of each size.
    lengths = found["engine"]["schedule"]
    assert lengths[0][2] == 3 and lengths[-1][2] == 0, "large batches are served plainly"


def test_memory_for_graphs_of_draft_passes_is_left_out_of_the_kv_cache(tiny_model):
    """Two sets, at nine sizes each, for each of which vLLM's own graphs take 20 MiB, and the logits of 256 requests;
    not on attention whose passes are not captured, and nothing where vLLM captures nothing itself."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from freedraft.engines.vllm.draft_graphs import with_draft_graphs

    own, vocab, mib = [1, 2, 4, *range(8, 257, 8)], 100_000, 2**20

    def profiled(estimate, backend, sets):
        arguments = EngineArgs(str(tiny_model), hf_overrides={"vocab_size": vocab}, skip_tokenizer_init=True)
        runner = GPUModelRunner.__new__(GPUModelRunner)
        runner.vllm_config, runner.max_num_reqs = arguments.create_engine_config(), 1024
        compilation = runner.vllm_config.compilation_config
        compilation.cudagraph_capture_sizes = own
        compilation.static_forward_context["other"] = torch.nn.Identity()  # a layer without attention, as experts are
        with set_current_vllm_config(runner.vllm_config):
            Attention(4, 64, 0.125, prefix="layers.0", attn_backend=backend)
        return with_draft_graphs(lambda runner: sets)(lambda self: estimate)(runner)

    estimate, logits = 20 * mib * len(own), 256 * vocab * (4 + 4 + 4)
    assert profiled(estimate, TritonAttentionBackend, 2) == estimate + 2 * 9 * 20 * mib + logits
    assert profiled(len(own), TritonAttentionBackend, 2) == len(own) + 2 * 9 * mib + logits, "a MiB each at least"
    triton, cpu = TritonAttentionBackend, CPUAttentionBackend
    for nothing in ((0, triton, 2), (estimate, triton, 0), (estimate, cpu, 2), (estimate, triton, None)):
        assert profiled(*nothing) == nothing[0]
