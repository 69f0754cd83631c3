"""What a user writes in --speculative-config, and what stops the start or lets the engine run without us."""

import copy
import io
import logging
import os
import pickle
import re
import socket
from pathlib import Path

import pytest
from rich.console import Console

from freedraft import doctor
from freedraft.config import ConfigError
from freedraft.engines.hooks import Hook, check, installed_version
from freedraft.engines.vllm import hooks, methods, patching
from freedraft.engines.vllm.context import start_line
from freedraft.engines.vllm.hooks import DISTRIBUTIONS, HOOKS, MODEL_HOOKS, OPTIONAL_HOOKS
from tests.support.model_classes import save_config
from tests.support.stores import build_store

GOOD = {"method": "sssd", "num_speculative_tokens": 8, "scoring": "paper"}
SKIPPING = {"method": "layerskip", "num_speculative_tokens": 3, "window": 512}
BOTH = SKIPPING | {"method": "sssd+layerskip"}
TWO_RANKS = {"tensor_parallel_size": 2}
KV_TRANSFER = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def config_of(model, speculative_config, usage=None, **arguments):
    from vllm import EngineArgs

    arguments = {"skip_tokenizer_init": True, "max_model_len": 64, "enforce_eager": True} | arguments
    return EngineArgs(model=str(model), speculative_config=speculative_config, **arguments).create_engine_config(usage)


def refusal(model, speculative_config, **arguments):
    with pytest.raises(ConfigError) as error:
        config_of(model, speculative_config, **arguments)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.fixture
def line(monkeypatch, caplog):
    """Gives the only line that we have logged."""

    def logged():
        (line,) = (each.getMessage() for each in caplog.records if each.name.startswith("freedraft"))
        assert "\n" not in line
        return line

    monkeypatch.setattr(logging.getLogger("freedraft"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return logged


def test_all_hooks_are_there():
    assert check(HOOKS + MODEL_HOOKS + OPTIONAL_HOOKS) == []


def test_the_doctor_names_the_command_that_starts_the_cpu_package():
    from importlib.metadata import distributions

    stock = any(each.name == "vllm" for each in distributions())
    doctor.run(Console(file=(printed := io.StringIO()), width=400))
    assert ("python -m vllm.entrypoints.openai.api_server" in printed.getvalue()) == (not stock)


@pytest.fixture(scope="module")
def texts():
    """vLLM's own files."""
    from importlib.util import find_spec

    root = Path(str(find_spec("vllm").origin)).parent
    return {str(path.relative_to(root.parent)): path.read_text() for path in root.rglob("*.py")}


def test_the_source_tells_what_the_installed_engine_tells(texts):
    """As `tests.support.versions` reads wheels that are not installed."""
    from tests.support.versions import Source, parts

    source = Source(texts)
    hooks = [hook for table in parts("vllm").values() for hook in table]
    assert set(hooks) == set(HOOKS + MODEL_HOOKS + OPTIONAL_HOOKS)
    assert [problem for hook in hooks if (problem := source.problem(hook)) is not None] == []
    # Decorated with overloads, of which the last definition counts.
    lacks = Hook("vllm.compilation.decorators.support_torch_compile", ("no_such",), purpose="a test")
    assert "no_such" in (source.problem(lacks) or "")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("block_table", "BlockTables has no num_blocks"),
        ("states", "RequestState has no total_len"),
        ("async_utils", "AsyncOutput has no model_runner_output"),
        ("buffer_utils", "UvaBackedTensor has no np"),
        ("model_runner", "GPUModelRunner has no block_tables"),
        ("model_runner", "GPUModelRunner has no fast_prefill"),
    ],
)
def test_doctor_knows_what_is_read_of_model_runner_v2(texts, module, said):
    """In vLLM's own files, in which this attribute has another name."""
    from tests.support.versions import Source

    name, path = said.split()[-1], f"vllm/v1/worker/gpu/{module}.py"
    source = Source(texts | {path: re.sub(rf"\bself\.{name}\b", "self.renamed", texts[path])})
    assert any(said in (source.problem(hook) or "") for hook in OPTIONAL_HOOKS)


def test_layers_that_are_skipped_are_not_compiled_ahead_of_time(tiny_model, monkeypatch):
    """Their passes have the target's weights. Before vLLM 0.33 only the environment says so, for all modules."""
    from vllm import envs

    from freedraft.engines.vllm.hooks import AOT_SWITCH

    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != "VLLM_USE_AOT_COMPILE"})
    assert envs.VLLM_USE_AOT_COMPILE, "by default"
    config_of(tiny_model, GOOD)
    assert envs.VLLM_USE_AOT_COMPILE
    config_of(tiny_model, SKIPPING)
    assert (AOT_SWITCH.problem() is None) == envs.VLLM_USE_AOT_COMPILE
    os.environ["VLLM_USE_AOT_COMPILE"] = "1"
    config_of(tiny_model, SKIPPING)
    assert envs.VLLM_USE_AOT_COMPILE, "where the user says so"


def test_the_method_is_rewritten_and_options_travel(tiny_model):
    given = GOOD | {"method": "SSSD", "knee": 11, "live-max-age": 0.25}
    config = config_of(tiny_model, copy.deepcopy(given))
    assert config.speculative_config.method == "custom_class"
    assert config.speculative_config.num_speculative_tokens == 8
    ours = methods.configured(pickle.loads(pickle.dumps(config)))
    assert ours.name == "sssd" and not ours.lengths
    assert ours.options["knee"] == 11 and ours.options["live_max_age"] == 0.25 and ours.options["scoring"] == "paper"
    # Compiled graphs are kept for other options.
    assert config.compute_hash() == config_of(tiny_model, GOOD | {"metrics_port": 4711}).compute_hash()
    graphs = config_of(tiny_model, GOOD, compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"})
    assert methods.configured(graphs).graph_mode_given and not ours.graph_mode_given


def test_one_line_says_what_decides_the_speed(tiny_model):
    config = config_of(tiny_model, GOOD, tensor_parallel_size=2, enforce_eager=True)
    line = start_line(config, "sssd", v2=False)
    said = ["method 'sssd'", installed_version(DISTRIBUTIONS), "runner V1", "async scheduling off", "CUDA graphs off",
            "attention", "2 tensor-parallel ranks", "up to 8 draft tokens"]  # fmt: skip
    assert "\n" not in line and all(words in line for words in said) and "data" not in line and "not test" not in line
    config.speculative_config.num_speculative_tokens_per_batch_size = [(1, 8, 8), (9, 99, 0)]
    assert "8 from 1 on, 0 from 9 on" in start_line(config, "sssd", v2=True)


def test_the_short_flags(tiny_model):
    config = config_of(tiny_model, None, spec_method="sssd", spec_tokens=5)
    assert config.speculative_config.method == "custom_class"
    assert config.speculative_config.num_speculative_tokens == 5
    assert "given twice" in refusal(tiny_model, dict(GOOD), spec_tokens=5)
    assert "--spec-model" in refusal(tiny_model, dict(GOOD), spec_model="x")


def test_a_runner_that_the_method_cannot_have(tiny_model, monkeypatch):
    message = refusal(tiny_model, GOOD, async_scheduling=True)
    assert "'sssd'" in message and "--async-scheduling" in message and "custom_class" not in message
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert config_of(tiny_model, dict(GOOD)).speculative_config.method == "custom_class"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(hooks, "V2_HOOKS", (*hooks.V2_HOOKS, Hook("vllm.no_such_module", purpose="a test")))
    message = refusal(tiny_model, dict(GOOD))
    assert "'sssd'" in message and "vllm.no_such_module" in message and "VLLM_USE_V2_MODEL_RUNNER" in message


def test_methods_are_served_by_v2_where_vllm_has_it(tiny_model, as_with_triton):
    for given in (SKIPPING, SKIPPING | {"selection": "knapsack"}, BOTH):
        config = config_of(tiny_model, dict(given))
        assert config.use_v2_model_runner and config.speculative_config.method == methods.V2_METHOD
        assert methods.configured(config).options.items() >= {"window": 512}.items()


def test_n_grams_on_top_of_draft_passes_have_room_behind_these(tiny_model, as_with_triton):
    for given, own, most in (({}, 3, 15), ({"num_speculative_tokens": 20}, 20, 20), ({"ngram_tokens": 9}, 3, 9)):
        config = config_of(tiny_model, BOTH | given)
        ours = methods.configured(config)
        assert ours.name == "sssd+layerskip" and ours.options["length"] == own and ours.head == 0
        assert config.speculative_config.num_speculative_tokens == most and ours.lengths[0] == 0
    message = refusal(tiny_model, BOTH | {"ngram_tokens": 2})
    assert "'ngram_tokens' must be at least the 3 tokens of 'layerskip', not 2" in message


def test_what_replaces_the_hybrid_method(tiny_model):
    for given, arguments in ((BOTH | {"method": "hybrid"}, {}), (None, {"spec_method": "hybrid", "spec_tokens": 3})):
        assert "'sssd+layerskip'" in refusal(tiny_model, given, **arguments)


@pytest.mark.parametrize("given", [SKIPPING, BOTH])
def test_a_window_below_the_page_that_vllm_chooses(tiny_model, given):
    message = refusal(tiny_model, given | {"window": 64})
    assert all(words in message for words in (f"'{given['method']}'", "'window' is 64 tokens", "set 128 or more"))
    in_place = {"offload_backend": "uva", "offload_group_size": 4}  # weights that draft passes can read
    assert config_of(tiny_model, given | {"window": 64}, block_size=64, **in_place).cache_config.block_size == 64
    assert config_of(tiny_model, given | {"window": 128}).cache_config.block_size == 128


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("sssd", {"pipeline_parallel_size": 2}, "--pipeline-parallel-size 1"),
        ("layerskip", {"pipeline_parallel_size": 2}, "--pipeline-parallel-size 1"),
        ("layerskip", TWO_RANKS | {"decode_context_parallel_size": 2}, "--decode-context-parallel-size 1"),
        ("layerskip", {"enable_lora": True}, "LoRA"),
        ("layerskip", {"kv_transfer_config": KV_TRANSFER}, "KV transfer"),
        # Each rank has a scheduler of its own.
        ("sssd", TWO_RANKS | {"distributed_executor_backend": "external_launcher"}, "external_launcher"),
        # Draft passes call the layers' parts, behind what fetches their weights layer by layer.
        ("layerskip", {"offload_group_size": 4, "offload_num_in_group": 1}, "--offload-group-size"),
        ("layerskip", {"offload_backend": "prefetch"}, "--offload-group-size"),
    ],
)
def test_engines_that_are_refused(tiny_model, method, arguments, words):
    if "kv_transfer_config" in arguments:
        from vllm.config import KVTransferConfig

        arguments = {"kv_transfer_config": KVTransferConfig(**KV_TRANSFER)}
    message = refusal(tiny_model, SKIPPING if method == "layerskip" else GOOD, **arguments)
    assert words in message and f"'{method}'" in message


def test_recurrent_layers_are_served_by_the_second_runner_only(tiny_model, tmp_path, as_with_triton, monkeypatch):
    save_config("FalconH1", tmp_path)
    config = config_of(tmp_path, GOOD)
    assert config.use_v2_model_runner and config.speculative_config.method == methods.V2_METHOD
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    message = refusal(tmp_path, GOOD)
    assert "'sssd'" in message and "FalconH1ForCausalLM" in message and "model runner V2 of vLLM 0.32" in message
    assert config_of(tiny_model, GOOD).speculative_config.method == "custom_class"


def test_replicas_that_share_experts_draft_one_length(tiny_model, tmp_path):
    from freedraft.cost.controller import FullLength
    from freedraft.cost.policies import make_controller
    from freedraft.engines.vllm.context import context_of_engine

    save_config("Mixtral", tmp_path)
    for model, replicas, lengths in ((tmp_path, 2, (8,)), (tmp_path, 1, None), (tiny_model, 2, None)):
        context = context_of_engine(config_of(model, GOOD, data_parallel_size=replicas))
        assert context.lengths == lengths
        assert (type(make_controller(context)) is FullLength) == (lengths is not None)


@pytest.mark.parametrize("policy", ["auto", "knee"])
def test_replicas_of_a_dense_model_draft_by_batch_size(tiny_model, as_with_triton, monkeypatch, policy):
    """On model runner V2, where vLLM takes lengths by batch size away from all replicas."""
    from vllm.config import VllmConfig

    from freedraft.engines.vllm.context import context_of_engine

    seen = []
    monkeypatch.setattr(  # what comes next before the sizes of CUDA graphs, which only GPUs' platforms choose
        VllmConfig,
        "_maybe_override_dynamic_sd_cudagraph_mode",
        lambda self: seen.append(self.speculative_config.num_speculative_tokens_per_batch_size),
    )
    given, table = GOOD | {"hardware": "h100", "policy": policy}, "num_speculative_tokens_per_batch_size"
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    one, two = (config_of(tiny_model, given, data_parallel_size=replicas) for replicas in (1, 2))
    assert (len(methods.configured(one).lengths) > 2) == (policy == "auto")
    assert getattr(one.speculative_config, table)
    for name in (table, methods.ATTRIBUTE):
        assert getattr(two.speculative_config, name) == getattr(one.speculative_config, name)
    assert seen[-1] == seen[0] is not None, "CUDA graphs have the sizes of batches at these lengths"
    own = config_of(tiny_model, given | {table: [(1, 4, 8), (5, 64, 2)]}, data_parallel_size=2)
    assert [*map(tuple, getattr(own.speculative_config, table))] == [(1, 4, 8), (5, 64, 2)]
    # In one process with others, ranks take their steps together.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    two = config_of(tiny_model, given, data_parallel_size=2)
    assert getattr(two.speculative_config, table) is None and methods.configured(two).lengths == ()
    assert context_of_engine(two, v2_lengths=(8,)).lengths == (8,)


@pytest.mark.parametrize("name", ["ROCM", "XPU"])
def test_what_was_never_tried_on_a_platform(tiny_model, as_with_triton, monkeypatch, name):
    """Trees and adaptive verification; by default drafts are chains there."""
    from vllm.platforms import current_platform

    adaptive = {"enable_adaptive_verification": True}
    sharded = refusal(tiny_model, GOOD | adaptive, enable_batch_sharded_sampling=True, tensor_parallel_size=2)
    assert "'enable_adaptive_verification' does not go with --enable-batch-sharded-sampling" in sharded
    assert methods.configured(config_of(tiny_model, dict(GOOD))).shape == "auto"
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: name == "ROCM")
    monkeypatch.setattr(type(current_platform), "is_xpu", lambda self: name == "XPU")
    for options, said in ((adaptive, "'enable_adaptive_verification'"), ({"shape": "tree"}, "'shape' 'tree'")):
        assert f"{said} has not been tried on {name.replace('ROCM', 'ROCm')}" in refusal(tiny_model, GOOD | options)
    assert methods.configured(config_of(tiny_model, dict(GOOD))).shape == "chain"


def test_other_methods_are_left_alone(tiny_model):
    assert config_of(tiny_model, None).speculative_config is None
    config = config_of(tiny_model, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3})
    assert config.speculative_config.method == "ngram"
    assert methods.configured(config) == methods.Configured()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (SKIPPING | {"skip_set": "/no/such/set.json"}, ["'skip_set'", "/no/such/set.json", "freedraft calibrate"]),
        (SKIPPING | {"window": None}, ["the whole model", "'skip_set'", "'window'", "'selection'"]),
        (BOTH | {"window": None}, ["the whole model", "'skip_set'", "'window'", "'selection'"]),
        (SKIPPING | {"skip_sets": "x"}, ["'skip_sets'", "did you mean 'skip_set'"]),
        (BOTH | {"draft": ["layerskip", "sssd"]}, ["unknown option 'draft'"]),
        (BOTH | {"datastroe": "x"}, ["did you mean 'datastore'"]),
        ({"datastroe": "x"}, ["'datastroe'", "did you mean 'datastore'"]),
        ({"num_speculative_token": 3}, ["'num_speculative_token'", "did you mean 'num_speculative_tokens'"]),
        ({"model": "x"}, ["'model'"]),
        ({"prompt_lookup_max": 4}, ["'prompt_lookup_max'", "leave it out", "vLLM's other methods"]),
        ({"quantization": "fp8"}, ["'quantization'", "leave it out"]),
        ({"max_model_len": 512}, ["'max_model_len'", "leave it out"]),
        ({"draft_tensor_parallel_size": 1}, ["'draft_tensor_parallel_size'", "leave it out"]),
        ({"num_speculative_tokens": 0}, ["'num_speculative_tokens'", "1 to 64", "0", "try 8"]),
        ({"num_speculative_tokens": 65}, ["'num_speculative_tokens'", "1 to 64", "65"]),
        ({"num_speculative_tokens": "8"}, ["'num_speculative_tokens'", "'8'"]),
        ({"num_speculative_tokens": True}, ["'num_speculative_tokens'", "True"]),
        ({"num_speculative_tokens": None}, ["'num_speculative_tokens'", "missing", "8"]),
        ({"hardware": "h2000"}, ["h2000", "did you mean 'h200'"]),
        ({"rejection_sample_method": "fly"}, ["'fly'", "other tokens than the model's", "leave it out"]),
        ({"rejection_sample_method": "synthetic"}, ["'synthetic'", "other tokens than the model's"]),
        ({"datastore": "/no/such/store"}, ["/no/such/store"]),
    ],
)
def test_bad_input_stops_the_start_with_one_line(tiny_model, change, words):
    message = refusal(tiny_model, change if "method" in change else GOOD | change)
    assert all(word in message for word in words)


def test_a_store_of_another_tokenizer(demo_model, tmp_path):
    from freedraft.fingerprints import tokenizer_fingerprint
    from sssd_plugin.datastore.disk.format import TokenizerEntry
    from sssd_plugin.datastore.tokenizer import load

    for name, print_ in (("mine", tokenizer_fingerprint(load(demo_model))), ("foreign", "0" * 64)):
        entry = TokenizerEntry(fingerprint=print_, name="a tokenizer")
        build_store(tmp_path / name, [range(1000)], 1000, tokenizer=entry)
    message = refusal(demo_model, GOOD | {"datastore": str(tmp_path / "foreign")}, skip_tokenizer_init=False)
    assert "foreign" in message and "tokenizer" in message
    config_of(demo_model, GOOD | {"datastore": str(tmp_path / "mine")}, skip_tokenizer_init=False)


def test_of_several_front_ends_the_first_checks_what_the_engine_needs(tiny_model, tmp_path):
    """When others start, the engine may serve its metrics already. Each replica serves its own, at port + rank."""
    save_config("Mixtral", tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        given = GOOD | {"metrics_port": port, "datastore": "/no/such/store"}
        for several in ({}, {"_api_process_count": 2, "_api_process_rank": -1}):
            assert f"127.0.0.1:{port} " in refusal(tiny_model, given, **several)
        for rank in range(2):
            config_of(tiny_model, given, _api_process_count=2, _api_process_rank=rank)
        replica = {"data_parallel_size": 2, "data_parallel_rank": 1}
        assert f"127.0.0.1:{port} " in refusal(tmp_path, GOOD | {"metrics_port": port - 1}, **replica)
        config_of(tmp_path, GOOD | {"metrics_port": port}, **replica)


@pytest.mark.parametrize("name", ["propose_draft_token_ids", "_update_states"])
def test_a_renamed_hook_leaves_the_engine_running_without_us(tiny_model, monkeypatch, line, name):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    monkeypatch.setattr(GPUModelRunner, "renamed", getattr(GPUModelRunner, name), raising=False)
    monkeypatch.delattr(GPUModelRunner, name)
    assert config_of(tiny_model, dict(GOOD)).speculative_config is None
    said = [f"GPUModelRunner.{name} is missing", installed_version(DISTRIBUTIONS), "without speculation"]
    assert all(words in line() for words in said)


def test_without_the_configuration_hook_nothing_is_registered(monkeypatch, line):
    from vllm.engine.arg_utils import EngineArgs

    from sssd_plugin.method import SPEC

    monkeypatch.setattr(methods, "METHODS", {})
    monkeypatch.delattr(EngineArgs, "create_speculative_config")
    assert not methods.register(SPEC) and methods.METHODS == {}
    assert "create_speculative_config is missing" in line() and "freedraft doctor" in line()


def test_the_front_end_does_not_initialise_cuda(tiny_model, monkeypatch):
    """vLLM would then have to spawn its engine where it forks."""
    import torch

    from freedraft.engines.vllm import context

    def initialise(*args):
        raise AssertionError("CUDA is initialised")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", initialise)
    monkeypatch.setattr(context, "_device", lambda: "NVIDIA H100 80GB HBM3")
    made = config_of(tiny_model, {"method": "sssd", "num_speculative_tokens": 8})
    assert methods.configured(made).name == "sssd"


def test_without_the_fix_vllm_cannot_replace_kernels_once_numba_is_loaded(monkeypatch):
    import llvmlite.binding  # noqa: F401
    from vllm.triton_utils import dispatcher

    monkeypatch.delattr(dispatcher, "vars", raising=False)
    with pytest.raises(AttributeError, match="get"):
        dispatcher._rebind_kernels([])
    patching.start_with_numba_loaded()
    dispatcher._rebind_kernels([])


def test_vllm_finds_the_attention_of_trees_by_the_name_that_it_has():
    """On CUDA, vLLM asks the registered class for its module and name, and imports that."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from freedraft.engines.vllm.v2.tree_attention import register

    places = AttentionBackendEnum.TRITON_ATTN, AttentionBackendEnum.FLASH_ATTN
    stock = [place.get_class() for place in places]
    try:
        register(flash=True)
        for place, before in zip(places, stock, strict=True):
            ours = place.get_class()
            assert ours is not before and issubclass(ours, before)
            assert resolve_obj_by_qualname(".".join(ours.full_cls_name())) is ours
    finally:
        for place in places:
            place.clear_override()
