"""What every engine promises, of SGLang: one engine, cramped, with all methods, and what SGLang alone has."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from layerskip_plugin.calibrate.knn import fit
from layerskip_plugin.selection.knn import ALL_DOMAINS, Domains
from layerskip_plugin.skip_set import SkipSet
from tests.sglang.conftest import sglang_engine
from tests.sglang.served import OnSglang
from tests.support.conformance import (
    BIAS,
    CONTEXT,
    FEW,
    PROMPTS,
    SAMPLES,
    SETS,
    TOKENS,
    Conformance,
    greedy,
    make_model,
    methods,
)
from tests.support.distributions import assert_distribution, enumerate_outputs
from tests.support.waiting import wait_until

ALONE = {"method": "sssd", "policy": "fixed", "live": "off"}
SEARCHING = {"method": "layerskip_watched", "search_share": 0.5, "lookahead": "fixed", "length": 3}


def more_methods(folder, states):
    """Those of SGLang's tests. states: of the prompts, of which every second one makes a domain with the others."""
    of_domains = [SkipSet.load(folder / f"{name}.json") for name in ("weak", "mixed", "empty")]
    fit([states[::2], states[1::2]], ["even", "odd"], of_domains, max_anchors=99).save(folder / "file.knn", {})
    watched = {"method": "layerskip_watched", "skip_set": [str(folder / f"{name}.json") for name in SETS]}
    return {
        "cycle": {"method": "sssd_cycle"},
        "wild": {"method": "wild"},
        "alone": ALONE | {"recycle": "off"},
        "recycling": ALONE | {"recycle": "on"},
        "trees": watched | {"lookahead": "fixed", "length": 3},
        "chains": watched | {"lookahead": "fixed", "length": 3, "shape": "chain"},
        "uneven": watched | {"lookahead": "confidence", "threshold": 0.4, "window": 40, "sinks": 16},
        "swift": SEARCHING | {"selection": "swift", "skip_ratio": 0.3},
        "knapsack": SEARCHING | {"selection": "knapsack"},
        "knn": SEARCHING | {"selection": "knn", "selection_file": str(folder / "file.knn")},
    }


@torch.inference_mode()
def states_of(model, tokens):
    """float [n, H], behind each token."""
    return model.model(torch.tensor([tokens])).last_hidden_state[0].numpy()


@pytest.fixture(
    scope="module",
    params=[
        ("Llama", {"page_size": 16, "disable_overlap_schedule": False}),
        pytest.param(
            ("Qwen3", {"page_size": 16, "disable_overlap_schedule": True, "grammar_backend": "llguidance"}),
            marks=pytest.mark.extended,
        ),
    ],
    ids=["overlap, pages", "Qwen3, sync, pages, llguidance"],
)
def served(request, demo_model, tmp_path_factory):
    kind, options = request.param
    folder = make_model(tmp_path_factory.mktemp("model"), demo_model, kind)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    states = np.stack([states_of(model, prompt)[-1] for prompt in PROMPTS[:12]])
    (folder / "methods.json").write_text(json.dumps(methods(folder) | more_methods(folder, states)))
    overlap = not options["disable_overlap_schedule"]
    options = options | {
        "speculative_algorithm": "switched",
        "speculative_num_draft_tokens": 8,
        "context_length": CONTEXT,
    }
    options |= {"chunked_prefill_size": 32, "max_total_tokens": 4096, "max_running_requests": 8}
    options |= {"enable_return_hidden_states": True, "enable_custom_logit_processor": True}
    env = {"FREEDRAFT_PARTS": str(folder / "methods.json"), "FREEDRAFT_WINDOW": "40", "LAYERSKIP_TEST_LOG": str(folder)}
    env["SGLANG_TEST_RETRACT_INTERVAL"] = "3"  # as if the KV pool were full, where requests are called `crowded`
    if overlap:  # as on a GPU: a few widths, each with graphs of its own
        env["TREE_TEST_WIDTHS"] = "1,2,4,8"
    with sglang_engine(folder, folder / "counts.json", env, **options) as engine:
        yield OnSglang(engine, folder, model, states, overlap)


class TestSglang(Conformance):
    def test_requests_aborted_while_thrown_out_are_forgotten(self, served):
        """SGLang does not tell of them: they are forgotten once far more are known than can run."""
        served.abort_all(PROMPTS[:4], "fixed", thrown_out=True)
        assert served.read()["held"] >= 4
        served.one_more("sweep", "fixed")
        wait_until(lambda: served.read()["held"] == 0)
        assert served.ask(PROMPTS[:4], greedy(), method="passes") == served.expected[:4]

    def test_accepted_nodes_of_trees_are_moved(self, served):
        """At widths that change with every step."""
        before = served.counts()
        for _ in range(3):
            assert served.ask(PROMPTS, greedy(), method="cycle") == served.expected
        done = served.counts() - before
        assert done["compacted"] > 5 and sum(name.startswith("width") for name in done) >= 3, done

    @pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}], ids=str)
    def test_samples_of_random_trees(self, served, filters):
        """Of as good as six tokens."""
        before, each = served.counts(), greedy(3, temperature=2.0, logit_bias=BIAS) | filters
        outputs = served.ask(PROMPTS[3:4] * SAMPLES, each, method="wild")
        kept = {"top_k": len(FEW), "top_p": 1.0} | filters
        expected = enumerate_outputs(served.folder, PROMPTS[3], 3, temperature=2.0, bias=BIAS, **kept)
        assert_distribution([*map(tuple, outputs)], expected)
        done = served.counts() - before
        assert done["compacted"] > 20 and (done["accepted"] > SAMPLES // 8 or not served.counts_ends)

    def test_recycles_for_its_tenant(self, served):
        """The logits at verified nodes serve later requests of the tenant, with nothing learnt from the answers."""

        def accepted(salt):
            before = served.counts()["accepted"]
            assert served.ask(PROMPTS[3:7], greedy(), method="recycling", salt=salt) == served.expected[3:7]
            return served.counts()["accepted"] - before

        first = accepted("one")
        assert accepted("one") > first + 10 and accepted("two") < first + 5

    @pytest.mark.parametrize(
        ("method", "extra"),
        [
            ("chains", {"skip_set": "empty", "nodes": True}),
            ("trees", {"skip_set": "weak"}),
            ("uneven", {"skip_set": "mixed"}),
        ],
        ids=["as one node", "trees", "window"],
    )
    def test_draft_passes_write_their_own_slots(self, served, method, extra):
        """Passes as verifications of one node are those of which CUDA graphs are captured."""
        before = served.counts()
        with served.watched() as noted:
            assert served.ask(PROMPTS, greedy(extra=extra), method=method) == served.expected
        assert noted["written"] > 100 and (noted["branches"] > 0) == (method != "chains")
        done = served.counts() - before
        assert (done["drafted"] == done["accepted"] > 100) == (method == "chains")
        if method == "uneven":  # a page or two of sinks, and the newest, of up to 190 tokens
            assert noted["uneven"] > 5, "all requests drafted equally far"
            assert noted["passes"] > 50 and not noted["passes that read more than 80 tokens"]

    @pytest.mark.parametrize(("method", "name"), [("trees", "mixed"), ("chains", "weak")])
    def test_committed_kv_is_what_it_is_without_drafting(self, served, method, name):
        """The same trees verified once after draft passes and once without any: the KV of all committed tokens is the
        same bit for bit, at every step."""
        for word in ("record", "replay"):
            served.forget_prefixes()
            asked = greedy(extra={"skip_set": name, word: method})
            assert served.ask(PROMPTS[9:10], asked, method=method) == served.expected[9:10]
        served.settle()
        seen = served.read("watched.json")["kv"]
        assert len(seen[method]) >= 8 and seen[method] == seen[f"{method} replayed"]

    @pytest.mark.parametrize("method", ["swift", "knapsack"])
    def test_searches_while_it_serves(self, served, method):
        with served.watched() as noted:
            for _ in range(40):  # for a share of the time, which is longer on a slow machine
                assert served.ask(PROMPTS[:12], greedy(), method=method) == served.expected[:12]
                found = served.read("watched.json")[f"sets of {'swift' if method == 'swift' else 'knapspec'}"]
                if len(found) > 1:
                    break
        assert len(found) > 1, "the set never changed: the test does not test that"
        assert noted["searches"] == noted["searches as in one pass"] >= (method == "knapsack")

    def test_knn_routes_by_the_hidden_state_of_the_prompt(self, served):
        """Also of prompts that are read in chunks; a request keeps its set."""
        each = [greedy(extra={"name": str(i)}) for i in range(12)]
        with served.watched() as noted:
            assert served.ask(PROMPTS[:12], each, method="knn") == served.expected[:12]
        seen = served.read("watched.json")
        for i, state in enumerate(served.states):
            assert seen["states"][str(i)] == pytest.approx(state, abs=1e-3 * float(np.abs(state).max()))
        domains = Domains.load(served.folder / "file.knn")
        expected = [(*domains.names, ALL_DOMAINS)[place] for place in domains.route(served.states)]
        assert [seen["first"][str(i)] for i in range(12)] == expected and len({*expected}) > 1
        assert noted["mixed"] > 0, "two domains were never in one batch: the test does not test that"

    def test_prompts_that_are_only_scored(self, served):
        """Under speculation SGLang reads them like any others, with their states, and goes on serving."""
        prompt, labels = PROMPTS[5], [7, 11]
        more = {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [labels]}
        (output,) = served.outputs([prompt], [greedy(0)], method="knn", **more)
        with torch.inference_mode():
            theirs = served.model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)[:, labels]
        rows = output["meta_info"]["input_token_ids_logprobs"][1:]  # nothing is before the first token
        np.testing.assert_allclose([[p for p, *_ in row] for row in rows], theirs, rtol=0, atol=1e-3)
        assert served.ask(PROMPTS[:4], greedy(), method="knn") == served.expected[:4]

    def test_hidden_states(self, served):
        """Before each token of the answer, and before the last one."""
        for which, rows in ((True, TOKENS - 1), ("last", 1)):
            outputs = served.outputs(PROMPTS[3:6], [greedy()] * 3, method="fixed", return_hidden_states=which)
            for prompt, answer, output in zip(PROMPTS[3:6], served.expected[3:6], outputs, strict=True):
                assert output["output_ids"] == answer
                states = np.concatenate([np.ravel(state) for state in output["meta_info"]["hidden_states"]])
                whole = states_of(served.model, prompt + answer)
                found = states.reshape(-1, whole.shape[1])[-rows:]
                np.testing.assert_allclose(found, whole[-rows - 1 : -1], rtol=0, atol=1e-3)

    def test_a_logit_processor(self, served):
        """Its requests have no drafts, the others have."""
        from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

        each = [greedy(extra={"token_ids": list(range(0, 259, 2))}), greedy()]
        processors, before = [DisallowedTokensLogitsProcessor.to_str(), None], served.counts()["accepted"]
        for _ in range(2):
            first, second = served.outputs(PROMPTS[6:8], each, method="fixed", custom_logit_processor=processors)
            assert second["output_ids"] == served.expected[7]
            assert all(token % 2 for token in first["output_ids"])
        assert served.counts()["accepted"] > before

    def test_a_session_goes_on_from_the_end_of_an_answer(self, served):
        """Not from what was accepted behind its stop."""
        answer, more, before = served.expected[8], [7, 8], served.counts()["accepted"]
        for at in [at for at in range(8, TOKENS) if answer[at] not in answer[:at]][:4]:
            session, turn = served.engine.open_session(9999), {}
            for tokens, said in ((PROMPTS[8], answer[: at + 1]), (more, None)):
                asked = greedy(
                    stop_token_ids=[answer[at]] if said else [], ignore_eos=False, extra={"skip_set": "empty"}
                )
                sampling, place = served.sampling(asked, "passes"), {"id": session} | turn
                output = served.engine.generate(input_ids=tokens, sampling_params=sampling, session_params=place)
                assert said in (None, output["output_ids"])
                turn = {"rid": output["meta_info"]["id"]}
            assert output["meta_info"]["prompt_tokens"] == len(PROMPTS[8]) + at + 1 + len(more)
        assert served.counts()["accepted"] > before + 30

    def test_what_sglang_refuses_with_any_speculation(self, served):
        for asked, more in ((greedy(beam_width=2), {}), (greedy(), {"return_sampling_mask": True})):
            with pytest.raises(ValueError, match="not supported with speculative decoding"):
                served.outputs(PROMPTS[:1], [asked], method="fixed", **more)
        assert served.ask(PROMPTS[:1], greedy(), method="fixed") == served.expected[:1]

    def test_corpora(self, served):
        """Added over SGLang's own call, a corpus is drafted from; removed, it is not."""
        from sglang.srt.managers.io_struct import AddExternalCorpusReqInput

        tokenizer = AutoTokenizer.from_pretrained(served.folder)
        letters = tokenizer("".join(chr(i) for i in range(97, 123)))["input_ids"]

        def accepted():
            before, asked = served.counts()["accepted"], greedy(logit_bias=dict.fromkeys(letters, 1e4))
            (answer,) = served.ask([letters[:20]], asked, method="alone", salt="corpora")
            return answer, served.counts()["accepted"] - before

        answer, before = accepted()
        said = tokenizer.decode(answer)
        for name, documents, refused in (("c", [said], None), ("c", ["x"], "already"), ("e", [], "no token")):
            request = AddExternalCorpusReqInput(corpus_id=name, documents=documents)
            added = served.run(served.manager.add_external_corpus(request))
            assert added.success == (refused is None) and (refused or "") in added.message, added.message
        assert served.run(served.manager.list_external_corpora()).corpus_token_counts == {"c": len(answer)}
        same, during = accepted()
        assert same == answer and during > before + 5, "the corpus is not drafted from"
        assert served.run(served.manager.remove_external_corpus("c")).success
        missing = served.run(served.manager.remove_external_corpus("c"))
        assert not missing.success and "no corpus 'c'" in missing.message
        assert accepted() == (answer, before)
