"""At start: what cannot work is refused with reason and remedy; an engine that lacks a hook runs without us."""

import json
import sys
from pathlib import Path

import pytest
from transformers import MambaConfig

from freedraft.config import ConfigError
from freedraft.engines.hooks import Hook, check
from freedraft.engines.sglang import guards
from freedraft.engines.sglang.guards import BACKENDS, shape_for, state_shape, verify_backend, widths_for
from tests.support.model_classes import class_config
from tests.support.models import save, tiny_model

ON_GPU = {"device": "cuda", "attention_backend": "triton"}
MAMBA1 = {"attention_backend": "triton", "model_path": "mamba"}
GLM_IMAGE = {"architectures": ["GlmImageForConditionalGeneration"], "vision_vocab_size": 9}
ENCODER = {"architectures": ["MllamaForConditionalGeneration"]}
ON_CPU = {"device": "cpu", "attention_backend": "torch_native"}


@pytest.fixture(scope="module")
def weightless(tmp_path_factory):
    """A folder with a model's config."""
    return save(tiny_model(seed=1, vocab_size=64), tmp_path_factory.mktemp("start"))


@pytest.fixture
def resolved(weightless, monkeypatch):
    """Gives what SGLang makes of arguments, our part in it included, as it starts: a view of a ServerArgs."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()

    def resolve(**given):
        if given["device"] == "cuda":
            monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
        usual = {"model_path": str(weightless), "speculative_algorithm": "sssd", "page_size": 1}
        args = ServerArgs(**usual | given)
        args.resolve_once()
        return resolving_view(args)

    return resolve


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "fa3"])
def test_backends_with_tree_masks_pass(resolved, backend):
    args = resolved(**ON_GPU | {"attention_backend": backend})
    assert args.speculative_num_draft_tokens == 32
    assert args.speculative_eagle_topk > 1, "FA3 ignores the tree mask otherwise"
    assert args.speculative_num_steps * args.speculative_eagle_topk <= 32, "more KV slots than nodes would be reserved"
    assert args.enable_mixed_chunk is False and args.max_running_requests == 48
    deterministic = resolved(**ON_GPU | {"attention_backend": backend, "enable_deterministic_inference": True})
    assert deterministic.speculative_algorithm == "SSSD" and deterministic.sampling_backend == "pytorch"


@pytest.mark.parametrize(
    "changed, reason, remedy",
    [
        ({"attention_backend": "dsa"}, "attention backend dsa", "--attention-backend fa3 or flashinfer or triton"),
        ({"attention_backend": "torch_native"}, "torch_native", "--attention-backend"),
        # The verifying pass runs on the prefill backend, unless SGLang is told otherwise.
        ({"prefill_attention_backend": "dsa"}, "dsa (--prefill-attention-backend)", "--attention-backend"),
        (
            {"decode_attention_backend": "flex_attention", "speculative_attention_mode": "decode"},
            "flex_attention (--decode-attention-backend)",
            "--attention-backend",
        ),
        ({"pp_size": 2}, "pipeline parallelism", "--tp-size"),
        ({"tp_size": 2, "attn_dp_size": 2, "lora_paths": ["a=b"]}, "LoRA adapters", "ngram without DP attention"),
        ({"enable_two_batch_overlap": True}, "two-batch", "--enable-two-batch-overlap"),
        ({"enable_pdmux": True}, "multiplexing", "--enable-pdmux"),
        ({"enable_watermark": True}, "watermark", "--enable-watermark"),
        ({"grammar_backend": "outlines"}, "--grammar-backend outlines", "--grammar-backend xgrammar or llguidance"),
        ({"enable_streaming_session": True}, "streaming sessions", "--enable-streaming-session"),
        ({"enable_return_routed_experts": True}, "routed experts", "--enable-return-routed-experts"),
        ({"enable_return_indexer_topk": True}, "indexer", "--enable-return-indexer-topk"),
        ({"tokenizer_worker_num": 2}, "front-end", "--tokenizer-worker-num"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk", "--speculative-num-draft-tokens"),
        ({"speculative_num_steps": 3}, "--speculative-num-steps", "--speculative-num-draft-tokens"),
        ({"speculative_ngram_external_corpus_path": "a"}, "--speculative-ngram-external-corpus-path", "'datastore'"),
        ({"speculative_ngram_capacity": 9}, "--speculative-ngram-capacity", "start without it"),
        ({"speculative_accept_threshold_acc": 0.9}, "lossless", "1.0"),
        ({"speculative_num_draft_tokens": 0}, "0 nodes", "1..256"),
        ({"speculative_num_draft_tokens": 500}, "500 nodes", "1..256"),
        (ON_CPU, "stock SGLang lacks", "SGLANG_PLATFORM=freedraft_cpu"),
        ({"tp_size": 2, "dcp_size": 2}, "context parallelism", "--dcp-size"),
        ({}, "graphs of metadata", "unset SGLANG_ENABLE_METADATA_GLUE_GRAPH"),
        (MAMBA1, "does not serve MambaForCausalLM, whose states SGLang cannot take back", "start without it"),
        (MAMBA1 | {"attention_backend": "fa4", "page_size": None}, "SGLang cannot take back", "start without it"),
        ({"model_path": ENCODER}, "an encoder, whose KV comes before", "start without it"),
        ({"model_path": {"engram_layer_ids": [1]}}, "embeddings of several tokens", "start without it"),
        ({"model_path": {"use_ngram_embedding": True, "ngram_embedding_n": 2}}, "several tokens", "start without it"),
        ({"model_path": {"architectures": ["MiniMaxM3SparseForCausalLM"]}}, "MiniMax-M3", "start without it"),
        ({"model_path": {"architectures": ["LlavaVidForCausalLM"]}}, "cannot verify several requests", "start without"),
        ({"model_path": GLM_IMAGE}, "next positions", "start without it"),
        (
            {"linear_attn_verify_backend": "flashinfer"},
            "does not go with --linear-attn-verify",
            "use --linear-attn-verify-backend triton",
        ),
    ],
)
def test_refused(resolved, weightless, tmp_path, monkeypatch, changed, reason, remedy):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    if (model := changed.get("model_path")) == "mamba":
        MambaConfig(num_hidden_layers=2, vocab_size=64, architectures=["MambaForCausalLM"]).save_pretrained(tmp_path)
    elif model:
        (tmp_path / "config.json").write_text(json.dumps(json.loads((weightless / "config.json").read_text()) | model))
    changed = changed | ({"model_path": str(tmp_path)} if model else {})
    if "unset" in remedy:
        monkeypatch.setenv(remedy.split()[-1], "y")
    with pytest.raises(ConfigError) as caught:
        resolved(**ON_GPU | changed)
    message = str(caught.value)
    assert message.startswith("--speculative-algorithm sssd ")
    assert reason in message and remedy in message and "\n" not in message


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance", "none"])
def test_what_is_not_refused(resolved, backend):
    """All grammar backends that this SGLang has but outlines, the name in capitals, and the one option of NGRAM that is
    read."""
    from sglang.srt.arg_groups.choices import GRAMMAR_BACKEND_CHOICES

    assert set(GRAMMAR_BACKEND_CHOICES) == {"xgrammar", "llguidance", "none", "outlines"}
    read = {"speculative_algorithm": "SSSD", "speculative_ngram_external_corpus_max_tokens": 9}
    assert resolved(**ON_GPU, **read, grammar_backend=backend).speculative_num_draft_tokens == 32


@pytest.mark.parametrize(
    "kind, given, topk",
    [
        ("FalconH1", {}, 2),
        ("FalconH1", {"mamba_backend": "flashinfer"}, 1),
        ("Qwen3Next", {"linear_attn_backend": "flashinfer"}, 2),  # whose trees SGLang gives to Triton
        ("Qwen3Next", {"enable_linear_replayssm_spec": True}, 1),
        ("Qwen3Next", {"ple_layer_ids": [1]}, 1),  # Qwen4-Exp embeds several tokens of a row
        ("Lfm2", {}, 1),
    ],
)
def test_recurrent_layers_follow_trees_or_chains(tmp_path, kind, given, topk):
    from sglang.srt.server_args import ServerArgs

    config = class_config(kind)
    config.architectures = [f"{kind}ForCausalLM"]
    if embeds := [name for name in given if name.startswith("ple_")]:
        config.ple_layer_ids = given[embeds[0]]
    config.save_pretrained(tmp_path)
    args = ServerArgs(model_path=str(tmp_path), speculative_algorithm="sssd", **{} if embeds else given)
    assert state_shape(args, "sssd") == ("tree" if topk > 1 else "chain")
    args.device = "xpu"
    with pytest.raises(ConfigError, match=f"{kind}ForCausalLM, whose states SGLang cannot take back"):
        state_shape(args, "sssd")


def test_flashinfer_verifies_no_states(resolved):
    """Its kernels place and find them by the width of a step; ours differ."""
    assert resolved(**ON_GPU, linear_attn_decode_backend="flashinfer").linear_attn_verify_backend == "triton"
    assert resolved(**ON_GPU, linear_attn_verify_backend="nv_cutedsl").linear_attn_verify_backend == "nv_cutedsl"


def test_adapters_go_with_drafts_of_the_host(resolved, monkeypatch):
    adapters = ON_GPU | {"enable_lora": True, "lora_paths": ["a=b"]}
    args = resolved(**adapters)
    assert args.enable_lora and args.speculative_algorithm == "SSSD"
    for name in ("layerskip", "sssd+layerskip"):
        with pytest.raises(ConfigError, match="--speculative-algorithm sssd") as caught:
            resolved(**adapters, speculative_algorithm=name)
        assert "LoRA" in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setattr(guards, "LORA_HOOKS", (Hook("sglang.srt.no_such_module", purpose="a test"),))
    with pytest.raises(ConfigError, match=r"LoRA.*--speculative-algorithm ngram"):
        resolved(**adapters)


def test_what_replaces_the_hybrid_method(resolved):
    with pytest.raises(ConfigError, match=r"no method 'hybrid' any more: use 'sssd\+layerskip'"):
        resolved(**ON_GPU, speculative_algorithm="hybrid")


def test_n_grams_on_top_of_draft_passes_are_chains(resolved, monkeypatch):
    monkeypatch.setenv("FREEDRAFT_WINDOW", "512")
    args = resolved(**ON_GPU, speculative_algorithm="sssd+layerskip")
    assert args.speculative_algorithm == "SSSD+LAYERSKIP" and args.speculative_eagle_topk == 1
    monkeypatch.setenv("FREEDRAFT_NGRAM_TOKENS", "20")
    with pytest.raises(ConfigError, match=r"'ngram_tokens' is --speculative-num-draft-tokens here"):
        resolved(**ON_GPU, speculative_algorithm="sssd+layerskip")


@pytest.mark.parametrize("name", ["sssd", "layerskip"])
def test_chains_do_without_the_second_call_of_fa3(resolved, monkeypatch, name):
    if name != "sssd":
        monkeypatch.setenv("FREEDRAFT_WINDOW", "512")
    assert resolved(**ON_GPU | {"attention_backend": "fa3"}, speculative_algorithm=name).speculative_eagle_topk > 1
    monkeypatch.setenv("FREEDRAFT_SHAPE", "chain")
    args = resolved(**ON_GPU | {"attention_backend": "fa3"}, speculative_algorithm=name)
    assert args.speculative_eagle_topk == 1 and args.speculative_num_draft_tokens == 16, "longer ones gain nothing"


@pytest.mark.parametrize("backend", ["fa4", "flashmla", "trtllm_mha"])
def test_chains_where_attention_reads_no_mask(resolved, monkeypatch, backend):
    """As SGLang itself takes no other topk there."""
    from sglang.srt.runtime_context import override_platform

    with override_platform(is_sm100=True, is_blackwell=True):
        args = resolved(**ON_GPU | {"attention_backend": backend, "page_size": None})
        assert args.speculative_eagle_topk == 1 and args.speculative_num_draft_tokens == 16
        assert BACKENDS[backend].fixed_width and args.page_size > 1
        monkeypatch.setenv("FREEDRAFT_SHAPE", "tree")
        with pytest.raises(ConfigError, match=rf"no trees on attention backend {backend}: unset 'shape'$"):
            resolved(**ON_GPU | {"attention_backend": backend, "page_size": None})


@pytest.mark.parametrize("fact", ["is_hip", "is_xpu"])
def test_other_gpus_verify_chains(resolved, monkeypatch, fact):
    """Until trees have been seen there; a CPU beside one verifies trees."""
    from sglang.srt.runtime_context import override_platform

    with override_platform(**{fact: True}):
        assert resolved(**ON_CPU).speculative_eagle_topk == 2
        args = resolved(**ON_GPU)
        assert args.speculative_eagle_topk == 1 and args.speculative_num_draft_tokens == 16
        assert resolved(**ON_GPU, speculative_num_draft_tokens=8).speculative_num_draft_tokens == 8
        monkeypatch.setenv("FREEDRAFT_SHAPE", "tree")
        with pytest.raises(ConfigError, match=r"^--speculative-algorithm sssd: no trees on ROCm.*: unset 'shape'$"):
            resolved(**ON_GPU)
    assert resolved(**ON_GPU).speculative_eagle_topk == 2


def test_the_backend_that_does_not_verify_may_be_any(resolved):
    """SGLang's own choice for another kind of pass is not ours to judge."""
    assert verify_backend(resolved(**ON_GPU | {"decode_attention_backend": "flex_attention"})) == "triton"
    decode = {"prefill_attention_backend": "fa4", "speculative_attention_mode": "decode"}
    assert verify_backend(resolved(**ON_GPU | decode)) == "triton"


def test_ranks(resolved, monkeypatch):
    for name, nodes in {"sssd": 32, "layerskip": 16, "sssd+layerskip": 16}.items():
        if name != "sssd":
            monkeypatch.setenv("FREEDRAFT_WINDOW", "512")
        args = resolved(**ON_GPU, tp_size=2, speculative_algorithm=name)
        assert args.tp_size == 2 and args.speculative_num_draft_tokens == nodes
    monkeypatch.setenv("FREEDRAFT_SELECTION", "swift")
    for name in ("layerskip", "sssd+layerskip"):
        with pytest.raises(ValueError, match=r"selection 'swift'.* rank only, not 2: .*'knn'"):
            resolved(**ON_GPU, tp_size=2, speculative_algorithm=name)


@pytest.mark.parametrize("given", [{"dp_size": 2, "enable_dp_attention": True}, {"attn_dp_size": 2}])
def test_attention_ranks(resolved, monkeypatch, given):
    """Short chains of one length: what a rank drafts decides for no other."""
    given = ON_GPU | {"tp_size": 2} | given
    args = resolved(**given)
    assert (args.speculative_num_draft_tokens, args.speculative_eagle_topk, args.max_running_requests) == (4, 1, 96)
    assert resolved(**given, speculative_num_draft_tokens=8).speculative_num_draft_tokens == 8
    monkeypatch.setenv("FREEDRAFT_SHAPE", "tree")
    with pytest.raises(ConfigError, match=r"^--speculative-algorithm sssd: no trees on DP attention: unset 'shape'$"):
        resolved(**given)
    monkeypatch.delenv("FREEDRAFT_SHAPE")
    monkeypatch.setenv("FREEDRAFT_WINDOW", "512")
    for name in ("layerskip", "sssd+layerskip"):
        with pytest.raises(ConfigError, match=r"does not run under DP attention: start without it \(--attn-dp-size\)"):
            resolved(**given, speculative_algorithm=name)


def test_cpu_platform_takes_its_own_backend_and_no_drafts_with_the_whole_model(resolved):
    assert resolved(**ON_CPU | {"page_size": 16}).page_size == 16
    with pytest.raises(ConfigError, match="torch_native"):
        resolved(**ON_CPU | {"attention_backend": "triton"})
    for name in ("layerskip", "sssd+layerskip"):
        with pytest.raises(ConfigError, match=r"the whole model: set option 'skip_set', 'window' or"):
            resolved(**ON_CPU, speculative_algorithm=name)


def test_the_variable_alone_chooses_the_cpu_and_a_start_without_gpu_names_it(resolved, monkeypatch):
    from sglang.srt.platforms import current_platform
    from sglang.srt.platforms.interface import SRTPlatform
    from sglang.srt.utils.common import get_device

    from freedraft.engines.sglang.hooks import settings

    args = resolved(device=None)
    assert args.device == "cpu" and args.attention_backend == "torch_native" and settings() == []
    monkeypatch.delenv("SGLANG_PLATFORM")
    monkeypatch.setattr(type(current_platform), "get_device", SRTPlatform.get_device)  # as where none is found
    get_device.cache_clear()
    with pytest.raises(ConfigError, match=r"sssd cannot start: No accelerator.* SGLANG_PLATFORM=freedraft_cpu"):
        resolved(device=None)
    with pytest.raises(RuntimeError, match="No accelerator"):
        resolved(device=None, speculative_algorithm=None)
    (line,) = settings()
    assert "SGLANG_PLATFORM=freedraft_cpu" in line


SIZES = dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16)
SIZES |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8)
ATTENTION = {
    "plain": {},
    "windows": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 16},
    "chunks": {"attention_chunk_size": 64},
    "latent": {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"} | SIZES,
}


@pytest.mark.parametrize(
    ("attention", "shapes"),
    [
        ("plain", {"triton": "tree", "flashinfer": "tree", "fa3": "tree", "torch_native": "tree", "fa4": "chain"}),
        ("windows", {"triton": "chain", "flashinfer": None, "fa3": "tree", "trtllm_mha": "chain", "flashmla": None}),
        ("chunks", {"triton": None, "flashinfer": None, "fa3": None, "torch_native": "tree", "trtllm_mha": None}),
        ("latent", {"triton": "tree", "flashinfer": "chain", "fa3": "tree", "trtllm_mla": "chain", "fa4": None}),
    ],
)
def test_what_attention_verifies(weightless, tmp_path, attention, shapes):
    """As SGLang's ModelConfig tells the kinds of attention apart."""
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig
    from sglang.srt.model_executor.model_runner_components.load_model_utils import resolve_sliding_window_size

    changed = json.loads((weightless / "config.json").read_text()) | ATTENTION[attention]
    (tmp_path / "config.json").write_text(json.dumps(changed))
    config = ModelConfig(str(tmp_path))
    window = 15 if attention == "windows" else resolve_sliding_window_size(object(), config)
    assert (config.attention_arch == AttentionArch.MLA) == (attention == "latent")
    if attention in ("windows", "latent"):
        with pytest.raises(ConfigError, match=r"on attention backend fa3 and KV pages of 64 tokens.*: (use|start)"):
            shape_for("sssd", "fa3", config, window, 64)
        shapes |= {"triton": shape_for("sssd", "triton", config, window, 64)}
    for backend, shape in shapes.items():
        if shape is not None:
            assert shape_for("sssd", backend, config, window) == shape
            continue
        with pytest.raises(ConfigError, match=rf"--speculative-algorithm sssd .* {backend}.*: (use|start)"):
            shape_for("sssd", backend, config, window)
    with pytest.raises(ConfigError, match="dsa"):
        shape_for("sssd", "dsa", config, window)


def test_widths():
    assert widths_for("triton", 16) == widths_for("fa3", 16) == (1, 4, 16)
    assert widths_for("flashinfer", 12) == (1, 4, 12) and widths_for("fa3", 64) == (1, 4, 16, 64)
    assert widths_for("torch_native", 5) == (1, 2, 3, 4, 5)
    assert all(widths_for(backend, 16)[0] == 1 for backend in BACKENDS), "what fails leaves the roots"
    assert widths_for("triton", 16, together=True) == widths_for("torch_native", 16, together=True) == (16,)
    assert widths_for("triton", 16, adapters=True) == (16,) and len(widths_for("torch_native", 5, adapters=True)) == 5


def test_a_wrong_option_ends_the_start_in_one_line(resolved, monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("FREEDRAFT_POLCY", "auto")
    with pytest.raises(ConfigError, match="did you mean FREEDRAFT_POLICY") as refused:
        resolved(**ON_GPU | {"attention_backend": "triton"})
    sys.excepthook(refused.type, refused.value, refused.tb)
    assert capsys.readouterr().err == f"freedraft: {refused.value}\n"


def test_all_hooks_are_there():
    from freedraft.engines.sglang.hooks import HOOKS, MODEL_HOOKS, OPTIONAL_HOOKS

    assert check(HOOKS + MODEL_HOOKS + OPTIONAL_HOOKS) == []


def test_the_source_tells_what_the_installed_engine_tells():
    """As `tests.support.versions` reads wheels that are not installed."""
    from importlib.util import find_spec

    from tests.support.versions import Source, parts

    root = Path(find_spec("sglang").origin).parent
    texts = {str(path.relative_to(root.parent)): path.read_text() for path in root.rglob("*.py")}

    source, hooks = Source(texts), [hook for table in parts("sglang").values() for hook in table]
    assert [found for hook in hooks if (found := source.problem(hook)) is not None] == []
    texts["sglang/srt/arg_groups/fields/spec.py"] = ""
    found = Source(texts).problem(next(hook for hook in hooks if "speculative_attention_mode" in hook.members))
    assert "ServerArgs has no" in found and "speculative_attention_mode" in found


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


ON_HEAD = ON_GPU | {"speculative_algorithm": "sssd+eagle3"}


@pytest.fixture
def with_heads(resolved, weightless, tmp_path, monkeypatch):
    """As `resolved`, where SGLang runs drafters, with one."""
    from freedraft.engines.sglang_cpu.platform import CpuTreePlatform

    def resolve(vocab_size=64, **changed):
        config = json.loads((weightless / "config.json").read_text())
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "vocab_size": vocab_size}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return resolved(**ON_HEAD | {"speculative_draft_model_path": str(tmp_path)} | changed)

    monkeypatch.setattr(CpuTreePlatform, "supports_speculative_algorithm", lambda *_: True)
    return resolve


def test_on_top_of_a_head(with_heads):
    """Its settings mean what they mean without us; more nodes are those of n-grams."""
    args = with_heads()
    assert args.speculative_algorithm == "EAGLE3" and args.speculative_eagle_topk == 1
    assert (args.speculative_num_steps, args.speculative_num_draft_tokens) == (3, 16)
    assert args.enable_mixed_chunk is False and args.max_running_requests == 48
    args = with_heads(speculative_num_steps=5, speculative_num_draft_tokens=9)
    assert (args.speculative_num_steps, args.speculative_num_draft_tokens) == (5, 9)
    assert with_heads(speculative_algorithm="SSSD+NEXTN").speculative_algorithm == "EAGLE"
    chain = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    assert with_heads(speculative_algorithm="EAGLE3", **chain).speculative_num_draft_tokens == 4


def test_not_where_sglang_runs_no_drafters(resolved, monkeypatch):
    from freedraft.engines.sglang_cpu.platform import CpuTreePlatform

    monkeypatch.setattr(CpuTreePlatform, "supports_speculative_algorithm", lambda *_: False)
    with pytest.raises(ConfigError, match="EAGLE3 speculative decoding is not supported by CpuTreePlatform"):
        resolved(**ON_CPU | {"speculative_algorithm": "sssd+eagle3"})


@pytest.mark.parametrize(
    "changed, reason, remedy",
    [
        ({"speculative_algorithm": "sssd+nonsense"}, "no such drafter", "sssd+eagle3"),
        ({"speculative_algorithm": "sssd+ngram"}, "no such drafter", "sssd+nextn"),
        ({"speculative_algorithm": "layerskip+eagle"}, "only sssd drafts on top", "use sssd+eagle"),
        ({"speculative_eagle_topk": 4}, "chains", "without --speculative-eagle-topk"),
        ({"speculative_num_steps": 0}, "0 draft tokens of the head", "--speculative-num-steps to 1..63"),
        ({"speculative_num_steps": 64}, "64 draft tokens of the head", "--speculative-num-steps to 1..63"),
        ({"speculative_num_draft_tokens": 3}, "3 draft tokens of the head do not go with 3 nodes", "4..64"),
        ({"speculative_num_draft_tokens": 65}, "65 nodes", "4..64"),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle", "without it"),
        ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling", "without it"),
        ({"speculative_draft_model_path": None}, "the model is no drafter", "set --speculative-draft-model-path"),
        ({"vocab_size": 63}, "a vocabulary of 63, the model of 64", "a drafter of this model"),
        ({"attention_backend": "dsa"}, "attention backend dsa", "--attention-backend"),
        ({"pp_size": 2}, "pipeline parallelism", "--tp-size"),
        ({"disaggregation_mode": "decode"}, "disaggregation", "--disaggregation-mode"),
        ({"tp_size": 2, "attn_dp_size": 2}, "DP attention", "--attn-dp-size"),
    ],
)
def test_refused_on_top_of_a_head(with_heads, changed, reason, remedy):
    with pytest.raises(ConfigError) as error:
        with_heads(**changed)
    assert reason in str(error.value) and remedy in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, value", [("FREEDRAFT_SHAPE", "tree"), ("FREEDRAFT_RECYCLE", "on"), ("FREEDRAFT_NGRAM_TOKENS", "9")]
)
def test_options_that_do_not_go_on_top_of_a_head(with_heads, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name.removeprefix("FREEDRAFT_").lower()):
        with_heads()
