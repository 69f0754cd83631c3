"""Learning while serving, through the real engine: more is accepted the second time, and the answers stay the same."""

from __future__ import annotations

from vllm_cases import generate, parameters
from vllm_engines import check_nothing_is_left, engine, runner_of, settle, spied

from tests.support.stores import documents_of

TOKENS = 30


def ask(llm, prompts, salt=None):
    given = [prompt | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
    answers = generate(llm, given, parameters(TOKENS, ignore_eos=True, detokenize=False))
    settle(llm)
    return answers


def learnt_by(method, tenant):
    return [text for run in method.live.runs.tenants[tenant].all_runs for text in documents_of(run.sub)]


def test_embeddings_in_place_of_a_prompt_are_neither_drafted_for_nor_learnt(tiny_model, tiny_answers, live_prompts):
    """vLLM's batch holds tokens of another request where a prompt has none."""
    import torch
    from transformers import AutoModelForCausalLM

    embedding = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).get_input_embeddings()
    given = [dict(prompt) for prompt in live_prompts]
    for i in (1, 4):
        with torch.no_grad():
            given[i] = {"prompt_embeds": embedding(torch.tensor(live_prompts[i]["prompt_token_ids"]))}
    settings = {"skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 4, "enable_prompt_embeds": True}
    method = {"method": "sssd", "num_speculative_tokens": 6, "policy": "fixed"}
    method |= {"live": "store", "isolation": "shared"}
    with engine(tiny_model, speculative_config=method, **settings) as llm:
        proposer = runner_of(llm).drafter
        texts: set[tuple[int, ...]] = set()

        def record(step, drafts):
            texts.update(tuple(step.history(b).tolist()) for b in range(step.batch_size))

        with spied(proposer, record):
            for _ in range(2):
                assert ask(llm, given) == tiny_answers
        known = [
            tuple(prompt["prompt_token_ids"]) + tuple(answer)
            for i, (prompt, answer) in enumerate(zip(live_prompts, tiny_answers, strict=True))
            if i not in (1, 4)
        ]
        # A step may accept tokens beyond the end of an answer.
        assert texts and all(any(whole[: len(text)] == text[: len(whole)] for whole in known) for text in texts)
        learnt = {whole[4:] for whole in known}  # the last 8 of 12 tokens of a prompt, and its answer
        assert set(map(tuple, learnt_by(proposer.guarded.method, 0))) == learnt
        check_nothing_is_left(llm)
        proposer.guarded.close()
