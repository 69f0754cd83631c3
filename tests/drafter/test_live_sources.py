"""SSSD as an engine sees it, without one: what it learns and for whom, tokens that it missed, policies, and the sources
of draft tokens."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY
from transformers import LlamaConfig

from freedraft.cost.auto import Auto
from freedraft.cost.controller import FullLength, Knee
from freedraft.draft import DraftBatch
from freedraft.step import TOP_TOKENS, EngineContext, NodeLogits
from freedraft.tenants import parse_tenant, tenant_key
from sssd_plugin.method import SssdMethod
from sssd_plugin.options import SssdOptions
from sssd_plugin.sources import SOURCES
from tests.support.steps import make_step
from tests.support.stores import int32

VOCAB, NODES = 200, 8


CONFIG = LlamaConfig(vocab_size=VOCAB)


def method(widths: tuple[int, ...] | None = (1, NODES), **options: Any) -> SssdMethod:
    context = EngineContext(hf_config=CONFIG, vocab_size=VOCAB, max_draft_tokens=NODES - 1, widths=widths)
    return SssdMethod(SssdOptions(**({"policy": "fixed", "live": "store"} | options)), context)


def draft(method: SssdMethod, name: str, text: list[int], gained: list[int]) -> list[int]:
    """The tokens drafted for a request behind `text`, the end of which it has just gained."""
    tree = method.draft(make_step([name], [gained], capacities=NODES - 1, trees=True, texts=[text]))
    return tree.tokens[0, 1 : tree.counts[0]].tolist()


def serve(method: SssdMethod, name: str, prompt: list[int], output: list[int], key: str | None = None) -> list[int]:
    """Run a request to its end; the tokens drafted behind its prompt and first token."""
    method.begin(name, np.array(prompt, np.int32), key, {})
    drafted = [draft(method, name, prompt + output[: i + 1], output[i : i + 1]) for i in range(len(output))]
    method.finish(name, np.array(output, np.int32))
    return drafted[0] if drafted else []


def test_requests_that_are_not_chosen_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as undrafted for their cost, and the others get the same drafts."""
    one, text = method(live="off"), [1, 2, 3, 4, 5, 6] * 4
    step = make_step(["a", "b", "c"], [[6]] * 3, capacities=[7, 7, 0], trees=True, texts=[text] * 3)
    assert one.draft(step).counts.tolist() == [8, 8, 0]
    monkeypatch.setattr(one.controller, "chosen", np.array([False, True, True]))
    assert one.draft(step).counts.tolist() == [0, 8, 0]
    assert one.unmatched.tolist() == [False, False, False] and step.capacities.tolist() == [7, 7, 0]
    one.close()


def test_it_learns_from_finished_requests() -> None:
    one = method(isolation="shared")
    image = [2**31 - 1]  # no token of the vocabulary
    assert serve(one, "a", [1, 2, 3, 150, *range(160, 168)], [10, 11, 12, 13, 14]) == []
    assert serve(one, "b", [5, 6], [10, 11, 12])[:3] == [11, 12, 13]
    assert 150 not in serve(one, "c", [9, 1, 2], [3]), "the prompt before its last tokens"
    assert serve(one, "d", [*image, 165, 166], [167])[:3] == [10, 11, 12], "the last tokens of the prompt lead there"
    assert serve(one, "e", [20, *image, 21], [22, 23, 24]) == []
    assert serve(one, "f", [25, 21], [22])[:2] == [23, 24]
    serve(one, "g", [30, 31], [])
    assert serve(one, "h", [29, 30], [31]) == []
    one.close()


@pytest.mark.parametrize("isolation", ["salt", "strict"])
def test_it_keeps_tenants_apart(isolation: str) -> None:
    """Where some requests carry a salt and others none."""
    one = method(isolation=isolation)
    serve(one, "a", [1, 2], [10, 11, 12, 13], key="x")
    assert serve(one, "b", [3, 4], [10, 11], key="y") == []
    assert serve(one, "c", [3, 4], [10, 15, 16]) == []
    assert serve(one, "e", [3, 4], [10, 15]) == ([15, 16] if isolation == "salt" else []), "of those without a salt"
    assert serve(one, "d", [3, 4], [10, 11], key="x")[:2] == [11, 12]
    assert one.live is not None and one.live.stats().documents == (5 if isolation == "salt" else 3)
    one.begin("i", np.array([9], np.int32), "x", {})  # whose end never came, and an id that comes again
    assert serve(one, "i", [3, 4], [10, 11], key="z") == []
    # What an adapter wrote is for that adapter and salt; under "strict" an adapter alone is nobody.
    for salt, adapter in ((None, "lora"), ("x", "lora")):
        key = tenant_key(salt, None, adapter, "/path")
        assert serve(one, "f", [3, 4], [10, 21, 22], key=key) == []
        expected = [21, 22] if salt or isolation == "salt" else []
        assert serve(one, "g", [3, 4], [10, 21, 22], key=key)[:2] == expected
        assert serve(one, "h", [3, 4], [10], key=tenant_key(salt, None, adapter, "/other")) == []
    one.close()


def test_a_request_that_could_not_begin_shares_nothing() -> None:
    sssd = method()
    serve(sssd, "a", [1, 2], [3, 4, 5, 6])
    assert draft(sssd, "unknown", [1, 2, 3], [3]) == [] and serve(sssd, "b", [1, 2], [3])[:3] == [4, 5, 6]
    sssd.finish("unknown", np.array([3], np.int32))
    assert len(sssd.drafter) == 0
    sssd.close()


def test_a_request_that_cannot_be_learnt_from_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    sssd = method()

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(sssd.live, "insert", fail)
    with pytest.raises(OSError, match="no space"):
        serve(sssd, "a", [1, 2], [3, 4])
    assert len(sssd.drafter) == 0
    sssd.close()


def test_a_retracted_request_is_learnt_from_once(tmp_path: Path) -> None:
    one = method(datastore=tmp_path, isolation="shared")
    one.begin("a", np.array([1, 2], np.int32), None, {})
    draft(one, "a", [1, 2, 10, 11], [10, 11])
    one.begin("a", np.array([1, 2, 10, 11], np.int32), None, {})  # prompt, and output so far
    draft(one, "a", [1, 2, 10, 11, 12], [12])
    one.finish("a", None)  # the engine does not say what it wrote
    one.finish("unknown", None)
    one.finish("a", None)
    assert one.live is not None and one.live.stats().inserted == 5
    one.close()
    again = method(datastore=tmp_path, isolation="shared")
    assert serve(again, "b", [3], [10, 11])[:2] == [11, 12], "on disk, in a folder that began empty"
    again.close()


def test_tenants_have_keys_of_their_own() -> None:
    keys = [tenant_key(*fields) for fields in (("a\nb", None), ("b", "a"), ("a", "b"), ("ab", ""), ("", "ab"), ("a",))]
    keys += [tenant_key(*fields) for fields in (("", "", "a"), ("", "a", "b"), (None, None, "a", "b"))]
    assert len(set(keys)) == 9 and tenant_key(None, None) is tenant_key("", "") is None
    assert parse_tenant("a b") == tenant_key("a b") and parse_tenant('["a", "b"]') == tenant_key("a", "b")
    assert parse_tenant('["a", "", "lora", "/path"]') == tenant_key("a", None, "lora", "/path")
    assert parse_tenant("") is None and parse_tenant("[1]") == tenant_key("[1]")


def test_one_line_says_who_learns_from_whom(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level("INFO")
    for options, words in (
        ({}, "in memory, up to 4,194,304 tokens; isolation 'salt': .*, and so do those without one"),
        ({"live": "store", "datastore": tmp_path}, f"in {tmp_path}, "),
        ({"isolation": "strict"}, "isolation 'strict': .* neither teach nor are taught"),
        ({"isolation": "shared"}, "isolation 'shared': all requests share"),
    ):
        caplog.clear()
        SssdMethod(SssdOptions.parse({"policy": "fixed"} | options), EngineContext(vocab_size=VOCAB)).close()
        (line,) = [r.getMessage() for r in caplog.records if "learning from finished requests" in r.getMessage()]
        assert re.search(words, line)
    assert SssdMethod(SssdOptions.parse({"live": "off"}), EngineContext(vocab_size=VOCAB)).live is None


def test_a_replica_on_another_host_learns_in_memory(tmp_path: Path, monkeypatch, caplog) -> None:
    from sssd_plugin.datastore.live import folder

    one = method(datastore=tmp_path, isolation="shared")
    monkeypatch.setattr(folder, "_host", lambda: b"1 elsewhere")
    context = EngineContext(vocab_size=VOCAB, max_draft_tokens=NODES - 1, widths=(1, NODES), rank=1)
    options = SssdOptions(policy="fixed", live="store", datastore=tmp_path, isolation="shared")
    other = SssdMethod(options, context)
    assert "learns in memory only" in caplog.text
    serve(other, "a", [1, 2], [20, 21, 22])
    assert serve(other, "b", [3, 4], [20, 21])[:1] == [21]
    with pytest.raises(ValueError, match="this host's own"):
        method(datastore=tmp_path, isolation="shared")
    one.close(), other.close()


@pytest.mark.parametrize("live", ["memory", "off"])
@pytest.mark.parametrize("isolation", ["salt", "strict", "shared"])
def test_logits_are_shared_as_texts_are(isolation: str, live: str) -> None:
    """The target's next token behind 2 is 50 + i in the i-th request: which of these does each draft from?"""
    context = EngineContext(vocab_size=VOCAB, max_draft_tokens=NODES - 1, widths=(1, NODES), gives_logits=True)
    options = SssdOptions(policy="fixed", recycle="on", isolation=isolation, live=live)
    one = SssdMethod(options, context)
    lora = tenant_key(None, None, "lora")
    keys = [None, None, "x", "x", "y", lora, lora, tenant_key("x", None, "lora")]
    for i, key in enumerate(keys):
        one.begin(str(i), np.array([1, 2], np.int32), key, {})
        top, log_probs = np.full((1, 1, TOP_TOKENS), -1, np.int32), np.full((1, 1, TOP_TOKENS), -np.inf, np.float32)
        top[..., 0], log_probs[..., 0] = 50 + i, -0.01
        one.recycle(NodeLogits([str(i)], DraftBatch.roots(np.array([2], np.int32)), top, log_probs))
    names = [str(i) for i in range(len(keys))]
    batch = one.drafter.draft(names, max_nodes=2)
    found = [int(batch.tokens[b, 1]) - 50 if batch.counts[b] > 1 else None for b in range(len(keys))]
    newest = {"salt": [1, 1, 3, 3, 4, 6, 6, 7], "strict": [0, 1, 3, 3, 4, 5, 6, 7], "shared": [7] * 8}
    assert found == newest[isolation], "the newest of its tenant"
    one.close()


def test_other_tenants_move_how_much_is_verified_and_nothing_else() -> None:
    """The cost model learns acceptance from all requests, which docs/security.md says."""
    text = np.random.default_rng(3).integers(0, 150, 40).tolist()
    whole, odds = [], []
    for accepts in (None, True, False):
        one = method(policy="fixed" if accepts is None else "auto")
        serve(one, "mine", [160], text, key="b")
        others = np.random.default_rng(4).integers(0, 150, 40).tolist()
        serve(one, "theirs", [161], others, key="a")
        for number in range(0 if accepts is None else 30):
            name, known = str(number), [161, *others[:5]]
            one.begin(name, np.array(known[:-1], np.int32), "a", {})
            drafted = draft(one, name, known, known[-1:])
            gained = others[5 : 5 + max(1, len(drafted))] if accepts else [170]
            draft(one, name, known + gained, gained)
            one.finish(name, None)
        one.begin("x", np.array([160, *text[:4]], np.int32), "b", {})
        whole.append(draft(one, "x", [160, *text[:5]], text[4:5]))
        if accepts is not None:
            odds.append(one.controller.measured.acceptance.odds.copy())
        one.close()
    assert whole[0][:4] == text[5:9]
    assert all(part == whole[0][: len(part)] for part in whole), "the same drafts, some cut short"
    assert not np.array_equal(*odds), "how much of them is verified is learnt from others, too"


PROMPT = [*range(100, 130), 1, 2, 3, *range(100, 110)]


def chain(sssd: SssdMethod, text: list[int]) -> list[int]:
    draft = sssd.draft(make_step(["a"], [text[-1:]], texts=[text]))
    draft.check()
    return draft.chain(0)


def test_tokens_that_it_missed_are_read_from_the_engine() -> None:
    """A step that it was not asked about, a request that it never met, one that was rolled back."""
    sssd, text = method(None), [*PROMPT, 110]
    sssd.begin("a", np.array(PROMPT, np.int32), None, {})
    assert chain(sssd, text) == [*range(111, 118)]
    text += [111, 112, 113]
    assert chain(sssd, text) == [*range(114, 121)], "two of these three tokens came in steps that it did not see"
    assert sssd.drafter.tokens("a").tolist() == text
    text = [*text[:-2], 120]
    assert chain(sssd, text) == [*range(121, 128)], "rolled back"
    assert sssd.drafter.tokens("a").tolist() == text
    fresh = method(None)
    assert chain(fresh, text) == [*range(121, 128)]


@pytest.mark.parametrize(("policy", "knee", "kind"), [(None, None, Auto), (None, 7, Knee), ("fixed", 7, FullLength)])
def test_the_policy_is_auto_or_that_of_a_knee_unless_one_is_given(policy: Any, knee: Any, kind: type) -> None:
    assert type(method(None, policy=policy, knee=knee).controller) is kind


@pytest.mark.parametrize(
    ("recycle", "scoring", "gives_logits", "recycles", "says"),
    [
        ("auto", "learned", True, True, ""),
        ("on", "learned", True, True, ""),
        ("off", "learned", True, False, ""),
        ("auto", "learned", False, False, ""),
        ("on", "learned", False, False, "option 'recycle' is on, but this engine gives no logits"),
        ("on", "paper", True, False, "option 'recycle' is on, but scoring 'paper' takes no logits"),
    ],
)
def test_logits_are_recycled_where_they_come(
    recycle: Any, scoring: Any, gives_logits: bool, recycles: bool, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    context = EngineContext(hf_config=CONFIG, vocab_size=VOCAB, gives_logits=gives_logits)
    sssd = SssdMethod(SssdOptions(recycle=recycle, scoring=scoring), context)
    assert sssd.needs_logits == recycles == (len(sssd.drafter._entries) > 0)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == bool(says) and all(says in line for line in warned)


def counted(name: str) -> Counter[str]:
    values = {s: REGISTRY.get_sample_value(f"freedraft_sourced_{name}_total", {"source": s}) or 0 for s in SOURCES}
    return Counter({source: int(value) for source, value in values.items()})


STORED, OWN = int32([*range(80, 100)]), [*range(100, 120), *range(100, 104)]


@pytest.mark.parametrize("place", ["behind a match of one token", "behind many"])
@pytest.mark.parametrize(
    ("source", "scoring"),
    [*((source, "learned") for source in SOURCES[:-1]), ("request", "paper"), ("datastore", "paper")],
)
def test_tokens_are_counted_by_where_they_come_from(scoring: Any, source: str, place: str) -> None:
    """Those that were verified, of which the engine may leave out the last, and those that were accepted."""
    sssd, extra = method(None, scoring=scoring, live="memory"), {}
    before = [150] if source != "prediction" else [150, 151, 152]
    text = OWN if source == "request" else [*before, *STORED[: 4 if place == "behind many" else 1].tolist()]
    if source == "datastore":
        sssd.add_corpus("c", [STORED])
    elif source == "learnt":
        sssd.begin("b", int32([1, 2]), None, {})
        sssd.finish("b", STORED)
    elif source == "running":
        for name, prompt in (("b", STORED), ("c", int32([1, 2]))):
            sssd.begin(name, prompt[:1], None, {})
            sssd.draft(make_step([name], [prompt[1:].tolist()], texts=[prompt.tolist()]))
        assert sssd._running is not None
        sssd._running.gained(1 << 10, sssd._begun)
        assert sssd.live is not None and sssd.live.runs.settle()
    elif source == "prediction":
        extra = {"prediction": STORED[len(text) - 4 :].tolist()}
    sssd.begin("a", int32(text[:-1]), None, extra)
    known, drafted = (counted("draft_tokens"), counted("tokens")), chain(sssd, text)
    text = text + (gained := [*drafted[:3], 199])
    step = make_step(["a"], [gained], drafted=len(drafted) - 1, texts=[text])
    sssd.draft(step)
    sssd.record_acceptance(step)
    assert counted("draft_tokens") - known[0] == Counter({source: len(drafted) - 1}) and len(drafted) > 4
    assert counted("tokens") - known[1] == Counter({source: 3})
    sssd.close()
