"""What every engine promises with every method: one table of methods, of requests, and one set of tests.

The names of parameters are those of vLLM's SamplingParams; "extra" is what clients send to the drafter, and "schema" a
JSON schema.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest

from freedraft.tenants import tenant_key
from layerskip_plugin.skip_set import SkipSet, model_fingerprint
from sssd_plugin.datastore.disk.format import LIVE
from sssd_plugin.datastore.live.folder import FolderLock, LiveManifest
from sssd_plugin.datastore.live.log import Log
from sssd_plugin.datastore.live.maintenance import forget
from tests.support.distributions import assert_distribution, enumerate_outputs
from tests.support.models import continuations, save, save_byte_tokenizer, tiny_model, weaken
from tests.support.prompts import random_ids
from tests.support.waiting import wait_until

LAYERS, CONTEXT, TOKENS = 4, 256, 40
# The last two of the layers hardly change the stream, so that some drafts without them are accepted.
SETS = {"empty": ((), ()), "weak": ((2, 3), (2, 3)), "mixed": ((0, 3), (2,))}
SHAPE = {"intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
OFF = {"freedraft": "off"}
_RANDOM = random_ids((3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 40, 64), 250, first=5)
PROMPTS = [*_RANDOM, *((prompt * 12)[:150] for prompt in _RANDOM[3:6])]
FEW = [30, 31, 32, 33, 34, 35]
BIAS = dict.fromkeys(FEW, 50.0)
SAMPLES = 600
PROPERTIES = {"name": {"enum": ["red", "blue"]}, "age": {"type": "integer", "maximum": 99}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["name", "age"]}


def methods(folder: Path) -> dict[str, dict[str, Any]]:
    """Each method with its default options; and so that it always drafts."""
    skipping = {"method": "layerskip", "skip_set": [str(folder / f"{name}.json") for name in SETS]}
    one_set = {"skip_set": [str(folder / "weak.json")]}
    return {
        "sssd": {"method": "sssd"},
        "layerskip": {"method": "layerskip"} | one_set,
        "both": {"method": "sssd+layerskip"} | one_set,
        "fixed": {"method": "sssd", "policy": "fixed"},
        "passes": skipping | {"lookahead": "confidence", "threshold": 0.0},
        "windows": skipping | {"lookahead": "fixed", "window": 40, "sinks": 16},
        "both, fixed": {"method": "sssd+layerskip", "policy": "fixed", "lookahead": "fixed", "length": 2} | one_set,
        "failing": {"method": "repeat", "fail_every": 60},
        "learning": {"method": "sssd", "policy": "fixed", "recycle": "off", "live": "store"}
        | {"datastore": str(folder / "store")},
    }


def make_model(folder: Path, demo_model: Path, kind: str = "Llama", **changes: Any) -> Path:
    """A random model whose tokens are bytes, its skip sets, and a file of the methods beside it."""
    vocab_size = save_byte_tokenizer(folder, (demo_model / "chat_template.jinja").read_text())
    model = tiny_model(kind, seed=11, num_hidden_layers=LAYERS, vocab_size=vocab_size, **SHAPE | changes)
    weaken(model, range(LAYERS // 2, LAYERS), 0.03)
    save(model, folder)
    for name, (attention, mlp) in SETS.items():
        skip_set = SkipSet(LAYERS, frozenset(attention), frozenset(mlp), model_fingerprint(model.config))
        skip_set.save(folder / f"{name}.json")
    (folder / "methods.json").write_text(json.dumps(methods(folder)))
    return folder


class Served:
    """An engine with all methods, and what the model answers by itself. An engine's file says how it is asked."""

    folder: Path
    expected: list[list[int]]
    least_room = 3  # tokens between a prompt and the end of the context
    counts_ends = True  # whether `counts` has the last step of each request

    def ask(self, prompts: Sequence[list[int]], asked: Any = None, **more: Any) -> list[list[int]]:
        """Tokens of the answers to prompts, all at once. asked: parameters of all, or of each; more: see `answers`."""
        each = [asked or {}] * len(prompts) if isinstance(asked or {}, dict) else asked
        return [tokens for tokens, _ in self.answers(prompts, each, **more)]

    def answers(
        self, prompts: Sequence[list[int]], each: Sequence[dict[str, Any]], *, method: str, salt: str = "a",
    ) -> list[tuple[list[int], list[float]]]:  # fmt: skip
        """Tokens and, where they were asked for, their logprobs."""
        raise NotImplementedError

    def abort(self, prompts: Sequence[list[int]], method: str) -> None:
        """Ask for long answers, and give all requests up in the midst of them."""
        raise NotImplementedError

    def counts(self) -> Counter[str]:
        """Since the start: tokens that were drafted, accepted, cached; preemptions, and failures of the drafter."""
        raise NotImplementedError

    def forget_prefixes(self) -> None:
        raise NotImplementedError

    def crowded(self) -> AbstractContextManager[None]:
        """Fail where no prompt is read in chunks, or nobody is preempted."""
        raise NotImplementedError

    def check_nothing_is_left(self) -> None:
        """Of requests, all of which have ended."""
        raise NotImplementedError


def greedy(tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": tokens, "ignore_eos": True} | more


class Conformance:
    """An engine's file has the fixture `served`."""

    @pytest.mark.parametrize("method", ["sssd", "layerskip", "both", "fixed", "passes", "windows", "both, fixed"])
    def test_answers_are_the_models_own(self, served: Served, method: str) -> None:
        """In chunks, through preemptions and alone. By default a method may find that no draft pays."""
        before, sets = served.counts(), ["weak", "weak", "mixed", "none such", ["weak"]]
        each = [greedy(extra={"skip_set": sets[i % len(sets)]}) for i in range(len(PROMPTS))]
        with served.crowded():
            assert served.ask(PROMPTS, each, method=method) == served.expected
        for i in (0, 9, 13):
            assert served.ask(PROMPTS[i : i + 1], each[i : i + 1], method=method) == served.expected[i : i + 1]
        done = served.counts() - before
        assert method in ("sssd", "layerskip", "both") or done["drafted"] > done["accepted"] > 30, done
        assert method != "both, fixed" or min(done["of n-grams"], done["of passes"]) > 0
        assert not done["failures"]
        served.check_nothing_is_left()

    def test_all_is_accepted_where_nothing_is_skipped(self, served: Served) -> None:
        """The draft model is the model: whatever is wrong with a draft pass shows here."""
        before, asked = served.counts(), greedy(extra={"skip_set": "empty"})
        for some in (slice(0, 4), slice(4, 8), slice(8, 9)):
            assert served.ask(PROMPTS[some], asked, method="passes") == served.expected[some]
        done = served.counts() - before
        assert done["drafted"] == done["accepted"] > 200

    @pytest.mark.parametrize("method", ["fixed", "passes"])
    def test_from_the_prefix_cache(self, served: Served, method: str) -> None:
        served.forget_prefixes()
        before = served.counts()["cached"]
        for _ in range(2):
            assert served.ask(PROMPTS[-3:], greedy(), method=method) == served.expected[-3:]
        assert served.counts()["cached"] > before

    @pytest.mark.parametrize("method", ["fixed", "passes", "both, fixed"])
    def test_aborted_requests_are_forgotten(self, served: Served, method: str) -> None:
        served.abort(PROMPTS[:4], method)
        assert served.ask(PROMPTS[2:6], greedy(), method=method) == served.expected[2:6]
        served.check_nothing_is_left()

    @pytest.mark.parametrize("method", ["fixed", "passes", "windows"])
    def test_to_the_end_of_the_context(self, served: Served, method: str) -> None:
        """Beside a request that has room."""
        rooms = (served.least_room, 9, 30)
        long = [(PROMPTS[-1] * 3)[: CONTEXT - room] for room in rooms]
        expected = continuations(served.folder, long, max(rooms))
        for prompt, room, answer in zip(long, rooms, expected, strict=True):
            asked = [greedy(room), greedy()]
            near, other = served.ask([prompt, PROMPTS[0]], asked, method=method)
            assert near == answer[: len(near)] and len(near) >= room - 2 and other == served.expected[0]

    @pytest.mark.parametrize("method", ["fixed", "both, fixed"])
    @pytest.mark.parametrize(
        "asked",
        [
            {"schema": SCHEMA, "ignore_eos": False},
            {"repetition_penalty": 1.3, "logprobs": 2},
            {"frequency_penalty": 0.8, "presence_penalty": 0.3, "logit_bias": BIAS},
            {"min_tokens": 12, "stop_token_ids": FEW, "logit_bias": BIAS, "ignore_eos": False, "logprobs": 1},
        ],
        ids=["grammar", "repetition", "penalties", "stops"],
    )
    def test_what_changes_the_distribution(self, served: Served, method: str, asked: dict[str, Any]) -> None:
        """As for clients that want no drafts, beside others that do."""
        each = [greedy() | asked] * 3 + [greedy()]
        given = [*PROMPTS[12:], PROMPTS[0]]
        off = served.answers(given, [one | {"extra": OFF} for one in each], method=method)
        before = served.counts()
        for answer, (tokens, logprobs) in zip(served.answers(given, each, method=method), off, strict=True):
            assert answer[0] == tokens
            assert answer[1] == pytest.approx(logprobs, abs=1e-3)
        assert (served.counts() - before)["accepted"] > 0
        assert off[-1][0] == served.expected[0]

    def test_off_for_one_request(self, served: Served) -> None:
        """The other has its drafts, all of which are accepted; its client sends what is no "off"."""

        def drafted(wish: str | list[str]) -> int:
            before, asked = served.counts(), greedy(extra={"skip_set": "empty", "freedraft": wish})
            each = [asked, greedy(extra={"skip_set": "empty"} | OFF)]
            assert served.ask(PROMPTS[:2], each, method="passes") == served.expected[:2]
            return (served.counts() - before)["drafted"]

        assert drafted("off") == 0 < TOKENS // 2 < drafted(["off"]) < TOKENS

    def test_predictions(self, served: Served) -> None:
        """A wrong one changes no answer."""
        answers = served.expected[:3]

        def accepted(salt: str, predictions: list[list[int]]) -> int:
            before, each = served.counts(), [greedy(extra={"prediction": tokens}) for tokens in predictions]
            assert served.ask(PROMPTS[:3], each, method="fixed", salt=salt) == answers
            return (served.counts() - before)["accepted"]

        wrong = accepted("wrong", [answer[::-1] for answer in answers])
        assert accepted("right", answers) > wrong + TOKENS

    def test_samples_have_the_models_distribution(self, served: Served) -> None:
        """Without seeds, with n-grams and draft passes; greedy requests among them stay greedy."""
        setting, before = {"temperature": 1.5, "top_p": 0.95, "top_k": 5}, served.counts()
        each = [greedy(3) | (setting if i % 10 else {}) for i in range(SAMPLES * 10 // 9)]
        outputs = [tuple(tokens) for tokens in served.ask(PROMPTS[3:4] * len(each), each, method="both, fixed")]
        expected = enumerate_outputs(served.folder, PROMPTS[3], 3, **setting)
        assert len(set(outputs[::10])) == 1
        assert_distribution([output for i, output in enumerate(outputs) if i % 10], expected)
        done = served.counts() - before
        assert done["drafted"] > SAMPLES // (2 if served.counts_ends else 3)
        assert 0 < done["accepted"] < done["drafted"] or not served.counts_ends

    def test_a_drafter_that_fails_costs_drafts_and_nothing_else(self, served: Served) -> None:
        before = served.counts()
        # It fails, is tried again after a pause, and leaves others none.
        for name, method in (("failures", "failing"), ("drafted", "failing"), ("drafted", "fixed")):
            for _ in range(9):
                assert served.ask(PROMPTS, greedy(), method=method) == served.expected
                if (served.counts() - before)[name]:
                    break
            done, before = served.counts() - before, served.counts()
            assert done[name], name

    def test_learns_whole_answers_for_their_tenant(self, served: Served) -> None:
        given, said = PROMPTS[3:7], [answer[:30] for answer in served.expected[3:7]]

        def accepted(salt: str) -> int:
            before = served.counts()["accepted"]
            assert served.ask(given, greedy(30), method="learning", salt=salt) == said
            served.check_nothing_is_left()
            return served.counts()["accepted"] - before

        first = accepted("one")
        learnt = [[*prompt[-8:], *answer] for prompt, answer in zip(given, said, strict=True)]
        wait_until(lambda: sorted(on_disk(served.folder)) == sorted(learnt))
        again, other = accepted("one"), accepted("two")
        assert other < first + 5 < again, ("another tenant's", first, again, other)
        wait_until(lambda: len(on_disk(served.folder)) == 3 * len(given))
        gone = forget(served.folder / "store", [str(tenant_key("one"))])
        assert gone.startswith(f"{2 * len(given)} documents, ") and gone.endswith("within a second")
        time.sleep(3)  # servers follow within a second
        assert accepted("one") < first + 5, "forgotten while serving"
        assert accepted("two") > first + 5, "others go on"

    def test_what_stands_behind_a_stop_is_not_learnt(self, served: Served) -> None:
        answer = served.expected[8]
        at = next(i for i in range(8, TOKENS) if answer[i] not in answer[:i])
        asked = greedy(stop_token_ids=[answer[at]], ignore_eos=False)
        for _ in range(2):  # the second time the whole answer is drafted
            assert served.ask([PROMPTS[8]], greedy(), method="learning", salt="stop") == [answer]
            assert served.ask([PROMPTS[8]], asked, method="learning", salt="stop") == [answer[: at + 1]]
        served.check_nothing_is_left()
        for n in (TOKENS, at + 1):
            wait_until(lambda n=n: on_disk(served.folder).count([*PROMPTS[8][-8:], *answer[:n]]) == 2)


def on_disk(folder: Path) -> list[list[int]]:
    """All documents that the engine has learnt."""
    place = folder / "store" / LIVE
    with FolderLock(place) as lock:
        manifest = LiveManifest.of(place)
        assert manifest is not None
        with closing(Log(place, lock, manifest)) as log:
            return [record.tokens.tolist() for record in log.load()]
