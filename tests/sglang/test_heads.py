"""N-grams on top of a drafter that SGLang runs. See `built_head` for the drafters, and `freedraft_sglang_heads` for
what stands in for kernels of GPUs."""

import json
import sys

import pytest

from tests.sglang.conftest import HERE, give_up, ids, read_counts, sglang_engine
from tests.sglang.test_recurrent import INTERPRETED
from tests.sglang.test_tensor_parallel import BINDING
from tests.support.built_head import SGLANG, save_model_and_eagle3, save_model_and_head, save_qwen3_next_with_mtp
from tests.support.models import continuations, save_byte_tokenizer
from tests.support.prompts import random_ids

K, TOKENS = 3, 24
IDS = random_ids([12] * 4, 24, first=2, seed=3)
OFF = {"custom_params": {"freedraft": "off"}}
DEFAULTS = {"TREE_TEST_HEADS": "1", "FREEDRAFT_SCORING": None, "FREEDRAFT_LIVE": None}
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def heads_in_this_process():
    """Where front ends run, which load plugins once."""
    sys.path.append(str(HERE / "plugin"))
    import freedraft_sglang_heads

    freedraft_sglang_heads.take_heads()


def on_top(model, head, algorithm="SSSD+EAGLE", counts=None, env=None, **options):
    options |= {"speculative_algorithm": algorithm, "speculative_draft_model_path": head and str(head)}
    return sglang_engine(model, counts, env=DEFAULTS | (env or {}), **{"skip_tokenizer_init": True} | options)


def verified(outputs):
    """Verifications, and accepted draft tokens."""
    metas = [output["meta_info"] for output in outputs]
    return sum(meta["spec_verify_ct"] for meta in metas), sum(meta["spec_num_correct_drafts"] for meta in metas)


def per_verification(outputs):
    count, accepted = verified(outputs)
    return 1 + accepted / count


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    shape = {"vocab_size": 32, "max_position_embeddings": 512}
    return save_model_and_head(tmp_path_factory.mktemp("built"), 0.3, architecture=SGLANG, **shape)


def test_n_grams_go_on_behind_the_drafts_of_a_head(built, tmp_path):
    """Without them, the head drafts on."""
    with on_top(*built, counts=tmp_path / "counts.json") as engine:
        first, again = (engine.generate(input_ids=IDS, sampling_params=GREEDY) for _ in range(2))
        counts = read_counts(tmp_path / "counts.json")
        off = engine.generate(input_ids=IDS, sampling_params=GREEDY | OFF)
    assert ids(first) == ids(again) == ids(off) == continuations(built[0], IDS, TOKENS)
    assert 2 < per_verification(off) <= per_verification(first) + 0.1
    assert per_verification(off) < 1 + K < per_verification(again), "more than the head can draft"
    assert counts["accepted"] > 20, "of n-grams"
    assert read_counts(tmp_path / "counts.json")["held"] == 0


@pytest.mark.extended
def test_the_head_drafts_what_it_drafts_alone(built):
    with on_top(*built, algorithm="EAGLE", speculative_num_steps=K, speculative_eagle_topk=1,
                speculative_num_draft_tokens=K + 1) as engine:  # fmt: skip
        alone = engine.generate(input_ids=IDS, sampling_params=GREEDY)
    with on_top(*built, env={"FREEDRAFT_POLICY": None}) as engine:
        off = engine.generate(input_ids=IDS, sampling_params=GREEDY | OFF)
        by_default = [engine.generate(input_ids=IDS, sampling_params=GREEDY) for _ in range(2)]
    found = [[output["meta_info"]["spec_verify_ct"] for output in each] for each in (alone, off)]
    assert ids(alone) == ids(off) and found[0] == found[1]
    for each in by_default:
        assert ids(each) == ids(off)


@pytest.mark.extended
def test_eagle_3_on_two_ranks(tmp_path):
    """Drafts are made on each rank, n-grams on the first; all verify the same."""
    shape = {"vocab_size": 32, "max_position_embeddings": 512, "num_key_value_heads": 2}
    model, head = save_model_and_eagle3(tmp_path, 0.2, first=-1, **shape)
    ranks = {"env": {"TREE_TEST_RANKS": str(tmp_path), "SGLANG_CPU_OMP_THREADS_BIND": BINDING}, "tp_size": 2}
    with on_top(model, head, algorithm="sssd+eagle3", **ranks) as engine:
        first, again = (engine.generate(input_ids=IDS, sampling_params=GREEDY) for _ in range(2))
        sampled = engine.generate(input_ids=IDS, sampling_params=GREEDY | {"temperature": 1.0})
    assert ids(first) == ids(again) == continuations(model, IDS, TOKENS)
    assert per_verification(first) > 1.3 and per_verification(again) > 1 + K
    assert all(len(tokens) == TOKENS for tokens in ids(sampled))
    steps = [path.read_text().splitlines() for path in tmp_path.glob("steps-*")]
    accepted = [[json.loads(step)[4:] for step in rank] for rank in steps]
    assert len(accepted) == 2 and accepted[0] == accepted[1] and len(accepted[0]) > 10


@pytest.mark.extended
@pytest.mark.parametrize("nodes", [pytest.param(None, marks=pytest.mark.rare), 8])
def test_an_mtp_layer_of_a_model_with_recurrent_layers(nodes, tmp_path):
    """Which brings it. By default drafts are no longer than the head's, so that no state is added."""
    layers = {"layer_types": 3 * ["linear_attention"], "num_hidden_layers": 3}
    layers["layer_types"][1] = "full_attention"
    model = save_qwen3_next_with_mtp(tmp_path / "model", 0.02, vocab_size=32, **layers)
    wanted = continuations(model, IDS, TOKENS)
    given = {"env": INTERPRETED, "speculative_num_steps": 2, "speculative_num_draft_tokens": nodes}
    with on_top(model, None, algorithm="sssd+nextn", **given) as engine:
        engine.loop.run_until_complete(give_up(engine, IDS, GREEDY | {"max_new_tokens": 60}))
        first, again = (engine.generate(input_ids=IDS, sampling_params=GREEDY) for _ in range(2))
        off = engine.generate(input_ids=IDS, sampling_params=GREEDY | OFF)
    assert ids(first) == ids(again) == ids(off) == wanted
    assert 1.3 < per_verification(off) <= per_verification(first) + 0.1
    if nodes is None:
        assert per_verification(again) <= 3
    else:
        assert per_verification(again) > 1.2 * per_verification(off)


CASES = {
    "seeded": [GREEDY | {"temperature": 0.9, "sampling_seed": i, "top_p": 0.95} for i in range(4)],
    "penalties": [GREEDY | {"frequency_penalty": 0.7}, GREEDY, GREEDY | {"repetition_penalty": 1.3}, GREEDY],
    "bias": [GREEDY | {"logit_bias": {"5": 4.0}}, GREEDY | {"min_new_tokens": 9}, GREEDY | OFF, GREEDY],
    "long": [GREEDY | {"max_new_tokens": 228} for _ in range(4)],
}


@pytest.fixture(scope="module")
def answers(demo_model, tmp_path_factory):
    """What an engine without drafts answers, and where its model and a head are."""
    folder = tmp_path_factory.mktemp("stressed")
    vocab_size = save_byte_tokenizer(folder / "model", (demo_model / "chat_template.jinja").read_text())
    shape = {"vocab_size": vocab_size, "max_position_embeddings": 256}
    built = save_model_and_head(folder, 0.3, architecture=SGLANG, **shape)
    with sglang_engine(built[0], enable_deterministic_inference=True) as engine:
        return built, {name: ask(engine, name) for name in CASES}


def ask(engine, name):
    return engine.generate(
        input_ids=IDS, sampling_params=CASES[name], return_logprob=True, top_logprobs_num=2, logprob_start_len=-1
    )


def logprobs(outputs):
    return [[p for p, *_ in output["meta_info"]["output_token_logprobs"]] for output in outputs]


# With overlap, SGLang counts penalties a step late, and anew after a retraction: these cases are scheduled as plain's.
@pytest.mark.extended
@pytest.mark.parametrize(
    "asked_for, env, options",
    [
        ([*CASES], {}, {"page_size": 16}),
        (
            ["seeded", "long"],
            {"SGLANG_TEST_RETRACT": "1"},
            {"disable_overlap_schedule": True, "chunked_prefill_size": 16, "max_total_tokens": 512},
        ),
    ],
    ids=["overlap, pages", "synchronous, retracted"],
)
def test_answers_are_those_of_an_engine_without_drafts(answers, asked_for, env, options, tmp_path):
    """Through aborts, prompts read in parts and the end of the context."""
    built, expected = answers
    cramped = {"max_total_tokens": 1024, "skip_tokenizer_init": False, "enable_deterministic_inference": True}
    counts = tmp_path / "counts.json"
    with on_top(*built, counts=counts, env=env, **cramped | options) as engine:
        engine.loop.run_until_complete(give_up(engine, IDS, GREEDY | {"max_new_tokens": 200}))
        outputs = [(name, ask(engine, name)) for name in 2 * asked_for]
    for name, found in outputs:
        assert ids(found) == ids(expected[name]), name
        for row, wanted in zip(logprobs(found), logprobs(expected[name]), strict=True):
            assert row == pytest.approx(wanted, abs=1e-4), name
    metas = [output["meta_info"] for _, each in outputs for output in each]
    for counted in ("num_retractions", "cached_tokens"):
        assert (sum(meta[counted] for meta in metas) > 0) == ("SGLANG_TEST_RETRACT" in env), counted
    done = read_counts(counts)
    assert done["held"] == 0 and done["accepted"] > 50
