"""Model runner V2: n-grams on top of a drafter that vLLM runs. See `v2_engines`, and `built_head` for the drafters."""

from collections import Counter

import pytest
from v2_engines import OFF, SMALL, run
from vllm_cases import TINY, class_case, greedy_case, seeded_case, token_prompts

from tests.support.built_head import (
    save_model_and_eagle3,
    save_model_and_head,
    save_on_top,
    save_qwen3_next_with_mtp,
)
from tests.support.models import continuations, save_byte_tokenizer
from tests.support.prompts import random_ids

K, TOKENS = 3, 20
IDS = random_ids([12] * 6, 24, first=2, seed=3)
ROOM = SMALL | {"max_num_seqs": 8}
CRAMPED = {"max_num_batched_tokens": 100, "num_gpu_blocks_override": 9, "block_size": 32}
# What a step launches in place of vLLM's verification: its sampler draws all tokens, and they are compared.
SAMPLED, VERIFIED = ["argmax", "gather"], ["_gumbel_sample_kernel", "verify_kernel"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return save_model_and_head(tmp_path_factory.mktemp("built"), 0.3, **TINY)


def on_top(head, **options):
    return {"method": "sssd+eagle", "model": head, "num_speculative_tokens": K, "policy": "fixed"} | options


def alone(head):
    return {"method": "eagle", "model": head, "num_speculative_tokens": K}


def per_verification(found):
    return 1 + found["accepted"] / found["drafts"]


def check_own_drafts(found, stock, least=11):
    """Wherever both have drafted behind the same text, the other drafter has drafted what it drafts alone."""
    known = {tuple(text): draft for text, draft in stock}
    pairs = [(draft, known[tuple(text)]) for text, draft in found if tuple(text) in known]
    assert len(pairs) >= least and [draft for draft, _ in pairs] == [draft for _, draft in pairs]


def check_nothing_is_left(engine):
    assert engine["held"] == [0, 0, 0] and engine["class"] in ("EagleSpeculator", "MTPSpeculator"), "vLLM's own"


@pytest.mark.extended
def test_n_grams_go_on_behind_the_drafts_of_a_head(built):
    model, head = built
    asked = token_prompts(IDS[:3])
    first, off = greedy_case(asked, TOKENS), greedy_case(asked, TOKENS, each=3 * [OFF])
    stock = {"speculative_config": alone(head), "cases": {"first": first}}
    ours = {"speculative_config": on_top(head), "cases": {"first": first, "again": first, "off": off}}
    stock, found = run("on_top.py", [{"model": model, "own": K, **ROOM, **engine} for engine in (stock, ours)])
    wanted = continuations(model, IDS[:3], TOKENS)
    assert stock["first"]["answers"] == found["first"]["answers"] == found["again"]["answers"] == wanted
    assert found["off"]["answers"] == wanted
    for case in ("first", "again", "off"):
        check_own_drafts(found[case]["own drafts"], stock["first"]["own drafts"])
    assert 2 < per_verification(stock["first"]) <= per_verification(found["first"])
    assert per_verification(found["again"]) > 1.3 * (1 + K), "more than the head can draft"
    drafted, accepted = found["again"]["n-grams"]
    assert drafted >= accepted > 30 and found["off"]["n-grams"] == [0, 0]
    assert not any(found[case]["failures"] for case in ("first", "again", "off"))
    check_nothing_is_left(found["engine"])


@pytest.fixture(scope="module")
def stressed(built):
    """Engines with too little room, without drafts, with the head alone, and with n-grams on top of it."""
    model, head = built
    long = token_prompts([8 * tokens for tokens in IDS[:2]])  # together longer than what a step reads
    greedy = greedy_case(token_prompts(IDS), TOKENS)
    cases = {"greedy": greedy, "seeded": seeded_case(), "long": greedy_case(long, 3)}
    more = {"long again": cases["long"], "aborted": greedy | {"abort": 5}, "fails": greedy | {"fails": True}}
    more |= {"seeded, aborted": cases["seeded"] | {"abort": 6}}
    plain = {"model": model, "cases": cases} | ROOM | {"max_model_len": 128}
    room = plain | {"own": K} | CRAMPED
    return run(
        "on_top.py",
        [
            plain,
            room | {"speculative_config": alone(head)},
            room | {"cases": cases | more, "speculative_config": on_top(head)},
        ],
    )


@pytest.mark.extended
def test_answers_are_those_of_an_engine_without_drafts(stressed):
    plain, stock, found = stressed
    for case in ("greedy", "long", "seeded", "long again", "aborted", "fails", "seeded, aborted"):
        assert found[case]["answers"] == plain[case.split(",")[0] if case in plain else CASES[case]]["answers"], case
    assert stock["greedy"]["answers"] == plain["greedy"]["answers"]


CASES = {"long again": "long", "aborted": "greedy", "fails": "greedy", "seeded, aborted": "seeded"}


@pytest.mark.extended
def test_the_head_follows_what_others_have_drafted(stressed):
    """Through preemption, the prefix cache, prompts read in parts, aborts, and a drafter of ours that fails."""
    _, stock, found = stressed
    for case in ("greedy", "aborted", "fails"):
        check_own_drafts(found[case]["own drafts"], stock["greedy"]["own drafts"])
    assert sum(found[case]["preempted"] for case in ("greedy", "aborted", "seeded")) > 0
    assert found["long again"]["cached"] > 0
    assert found["fails"]["failures"] > 0 and found["greedy"]["failures"] == 0
    assert per_verification(found["fails"]) >= per_verification(stock["greedy"]), "the head drafts on"
    check_nothing_is_left(found["engine"])


def more(found, stock, kind):
    """What is launched more often, as often."""
    return sorted((Counter(found[kind]) - Counter(stock[kind])).elements())


@pytest.mark.extended
def test_launches_of_a_step(built):
    """Beside the head's own: tokens go to the host, and n-grams come behind its drafts, where there are any."""
    model, head = built
    engines = [alone(head), on_top(head), on_top(head, ngram_tokens=K), on_top(head)]
    engines = [{"speculative_config": engine, "launches": True} for engine in engines]
    engines[-1]["launches"] = "nothing"
    given = {"model": model, "cases": {}, **ROOM}
    found = run("on_top.py", [given | engine for engine in engines])
    stock, both, short, nothing = (each["engine"]["launches"] for each in found)
    copied = ["newest_tokens_kernel"]
    for found, ours in ((both, ["extend_drafts_kernel", *copied]), (short, copied), (nothing, copied)):
        assert more(found, stock, "kernels") == sorted([*VERIFIED, *ours])
        assert more(found, stock, "eager") == SAMPLED
        assert len(found["kernels"]) <= len(stock["kernels"])


@pytest.mark.extended
def test_lengths_are_learnt_with_the_head_inside(built):
    """Where rows cost little, n-grams go on behind the head as soon as they are right; where they cost much, never, and
    no step waits for them."""
    model, head = built
    case = greedy_case(token_prompts(IDS), 30)
    cases = {"first": case, "again": case, "once more": case}
    given = {"model": model, "cases": cases, "speculative_config": on_top(head, policy="auto"), **ROOM}
    cheap, dear = run("on_top.py", [given | {"seconds": [0.02, 1e-5]}, given | {"seconds": [1e-3, 1e-2]}])
    wanted = continuations(model, IDS, 30)
    for found in (cheap, dear):
        assert [found[name]["answers"] for name in cases] == 3 * [wanted]
        assert 1 < found["engine"]["learnt"][0] < K, "accepted tokens of the head"
    assert per_verification(cheap["once more"]) > 1.15 * per_verification(cheap["first"])
    rows = [found["once more"]["drafted"] / found["once more"]["drafts"] for found in (cheap, dear)]
    assert rows[0] > 2 * K and rows[1] < 1.4 * K, "but for some probes"
    gained, expected = cheap["engine"]["learnt"][1:]
    assert 0 < gained < expected, "both must agree"


@pytest.mark.extended
@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.rare) for kind in ("eagle", "eagle3")), "mtp"])
def test_grammars(kind, tmp_path, demo_model):
    """With one, drafts of both go back to the scheduler, which cuts them."""
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    vocab_size = save_byte_tokenizer(folder, (demo_model / "chat_template.jinja").read_text())
    model, method = save_on_top(kind, tmp_path, 0.1, **TINY | {"vocab_size": vocab_size})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer("red, red, blue, red, red, ")["input_ids"]
    asked = {"temperature": 0, "max_tokens": 16, "structured_outputs": {"choice": ["red, red, red", "blue"]}}
    greedy = greedy_case(token_prompts([text, text[5:]]), 16)
    cases = {"choice": {"prompts": [text, text], "parameters": asked}, "greedy": greedy, "again": greedy}
    cases["print"] = greedy | {"parameters": asked | {"ignore_eos": True, "structured_outputs": {"regex": "[ -~]{16}"}}}
    engine = {"model": model, "cases": cases, "speculative_config": method, "max_num_seqs": 2}
    (found,) = run("on_top.py", [engine | {"max_model_len": 128}])
    for answer in found["choice"]["answers"]:
        assert tokenizer.decode(answer, skip_special_tokens=True) in ("red, red, red", "blue")
    wanted = continuations(model, greedy["prompts"], 16)
    assert found["greedy"]["answers"] == found["again"]["answers"] == wanted
    printed = tokenizer.batch_decode(found["print"]["answers"])
    assert all(len(said) == 16 and said.isascii() and said.isprintable() for said in printed)
    assert found["print"]["accepted"] > 0 < found["again"]["n-grams"][1]
    assert not any(found[case]["failures"] for case in cases)
    check_nothing_is_left(found["engine"])


@pytest.mark.extended
def test_eagle3(tmp_path):
    """Its head reads hidden states of several of the model's layers, and has a vocabulary table of its own."""
    model, head = save_model_and_eagle3(tmp_path, 0.3, **TINY)
    greedy, seeded = greedy_case(token_prompts(IDS[:4]), TOKENS), seeded_case()
    seeded |= {name: seeded[name][:4] for name in ("prompts", "each")}
    cases = {"first": greedy, "again": greedy, "aborted": greedy | {"abort": 5}, "seeded": seeded}
    cases["off"] = greedy_case(token_prompts(IDS[:4]), TOKENS, each=4 * [OFF])
    own = {"model": head, "num_speculative_tokens": K}
    ours = own | {"method": "sssd+eagle3", "policy": "fixed"}
    given = {"model": model, **ROOM, "max_model_len": 128, "own": K}
    few = {name: cases[name] for name in ("first", "seeded")}
    plain, stock, found = run(
        "on_top.py",
        [
            given | {"cases": few, "own": 0},
            given | {"cases": few, "speculative_config": own | {"method": "eagle3"}},
            given | CRAMPED | {"cases": cases, "speculative_config": ours},
        ],
    )  # fmt: skip
    for case in cases:
        assert found[case]["answers"] == plain["seeded" if case == "seeded" else "first"]["answers"], case
    assert stock["first"]["answers"] == plain["first"]["answers"]
    for case in ("first", "again", "off"):
        check_own_drafts(found[case]["own drafts"], stock["first"]["own drafts"])
    assert per_verification(stock["first"]) > 1.2 and found["again"]["n-grams"][1] > 20
    assert sum(found["off"]["below"]) > 0 and found["off"]["n-grams"] == [0, 0]
    assert per_verification(found["again"]) > 1.3 * per_verification(stock["first"])
    check_nothing_is_left(found["engine"])


@pytest.mark.extended
def test_an_mtp_layer_of_a_model_with_recurrent_layers(tmp_path, monkeypatch):
    """By default drafts are no longer than the head's, so that no state is added, and no step waits for n-grams."""
    monkeypatch.setenv("ON_TOP", "1")
    model = save_qwen3_next_with_mtp(tmp_path / "model", 0.2, vocab_size=TINY["vocab_size"])
    first = greedy_case(token_prompts(IDS[:2]), 10)
    own = {"num_speculative_tokens": 2, "policy": "fixed"}
    given = {"model": model, **SMALL, "max_num_seqs": 4, "compilation_config": {"custom_ops": ["-rotary_embedding"]}}
    engines = [({"method": "mtp", "num_speculative_tokens": 2}, {"first": first})]
    engines += [({"method": "sssd+mtp"} | own, {"first": first, "again": first | {"abort": 3}})]
    engines += [({"method": "sssd+mtp", "ngram_tokens": 6} | own, {"first": first, "again": first})]
    engines = [given | {"own": 2, "speculative_config": method, "cases": cases} for method, cases in engines]
    stock, short, longer = run("recurrent.py", engines)
    wanted = continuations(model, IDS[:2], 10)
    for found in (stock, short, longer):
        for case in found.keys() - {"engine"}:
            assert found[case]["answers"] == wanted
            check_own_drafts(found[case]["own drafts"], stock["first"]["own drafts"], least=5)
    assert per_verification(stock["first"]) > 1.3
    assert short["again"]["waited for"] == 0 < longer["again"]["waited for"], (
        "steps before whose launch the host drafts"
    )
    assert short["first"]["accepted"] == stock["first"]["accepted"]
    assert per_verification(longer["again"]) > 1.1 * per_verification(stock["first"])


@pytest.mark.extended
@pytest.mark.rare
@pytest.mark.parametrize(
    ("lengths", "blocks", "counted"), [((118, 110), 21, "preempted"), ((130, 100), 64, "cached")], ids=str
)
def test_states_follow_what_both_have_drafted(lengths, blocks, counted, tmp_path, monkeypatch):
    """Greedily and with seeds, after aborts; without prefix caching in too few blocks for all requests, and with it."""
    monkeypatch.setenv("ON_TOP", "1")
    model = save_qwen3_next_with_mtp(tmp_path / "model", 0.2, vocab_size=32)
    first = class_case(lengths=lengths, tokens=24)
    cases = {"first": first, "again": first, "aborted": first | {"abort": 6}}
    given = {"model": model, "skip_tokenizer_init": True, "max_model_len": 192, "max_num_seqs": 8}
    given |= {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
    ours = {"method": "sssd+mtp", "num_speculative_tokens": 2, "ngram_tokens": 6, "policy": "fixed"}
    few = {"num_gpu_blocks_override": blocks, "enable_prefix_caching": counted == "cached"}
    engines = [{"cases": {"first": first}}, {"cases": cases, "speculative_config": ours, "own": 2} | few]
    plain, found = run("recurrent.py", [given | engine for engine in engines])
    for case in cases:
        assert found[case]["answers"] == plain["first"]["answers"] and not found[case]["failures"], case
    assert sum(found[case][counted] for case in cases) > 0
    assert found["again"]["n-grams"][1] > 20 < sum(n * found["first"]["below"][n] for n in range(3))
    check_nothing_is_left(found["engine"])
