"""Through one real engine: seeded requests have the tokens of requests without drafts, whatever is drafted; LoRA
adapters; and requests whose clients want no drafts."""

import itertools

import pytest

from tests.sglang.conftest import GREEDY, give_up, make_tiny, read_counts, sglang_engine
from tests.support.models import continuations, save_adapter
from tests.support.prompts import random_ids

# Seeds are heeded by stock SGLang under --enable-deterministic-inference alone, where a request without one has 42, and
# one with min_p ends the server. See the tests' plugin for what it takes on a CPU.
VOCAB, ROWS = 200, 5
SEEDS = (1, 2**40 + 7, None)
# Noise belongs to ranks where some request of a batch has a filter, and to token ids where none has: not to be mixed.
FILTERED = [
    {"temperature": 0.3, "top_k": 20},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.8},
    {"temperature": 0.0},
]
PLAIN = [{"temperature": 0.3}, {"temperature": 0.9}, {"temperature": 1.3}]
ADAPTERS = (None, "a", "b")
OFF = {"freedraft": "off"}


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.extended)])
def seeded(request, tmp_path_factory):
    """An engine, its model, and the file of its counts."""
    folder = tmp_path_factory.mktemp("seeded")
    model = make_tiny(folder / "model", vocab_size=VOCAB, tokenizer=None)
    options = {"speculative_algorithm": "sssd", "speculative_num_draft_tokens": 8, "skip_tokenizer_init": True}
    options |= {"enable_deterministic_inference": True, "disable_overlap_schedule": not request.param}
    options["disable_radix_cache"] = True  # as SGLang does, but for the list of the tests' plugin
    options |= {"enable_lora": True, "lora_backend": "torch_native"}
    options["lora_paths"] = [f"{name}={save_adapter(model, folder / name, seed)}" for seed, name in enumerate("ab")]
    env = {"FREEDRAFT_LIVE": "store", "FREEDRAFT_DATASTORE": str(folder / "store"), "TREE_TEST_ADAPTERS": "1"}
    env["TREE_TEST_PROBABILITIES"] = str(ROWS * VOCAB)  # batches are sampled in parts
    env["TORCHDYNAMO_DISABLE"] = "1"  # SGLang would compile its sampler with a C++ compiler
    with sglang_engine(model, folder / "counts.json", env, **options) as made:
        yield made, model, folder / "counts.json"


def ask(engine, prompts, sampling, extra=None, **keys):
    """Outputs of requests that come together; extra: for the drafter."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling = [each | {"custom_params": extra} for each in sampling]
    request = GenerateReqInput(input_ids=list(prompts), sampling_params=sampling, **keys)
    return engine.loop.run_until_complete(anext(engine.tokenizer_manager.generate_request(request, None)))


def seeded_requests(kinds):
    """(prompt, sampling parameters), those of one seed after those of the other."""
    prompts = random_ids((3, 8, 21, 55, 89), VOCAB)
    for seed, prompt, kind in itertools.product(SEEDS, prompts, kinds):
        yield prompt, {"max_new_tokens": 16, "ignore_eos": True, "sampling_seed": seed} | kind


def answer(engine, given, together, extra=None):
    """Tokens and mean accepted lengths of a tenant's requests, of this many at a time."""
    outputs = []
    for first in range(0, len(given), together):
        outputs += ask(engine, *zip(*given[first : first + together], strict=True), extra, extra_key="tenant")
    return [o["output_ids"] for o in outputs], [o["meta_info"].get("spec_accept_length", 1.0) for o in outputs]


@pytest.mark.parametrize("kinds", [FILTERED, PLAIN], ids=["filters", "no filters"])
def test_seeded_requests_have_the_tokens_of_requests_without_drafts(seeded, kinds):
    """While the drafter learns from their answers: what is drafted changes, and what is said does not."""
    (engine, _, counts), given = seeded, list(seeded_requests(kinds))
    expected, _ = answer(engine, given, 4, OFF)
    of_each_seed = len(given) // len(SEEDS)
    others = sum(a != b for a, b in zip(expected[:of_each_seed], expected[of_each_seed:], strict=False))
    assert others > of_each_seed / 2, "seeds are not heeded"
    together, accepted = answer(engine, given, 4)
    assert together == expected
    prompts, sampling = zip(*given[:4], strict=True)
    beside = engine.loop.create_task(give_up(engine, prompts, [one | {"max_new_tokens": 150} for one in sampling]))
    again, _ = answer(engine, given[::3], 4)
    engine.loop.run_until_complete(beside)
    assert again == expected[::3]
    assert answer(engine, given[1::3], 1)[0] == expected[1::3]
    assert sum(accepted) > 1.2 * len(accepted), "nothing was learned"
    assert read_counts(counts)["most rows sampled"] == ROWS


def test_adapters_answer_as_plain_and_draft_from_their_own_text_only(seeded):
    engine, model, counts = seeded
    given = random_ids([12] * 6, VOCAB, first=2, seed=9)

    def ask_all(extra):
        """The model and two adapters in turn."""
        prompts = [prompt for prompt in given for _ in ADAPTERS]
        outputs = ask(engine, prompts, [GREEDY] * len(prompts), extra, lora_path=[*ADAPTERS] * len(given))
        return [output["output_ids"] for output in outputs]

    def asked(prompt, adapter, salt, extra=None):
        """One answer; draft tokens that were verified for it up to its last steps, and the accepted ones."""
        ask(engine, [prompt], [GREEDY], OFF, cache_salt="what was drafted before is counted")
        before = read_counts(counts)
        (output,) = ask(engine, [prompt], [GREEDY], extra, lora_path=[adapter], cache_salt=salt)
        after = read_counts(counts)
        return output["output_ids"], [after[name] - before[name] for name in ("drafted", "accepted")]

    plain = ask_all(OFF)
    assert len(set(map(tuple, plain))) > 2 * len(given), "the adapters must answer otherwise"
    assert plain[::3] == continuations(model, given, GREEDY["max_new_tokens"]), "of the model alone"
    assert ask_all(None) == plain
    prompt = given[0]
    fresh, taught = asked(prompt, "b", "fresh"), asked(prompt, "a", "one")
    asked(prompt, None, "one")
    assert asked(prompt, "b", "one") == fresh, "whatever others have answered to the same prompt"
    again = asked(prompt, "a", "one")
    assert again[0] == taught[0] and again[1][1] > max(taught[1][1], 20), "its own text drafts for it"
    assert asked(prompt, "a", "one", OFF) == (again[0], [0, 0])
    for extra in ({"freedraft": "of"}, {"freedraft": 0}, {"freedraft": ["off"]}, ["off"], "off", 7):
        assert asked(prompt, "a", "one", extra) == again
