"""At start: what cannot work is refused with reason and remedy; an engine that lacks a hook runs without us."""

from __future__ import annotations

import pytest

from freedraft.config import ConfigError
from freedraft.engines.hooks import check
from freedraft.engines.sglang.guards import refuse_unsupported, widths_for

GOOD = {"speculative_num_draft_tokens": 16, "attention_backend": "triton", "page_size": 1, "device": "cuda"}


def arguments(**changed):
    """SGLang's own arguments, before it fills in what this machine has."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(model_path="a", **GOOD | changed)


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "fa3", None])
def test_backends_with_tree_masks_pass(backend):
    refuse_unsupported(arguments(attention_backend=backend), "SSSD", cpu_platform=False)


def test_flashinfer_may_have_pages():
    refuse_unsupported(arguments(attention_backend="flashinfer", page_size=16), "SSSD", cpu_platform=False)


@pytest.mark.parametrize(
    "changed, reason, remedy",
    [
        ({"attention_backend": "trtllm_mha"}, "attention backend trtllm_mha", "--attention-backend fa3 or"),
        ({"decode_attention_backend": "cutlass_mla"}, "cutlass_mla", "--attention-backend"),
        ({"attention_backend": "torch_native"}, "torch_native", "--attention-backend"),
        ({"page_size": 16}, "pages of 16", "--page-size 1"),
        ({"attention_backend": "fa3", "page_size": 64}, "pages of 64", "--page-size 1"),
        ({"pp_size": 2}, "pipeline parallelism", "--tp-size"),
        ({"enable_lora": True}, "LoRA", "merged model"),
        ({"lora_paths": ["a"]}, "LoRA", "merged model"),
        ({"disaggregation_mode": "decode"}, "disaggregation", "--disaggregation-mode"),
        ({"enable_dp_attention": True}, "DP attention", "--enable-dp-attention"),
        ({"enable_two_batch_overlap": True}, "two-batch", "--enable-two-batch-overlap"),
        ({"speculative_adaptive": True}, "width", "--speculative-adaptive"),
        ({"speculative_accept_threshold_acc": 0.9}, "lossless", "1.0"),
        ({"enable_deterministic_inference": True}, "seed", "--enable-deterministic-inference"),
        ({"speculative_num_draft_tokens": 0}, "0 nodes", "1..256"),
        ({"speculative_num_draft_tokens": 500}, "500 nodes", "1..256"),
        ({"device": "cpu", "attention_backend": "torch_native"}, "stock SGLang lacks", "SGLANG_PLATFORM=freedraft_cpu"),
        ({"dcp_size": 2}, "context parallelism", "--dcp-size"),
    ],
)
def test_refused(changed, reason, remedy):
    with pytest.raises(ConfigError) as caught:
        refuse_unsupported(arguments(**changed), "SSSD", cpu_platform=False)
    message = str(caught.value)
    assert message.startswith("--speculative-algorithm sssd ")
    assert reason in message and remedy in message and "\n" not in message


def test_methods_that_run_the_model_have_one_rank():
    refuse_unsupported(arguments(tp_size=2), "SSSD", cpu_platform=False)
    refuse_unsupported(arguments(tp_size=1), "LAYERSKIP", cpu_platform=False, runs_model=True)
    with pytest.raises(ConfigError, match=r"--speculative-algorithm layerskip .* --tp-size 1"):
        refuse_unsupported(arguments(tp_size=2), "LAYERSKIP", cpu_platform=False, runs_model=True)


def test_cpu_platform_takes_its_own_backend_only():
    cpu = {"device": "cpu", "page_size": 16}
    refuse_unsupported(arguments(attention_backend="torch_native", **cpu), "SSSD", cpu_platform=True)
    with pytest.raises(ConfigError, match="torch_native"):
        refuse_unsupported(arguments(attention_backend="triton", **cpu), "SSSD", cpu_platform=True)


def test_widths():
    assert widths_for("triton", 16) == (1, 2, 4, 8, 16)
    assert widths_for("flashinfer", 12) == (1, 2, 4, 8, 12)
    assert widths_for("torch_native", 5) == (1, 2, 3, 4, 5)
    assert widths_for("fa3", 16) == (16,)


def test_platform_is_off_unless_asked_for(monkeypatch):
    from freedraft.engines.sglang.cpu import activate

    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    assert activate() is None


def test_stand_in_for_torchvision():
    import subprocess
    import sys

    code = """
import importlib.util
if importlib.util.find_spec("torchvision"):
    raise SystemExit  # the real one is installed, and wins
from freedraft.engines.sglang.cpu.torchvision_stand_in import install
install(); install()
import torchvision.transforms.v2.functional as F
from torchvision.transforms import InterpolationMode
InterpolationMode.BICUBIC
try:
    F.resize(1)
except RuntimeError as error:
    assert "text models only" in str(error), error
else:
    raise SystemExit("a stand-in was usable")
import math, json  # the finder answers for torchvision only
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_hooks_are_there():
    from freedraft.engines.sglang.hooks import HOOKS, MODEL_HOOKS

    assert check(HOOKS + MODEL_HOOKS) == []


def test_nothing_registers_when_a_hook_is_renamed(monkeypatch, caplog):
    from sglang.srt.speculative import spec_utils
    from sglang.srt.speculative.spec_registry import get_spec

    from freedraft.config import PluginOptions
    from freedraft.engines.sglang.registration import register
    from freedraft.method import METHODS, MethodSpec

    monkeypatch.delattr(spec_utils, "build_grammar_vocab_mask")
    with caplog.at_level("WARNING"):
        assert register(MethodSpec("doubled", "nowhere:Nothing", PluginOptions)) is False
    assert get_spec("doubled") is None and "doubled" not in METHODS
    (line,) = [r.getMessage() for r in caplog.records if "doubled" in r.getMessage()]
    assert "build_grammar_vocab_mask is missing" in line and "not registered" in line


def test_doctor_names_the_hook(monkeypatch):
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

    from freedraft.doctor import examine

    assert examine("sglang").problems == ()
    monkeypatch.delattr(BaseSpecWorker, "note_request_finished")
    (problem,) = examine("sglang").problems
    assert "note_request_finished is missing" in problem


def test_algorithm_sets_defaults_and_answers_the_core(monkeypatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    from freedraft.engines.sglang.algorithm import TreeAlgorithm

    algorithm = TreeAlgorithm("SSSD", lambda args: None, supports_overlap=True)
    args = arguments(speculative_num_draft_tokens=None, max_running_requests=None, enable_mixed_chunk=True)
    algorithm.handle_server_args(args)
    assert args.speculative_num_draft_tokens == 16
    assert args.speculative_eagle_topk > 1, "FA3 ignores the tree mask otherwise"
    assert args.speculative_num_steps * args.speculative_eagle_topk <= 16, "more KV slots than nodes would be reserved"
    assert args.enable_mixed_chunk is False
    assert algorithm.is_ngram() and not algorithm.has_draft_kv() and not algorithm.need_topk()
