"""The default number of draft tokens on SGLang: states of all requests fit into its memory."""

import dataclasses
import json
import logging

import pytest

from freedraft.cost.model_shape import state_bytes
from freedraft.engines.sglang import room
from tests.support import published as models

MEMORY = 80e9
LARGE = {"nemotron": models.NEMOTRON3_NANO_30B, "granite": models.GRANITE4, "lfm": models.LFM2}


@pytest.fixture
def args_of(tmp_path_factory, monkeypatch):
    """Gives SGLang's arguments for a model of these sizes, with all its defaults, on a device of 80 GB."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import common

    monkeypatch.setattr(common, "get_device_memory_capacity", lambda device: MEMORY / 2**20)

    def resolve(config, switched=None, **given):
        folder = tmp_path_factory.mktemp("sizes")  # SGLang remembers each one's configuration
        (folder / "config.json").write_text(json.dumps(config))
        usual = {"device": "cpu", "attention_backend": "torch_native", "mem_fraction_static": 0.9}
        usual |= {"skip_tokenizer_init": True, "disable_overlap_schedule": True}
        args = ServerArgs(model_path=str(folder), **usual | {"max_running_requests": 48} | given)
        args.resolve_once()
        declare_resolution(args, "tests", **switched or {})  # what a CPU refuses
        return resolving_view(args)

    return resolve


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "config",
    [models.QWEN3_NEXT_80B, models.QWEN36_27B, models.KIMI_LINEAR_48B, *LARGE.values(), models.FALCON_H1],
    ids=lambda config: config["model_type"],
)
def test_states_are_as_large_as_sglang_says(args_of, config, ranks):
    """A request keeps three of them, and one for each node of a draft."""
    found = room.room_of(args_of(config, tp_size=ranks, mem_fraction_static=3.0))  # the largest has 160 GB of weights
    assert found.held > found.requests and not found.few and 0 < found.share * found.cache < 240e9 * 0.9 / 1.9
    assert found.more == state_bytes(config, ranks) and found.state == 4 * found.more
    cached = room.room_of(args_of(config, tp_size=ranks, mem_fraction_static=3.0, disable_radix_cache=True))
    assert cached.state == 2 * found.more


def test_an_attention_rank_keeps_whole_states_of_its_own_requests(args_of):
    found = room.room_of(args_of(models.QWEN3_NEXT_80B, tp_size=4, attn_dp_size=2))
    assert found.requests == 24 and found.more == state_bytes(models.QWEN3_NEXT_80B, 2)
    assert found.default(31, trees=False)[0] == 3
    assert room.room_of(args_of(models.QWEN3_30B, tp_size=2, attn_dp_size=2)).default(31, trees=False)[0] == 3


def test_replayed_states_take_no_memory_by_draft_token(args_of):
    switched = {"enable_linear_replayssm_spec": True, "linear_replayssm_cache_len": 16}
    plain, replaying = (room.room_of(args_of(models.QWEN3_NEXT_80B, s, tp_size=4)) for s in ({}, switched))
    assert plain.more > 0 == replaying.more and 0.75 * plain.state < replaying.state < plain.state


def requests_of(args, left, nodes):
    """The number of requests that SGLang itself finds room for. left: bytes beside the weights; nodes: of a draft."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner_components.layer_setup import ModelLayerInfo
    from sglang.srt.runtime_context import get_context, get_schedule
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    needed = [f for f in dataclasses.fields(KVCacheConfigurator) if f.init and f.default is dataclasses.MISSING]
    unread = dict.fromkeys(field.name for field in needed)
    sizes = {"model_config": model_config_of(args), "pp_size": 1, "attn_dp_size": 1, "is_draft_worker": False}
    sizes |= {"spec_algorithm": SpeculativeAlgorithm.NGRAM}
    sizes |= {"layer_info": ModelLayerInfo(start_layer=0, end_layer=1, num_effective_layers=1)}
    given = {"mamba_full_memory_ratio": 0.9, "disable_overlap_schedule": True, "speculative_num_draft_tokens": nodes}
    given |= {"max_running_requests": args.max_running_requests, "max_mamba_cache_size": args.max_mamba_cache_size}
    with get_context().override_server_args(**given, disable_radix_cache=args.disable_radix_cache):
        configurator = KVCacheConfigurator(**unread | sizes)
        configurator._handle_max_mamba_cache(left / 2**30)
        return get_schedule().max_mamba_cache_size // configurator._calculate_mamba_ratio()


@pytest.mark.parametrize(("requests", "longest"), [(8, 31), (48, 3), (200, 0)])
def test_what_fits_is_what_sglang_serves(args_of, requests, longest):
    from sglang.srt.runtime_context import get_parallel

    args, served = args_of(models.GRANITE4, max_running_requests=requests), [0]
    found = room.room_of(args)
    with get_parallel().override(attn_tp_size=1, tp_size=1):
        for length in (1, 3, 7, 15, 31):
            most = requests_of(args, found.cache, length + 1)
            served += [length] if most >= requests else []
            assert not found.excess(length) or most <= requests + 1, length
            assert found.excess(length) or most >= requests, length
    assert max(served) == longest


@pytest.mark.parametrize(
    ("name", "given", "length"),
    [
        ("granite", {"max_running_requests": 8}, 31),
        ("granite", {}, 3),
        ("granite", {"max_running_requests": 400}, 1),
        ("granite", {"max_mamba_cache_size": 24}, 31),  # of 8 requests
        ("nemotron", {"max_running_requests": 4}, 7),
        ("nemotron", {}, 1),
        ("lfm", {"max_running_requests": 400}, 31),
    ],
)
def test_all_requests_that_are_asked_for_keep_their_states(args_of, monkeypatch, caplog, name, given, length):
    monkeypatch.setattr(logging.getLogger("freedraft"), "propagate", True)
    caplog.set_level(logging.INFO, "freedraft")
    assert room.fitting_nodes(args_of(LARGE[name], **given), 31, trees=True) == length + 1
    (line,) = [each.getMessage() for each in caplog.records if "draft tokens" in each.getMessage()]
    assert line.startswith(f"freedraft: up to {length} draft tokens per request by default: ") and "\n" not in line
    assert ("would take recurrent states of" in line) == (length < 31)


def test_a_given_number_is_served_and_what_it_takes_is_told(args_of, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("freedraft"), "propagate", True)
    args = args_of(models.GRANITE4, speculative_num_draft_tokens=17)
    assert room.fitting_nodes(args, 31, trees=True) == 17
    (line,) = [each.getMessage() for each in caplog.records if "draft tokens" in each.getMessage()]
    assert "16 draft tokens per request, as set: they take recurrent states of 56.20 GB for 48 requests" in line


def test_states_of_unknown_size(args_of, monkeypatch):
    monkeypatch.setattr(room, "weight_bytes", lambda *given: 1 / 0)
    found = room.room_of(args_of(models.LFM2))
    assert found.few and found.default(31, trees=True)[0] == 3
    assert room.room_of(args_of(models.QWEN3_30B)).default(31, trees=True) == (31, "larger trees gain little")
