"""Model runner V2: chains of `sssd`, and layer skipping. See `v2_engines`."""

import ast
import inspect
import itertools
import textwrap

import numpy as np
import pytest
import torch
from v2_engines import SMALL, SSSD, run, serve
from vllm_cases import greedy_case, recycled, save_sets, token_prompts, two_skip_sets

from freedraft.step import EngineContext
from tests.support import repeat_drafter
from tests.support.models import continuations
from tests.support.prompts import random_ids

# Most operations of PyTorch, and kernels of Triton that must be launched, no others; copies to the host and fills of
# memory are operations, too.
LAUNCHES = {
    "match": (0, ["verify_kernel"]),
    "take logits": (0, ["block_maxima_kernel", "top_tokens_kernel"]),
    "copy gained": (0, ["newest_tokens_kernel"]),
    "propose": (0, []),
    "reach": (0, ["_combine_sampled_and_draft_tokens_kernel"]),
    "prepare trees": (0, []),
}


@pytest.fixture(scope="module")
def served(on_cpu):
    return on_cpu["chains"]


def check_launches(found, bounds):
    """How many launches a decoding step takes in our own phases: each keeps the host or the device busy for 10 us."""
    assert found["sample"]["kernels"], "vLLM's own sampler"
    order = [found["order"].index(name) for name in ("newest_tokens_kernel", "block_maxima_kernel")]
    assert order == sorted(order), "the host waits for tokens before it reads logits"
    assert found["kept"] == 0
    for phase, (eager, kernels) in bounds.items():
        assert len(found[phase]["eager"]) <= eager, f"{phase}: {found[phase]['eager']}"
        assert found[phase]["kernels"] == kernels, phase


def test_launches_of_a_step(served):
    check_launches(served["engine"]["launches"], LAUNCHES)


def test_runs_there_with_async_scheduling(served):
    engine = served["engine"]
    assert engine["v2"] and engine["async"]
    assert not engine["failures"]
    assert engine["tokens on the host"], "they would take gigabytes of the device's memory"
    assert engine["drafted"] > 200 and 0 < engine["accepted"] < engine["drafted"]


def test_nothing_is_compiled_while_serving(on_cpu, on_flash):
    """numba would stop all requests for seconds."""
    for engines, names in ((on_cpu, ("chains", "by default")), (on_flash, ("trees", "skipping"))):
        assert [engines[name]["engine"]["compiled while serving"] for name in names] == [[]] * len(names)


def test_no_step_waits_for_its_own_tokens(served):
    """The one that verifies the drafts does, when it is ready but for them; what was said before has left by then."""
    early, waits = served["engine"]["waits"]
    assert early == 0 and waits > 50


def test_nothing_is_drafted_for_requests_that_have_lost_their_slots(served):
    """Between the launch of a step and its end, by aborts, preemption and their ends; nor are they observed."""
    gone, at_all = served["engine"]["gone"]
    assert gone == 0 and at_all > 100 and served["engine"]["left"] > 5


def test_a_seed_gives_the_tokens_of_an_engine_without_drafts(served, plain_seeded):
    assert served["seeded"] == plain_seeded and served["seeded, alone"] == plain_seeded[2:3]
    drafted, accepted = served["engine"]["counts"]["seeded"]
    assert accepted > 10 and drafted - accepted > 10


def test_logits_of_verified_drafts_are_recycled(served, tiny_answers, live_prompts):
    """Rejected drafts say what would have followed them, too."""
    checked, said = recycled(served, tiny_answers, live_prompts)
    assert checked > 50 and said > 1.5 * checked


@pytest.fixture(scope="module")
def skipped(on_flash):
    return on_flash["skipping"]


def test_layer_skipping_leaves_greedy_answers_alone(skipped, tiny_answers):
    for case in ("empty", "some", "chains", "mixed"):
        assert skipped[case] == tiny_answers[: len(skipped[case])], case
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
    assert branches["some"] > 5 and branches["mixed"] > 5 and branches["seeded"] > 5
    assert branches["empty"] == branches["chains"] == 0

    def drafts(case):
        return {tuple(text): drafted for text, drafted in engine["by case"][case]["drafts"] if drafted}

    trees, chains = drafts("some"), drafts("chains")
    shared = [(trees[text], chains[text]) for text in trees.keys() & chains.keys()]
    assert len(shared) > 25 and all(one[: len(other)] == other[: len(one)] for one, other in shared)
    texts = [(*p["prompt_token_ids"], *answer) for p, answer in zip(live_prompts, tiny_answers, strict=True)]
    following = {text[:i]: text[i] for text in texts for i in range(12, len(text))}
    whole = {text: drafted for text, drafted in drafts("empty").items() if text in following}
    assert len(whole) > 10 and all(drafted[0] == following[text] for text, drafted in whole.items())


def test_layer_skipping_leaves_the_tokens_of_a_seed_alone(skipped, plain_seeded):
    assert skipped["seeded"] == plain_seeded


def test_layer_skipping_drafts_by_default(on_cpu, given):
    found, names = on_cpu["by default"], [f"{i}" for i in range(4)]
    answers = continuations(given.folder / "eight_layers", random_ids([12] * 4, 24, first=2, seed=3), 40)
    assert not found["engine"]["failures"] and [found[name] for name in names] == [[answer] for answer in answers]
    assert sum(found["engine"]["counts"][name][1] for name in names) > 15 * 4, "slow passes end early"


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


@pytest.mark.extended
def test_steps_whose_drafts_nobody_verifies(tiny_model, tmp_path):
    """Parts of a prompt, and the last step of an answer: vLLM 0.33 has no drafts made there by methods that run the
    model. The next step has drafts again, and tokens are the model's own."""
    from vllm.v1.core.sched.output import SchedulerOutput

    ids, length = random_ids([100, 12], 24, first=2, seed=3), 12
    given = {"model": tiny_model, "max_num_seqs": 2} | SMALL | {"max_model_len": 128}
    given["cases"] = {f"{i}": greedy_case(token_prompts([prompt]), length) for i, prompt in enumerate(ids)}
    methods = two_skip_sets(tiny_model, tmp_path), SSSD | {"live": "memory"}
    skipping, sssd = run("serve.py", [given | {"speculative_config": each} for each in methods])
    for found in (skipping, sssd):
        assert [found["0"], found["1"]] == [[answer] for answer in continuations(tiny_model, ids, length)]
        assert found["engine"]["v2"] and not found["engine"]["failures"] and found["engine"]["accepted"] > 2
    skips = "skip_drafts" in SchedulerOutput.__dataclass_fields__
    skipped, steps, _ = skipping["engine"]["skipped"]
    assert (skipped >= 2) == skips and skipped < steps and sssd["engine"]["skipped"][0] == 0


@pytest.mark.extended
def test_draft_passes_that_cannot_be_built(tiny_model, tiny_answers, live_prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("FAILING", "model 1 0")
    cases, options = {"few": greedy_case(live_prompts[:2], 8)}, two_skip_sets(tiny_model, tmp_path)
    found = serve(tiny_model, cases=cases, speculative_config=options, max_num_seqs=3, **SMALL)
    assert found["few"] == [answer[:8] for answer in tiny_answers[:2]]
    assert found["engine"]["accepted"] == 0 and found["engine"]["v2"]


@pytest.mark.extended
@pytest.mark.parametrize("v2", [True, False])
def test_an_engine_that_has_ended_leaves_no_model(tiny_model, tmp_path, v2):
    """In a process that goes on, as notebooks and trainers do; without speculation, too."""
    (file,) = save_sets(tiny_model, tmp_path, skip=({1}, set()))
    method = {"method": "layerskip", "num_speculative_tokens": 2, "skip_set": file, "lookahead": "fixed"}
    assert run("end.py", [tiny_model, [None, method]], v2=v2) == [True, True]


def test_all_draft_lengths_have_graphs_however_few_requests_there_are():
    """By vLLM's own function, of the sizes of graphs; a user's table ends with the largest batch."""
    pytest.importorskip("triton")
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    from freedraft.engines.vllm.v2.lengths import GraphLengths, whole_table

    def lengths(table):
        sizes = {"vllm_max_batch_size": 2, "vllm_num_speculative_tokens": 8}
        return set(whole_table(build_dynamic_sd_schedule_lookup, table, **sizes)[1:])

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


def test_reallocated_drafts_are_what_the_runner_unpacks():
    """Three values in vLLM 0.32, four in 0.33: by the source of its runner."""
    pytest.importorskip("triton")
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.v1.worker.gpu.input_batch import InputBuffers
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

    from freedraft.engines.vllm.v2.rows_by_score import RowsByScore

    runner, ranks = GPUModelRunner.__new__(GPUModelRunner), GroupCoordinator.__new__(GroupCoordinator)
    runner.adaptive_verification = AdaptiveVerificationManager.__new__(AdaptiveVerificationManager)
    runner.adaptive_verification.batches_to_profile = []
    runner.attn_groups, runner.dcp_size, runner.fast_prefill = [], 1, None
    runner.max_num_reqs, runner.num_speculative_steps, runner.device = 4, 3, torch.device("cpu")
    runner.input_buffers = InputBuffers(4, 16, runner.device)
    ours = RowsByScore(runner, ranks, again=True)
    ours.compact_batch(np.array([3, 1], np.int32), np.array([4, 2], np.int32), np.zeros(3, np.int32))
    (unpacked,) = (
        node.targets[0].elts
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(GPUModelRunner.prepare_inputs))))
        if isinstance(node, ast.Assign) and "reallocate_drafts" in ast.unparse(node.value)
    )
    first_rows, starts, count, *others = ours.reallocate_drafts(["a", "b"], torch.zeros(2, dtype=torch.int32))
    assert 3 + len(others) == len(unpacked) and not any(others)
    assert first_rows.tolist() == [0, 1, 2] and starts is runner.input_buffers.query_start_loc and count == 0


def test_the_state_behind_a_prompt_is_that_of_its_last_token(monkeypatch):
    """And not that of placeholders, with which vLLM fills a step up."""
    pytest.importorskip("triton")
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    from freedraft.engines.vllm.v2.drafting import HostDrafting
    from freedraft.guarded_method import GuardedMethod

    states_by_id: dict[str, list[float]] = {}
    ours = HostDrafting.__new__(HostDrafting)
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


def test_graphs_of_draft_passes_that_cannot_be_captured(tiny_model, monkeypatch):
    """Here, where there is no device: one line, eager passes, and no second try in this process. On attention whose
    replays are unknown nothing is tried."""
    from vllm.config import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.utils import AttentionGroup

    from freedraft.engines.vllm import draft_graphs
    from freedraft.engines.vllm.draft_graphs import DraftGraphs
    from freedraft.engines.vllm.draft_model import PagedDraftModel

    lines = []
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
    monkeypatch.setattr(draft_graphs.logger, "warning", lambda text, *given: lines.append(text % given))
    graphs[0].capture([])
    assert not DraftGraphs.failed
    model.group = AttentionGroup(TritonAttentionBackend, ["layer"], spec, 0)
    for each in graphs:
        each.capture([])
    unknown, line = lines
    assert "without CUDA graphs (attention CPU_ATTN)" in unknown
    assert "without CUDA graphs" in line and DraftGraphs.failed


def test_memory_for_graphs_of_draft_passes_is_left_out_of_the_kv_cache(tiny_model, monkeypatch):
    """Two sets, at nine sizes each, for each of which vLLM's own graphs take 20 MiB, and the logits of 256 requests;
    not on attention whose passes are not captured, and nothing where vLLM captures nothing itself."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from freedraft.engines.vllm import draft_graphs

    monkeypatch.setattr(draft_graphs, "passes_to_capture", lambda sets: sets)
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
        return draft_graphs.with_draft_graphs(lambda runner: sets, lambda runner: estimate, runner)

    estimate, logits = 20 * mib * len(own), 256 * vocab * (4 + 4 + 4)
    assert profiled(estimate, TritonAttentionBackend, 2) == estimate + 2 * 9 * 20 * mib + logits
    assert profiled(len(own), TritonAttentionBackend, 2) == len(own) + 2 * 9 * mib + logits, "a MiB each at least"
    triton, cpu = TritonAttentionBackend, CPUAttentionBackend
    for nothing in ((0, triton, 2), (estimate, triton, 0), (estimate, cpu, 2), (estimate, triton, None)):
        assert profiled(*nothing) == nothing[0]
