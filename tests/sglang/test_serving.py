"""Corpora over SGLang's calls, a source that fails, and the real model."""

from __future__ import annotations

import pytest

from tests.sglang.conftest import read_counts, sglang_engine

WORDS = [" the", " of", " and", " a", " to", " in", " is", " was", " for", " on", " with", " as", " by", " at"]


@pytest.fixture(scope="module")
def words(demo):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    ids = [tokenizer.encode(word, add_special_tokens=False) for word in WORDS]
    assert all(len(i) == 1 for i in ids)
    return [i[0] for i in ids]


def call(engine, coroutine):
    return engine.loop.run_until_complete(coroutine)


def test_corpora(tiny, words):
    """Added over SGLang's own call, a corpus is drafted from; removed, it is not."""
    from sglang.srt.managers.io_struct import AddExternalCorpusReqInput

    # Only words that tokenise back to themselves, so that the answer can be given as a document.
    sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True, "logit_bias": {str(t): 1e4 for t in words}}
    with sglang_engine(tiny, speculative_algorithm="sssd", speculative_num_draft_tokens=8) as engine:
        manager = engine.tokenizer_manager

        def answer():
            output = engine.generate("one two three four", sampling)
            return output["output_ids"], output["text"], output["meta_info"]["spec_accept_length"]

        tokens, text, before = answer()
        added = call(engine, manager.add_external_corpus(AddExternalCorpusReqInput(corpus_id="c", documents=[text])))
        assert added.success, added.message
        assert added.loaded_token_count == 60
        again = call(engine, manager.add_external_corpus(AddExternalCorpusReqInput(corpus_id="c", documents=["x"])))
        assert not again.success and "already" in again.message
        empty = call(engine, manager.add_external_corpus(AddExternalCorpusReqInput(corpus_id="e", documents=[])))
        assert not empty.success and "no token" in empty.message
        assert call(engine, manager.list_external_corpora()).corpus_token_counts == {"c": 60}
        same, _, during = answer()
        assert same == tokens
        assert during > before + 0.5, "the corpus is not drafted from"
        assert call(engine, manager.remove_external_corpus("c")).success
        missing = call(engine, manager.remove_external_corpus("c"))
        assert not missing.success and "no corpus 'c'" in missing.message
        same, _, after = answer()
        assert same == tokens and after == before


def test_real_model(demo, tmp_path):
    """Twelve prompts to the demo model: the same tokens, and some drafts accepted."""
    greedy = {"temperature": 0, "max_new_tokens": 24}
    prompts = [
        "The capital of France is",
        "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
        "Repeat after me: the quick brown fox. The quick brown fox. The quick",
        "1, 2, 3, 4, 5, 6,",
        "Water is made of",
        "Once upon a time",
        "SELECT name FROM users WHERE",
        "The opposite of hot is",
        "import os\nimport sys\nimport",
        "A list of fruits: apple, banana,",
        "Dear Sir or Madam,",
        "To be or not to be, that is",
    ]
    common = {"max_running_requests": 12, "max_total_tokens": 4096}
    with sglang_engine(demo, **common) as engine:
        expected = [o["output_ids"] for o in engine.generate(prompts, greedy)]
    counts = tmp_path / "counts.json"
    with sglang_engine(demo, counts, speculative_algorithm="sssd", speculative_num_draft_tokens=8, **common) as engine:
        assert [o["output_ids"] for o in engine.generate(prompts, greedy)] == expected
    done = read_counts(counts)
    assert done["tokens"] > 1.05 * done["request_steps"]


def test_bad_options_stop_the_start(tiny):
    """In the front-end process, before a scheduler starts: quick, and the reason is the exception's text."""
    with (
        pytest.raises(Exception, match="no hardware profile 'abacus'"),
        sglang_engine(tiny, env={"FREEDRAFT_HARDWARE": "abacus"}, speculative_algorithm="sssd"),
    ):
        pass
    with (
        pytest.raises(Exception, match="sssd cannot verify trees on attention backend triton"),
        sglang_engine(tiny, speculative_algorithm="sssd", attention_backend="triton"),
    ):
        pass
