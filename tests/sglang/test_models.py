"""Kinds of models that people serve, through two real engines each: with drafts, in default options, they say what they
say without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sglang.conftest import read_counts, sglang_engine
from tests.support.images import add_torchvision, save_image_model
from tests.support.model_classes import by_class
from tests.support.models import SHAPE, VOCAB_SIZE, save, tiny_model
from tests.support.prompts import random_ids

EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 256}
# Latent attention with experts, of which the first layer has none
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1}
LATENT |= {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
REPEATING = {"query_pre_attn_scalar": 16, "initializer_range": 0.06}  # with more, a token is followed by itself
# SGLang's attention in PyTorch caps nothing; logits are.
CAPPED = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": None, "hidden_act": "gelu_pytorch_tanh"}
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
IMAGES = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}

# Changes of `SHAPE` by family
MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 0, "num_key_value_heads": 4},
    "Qwen3Moe": EXPERTS,
    "GptOss": WINDOWS | {"num_local_experts": 4, "rope_parameters": YARN, "pad_token_id": 0},
    "Gemma3": REPEATING | WINDOWS,
    "Gemma2": REPEATING | WINDOWS | CAPPED,
    "Cohere2": WINDOWS,
    "DeepseekV2": LATENT | {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "scoring_func": "softmax"},
    "DeepseekV3": LATENT | {"topk_method": "noaux_tc", "n_group": 2, "topk_group": 1, "scoring_func": "sigmoid"},
    "Phi3": {"pad_token_id": 0},
    "GPT2": {"num_key_value_heads": 4, "n_inner": 128},
    "Qwen2_5_VL": {"text_config": SHAPE | AXES, "vision_config": IMAGES | {"fullatt_block_indexes": [1]}},
}
ROUNDS = 6

ROOT = Path(__file__).parents[2]
USUAL = dict.fromkeys(("FREEDRAFT_POLICY", "FREEDRAFT_SCORING", "FREEDRAFT_LIVE"))  # not the tests' own
USUAL["TORCHDYNAMO_DISABLE"] = "1"  # SGLang would compile its sampler with a C++ compiler
# Seeds are heeded under deterministic inference alone; the platform has no pool for windows of their own.
OPTIONS = {"enable_deterministic_inference": True, "disable_radix_cache": True, "disable_hybrid_swa_memory": True}
OPTIONS |= {"skip_tokenizer_init": True, "enable_multimodal": False}

PROMPTS = random_ids((5, 23, 40), VOCAB_SIZE)
SAID = {"max_new_tokens": 40, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "top_k": 20}  # with a filter, as greedy ones have: SGLang's noise depends on that
SAMPLING = [SAID | {"temperature": 0}] * 3 + [SAID | SEEDED | {"sampling_seed": seed} for seed in range(6)]


def answers(engine):
    """A greedy one and two with seeds to each prompt, so that drafts branch."""
    outputs = engine.generate(input_ids=PROMPTS * 3, sampling_params=SAMPLING)
    return [output["output_ids"] for output in outputs]


def check_as_plain(model, folder, note, **more):
    """Asked again until whole answers are drafted; in trees, of which accepted nodes are moved."""
    saved, counts, given = save(model, folder / "model"), folder / "counts.json", OPTIONS | more
    with sglang_engine(saved, env=USUAL, **given) as engine:
        expected = answers(engine)
    assert len({*map(tuple, expected)}) > 2 * len(PROMPTS), "seeds are not heeded"
    with sglang_engine(saved, counts, USUAL, **given, speculative_algorithm="sssd") as engine:
        for _ in range(ROUNDS):
            assert answers(engine) == expected
            done = read_counts(counts)
            if done["accepted"] > 100 and done["compacted"]:
                note("drafts", f"{done['accepted']}/{done['drafted']}")
                return
    raise AssertionError(f"hardly anything was drafted: {done}")


@pytest.mark.parametrize("family", by_class(MODELS, ["DeepseekV3"]))
def test_says_what_it_says_without_drafts(tmp_path, family, record_property):
    check_as_plain(tiny_model(family, seed=5, **MODELS[family]), tmp_path, record_property)


@pytest.mark.extended
@pytest.mark.rare
def test_a_quantised_kv_cache(tmp_path, record_property):
    check_as_plain(tiny_model(seed=5), tmp_path, record_property, kv_cache_dtype="fp8_e5m2")


@pytest.mark.extended
def test_images(tmp_path, monkeypatch, record_property):
    """Asked again until whole answers are drafted."""
    add_torchvision(monkeypatch)
    command = [sys.executable, "-m", "tests.sglang.images", str(save_image_model(tmp_path / "model")), "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["drafted"] == [found["plain"]] * 4
    assert found["plain"][0] != found["plain"][-1], "another image has the same answer"
    assert found["accepted"] > 200
    record_property("drafts", f"{found['accepted']}/{found['proposed']}")
