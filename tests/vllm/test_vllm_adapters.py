"""Requests of LoRA adapters beside others in a real engine."""

import pytest
from vllm_cases import parameters, token_prompts
from vllm_engines import engine, runner_of, settle, spied

from tests.support import prompts
from tests.support.models import continuations, save_adapter

TOKENS, EACH = 30, 6
# On a CPU vLLM gives requests without an adapter, beside others with one, the adapter in the last place: here none.
SETTINGS = {"skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 6, "enable_lora": True, "max_loras": 4}
SETTINGS |= {"max_num_batched_tokens": 256, "enable_prefix_caching": True}
SSSD = {"method": "sssd", "policy": "fixed", "recycle": "off", "live": "store"}
ASKED = parameters(TOKENS, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def adapters(tiny_model, tmp_path_factory):
    """By name; None for the model alone."""
    from vllm.lora.request import LoRARequest

    folder = tmp_path_factory.mktemp("adapters")
    paths = [save_adapter(tiny_model, folder / name, seed) for seed, name in enumerate("ab")]
    return {None: None} | {path.name: LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths, start=1)}


@pytest.fixture(scope="module")
def given():
    return token_prompts(prompts.random_ids([12] * EACH, 24, first=2, seed=9))


def ask_all(llm, given, adapters, sent=None):
    """Answers of the model and of two adapters in turn, six at a time."""
    sampling = parameters(TOKENS, ignore_eos=True, detokenize=False, extra_args=sent)
    asked = [(prompt, lora) for prompt in given for lora in adapters.values()]
    outputs = llm.generate([prompt for prompt, _ in asked], sampling, lora_request=[lora for _, lora in asked],
                           use_tqdm=False)  # fmt: skip
    settle(llm)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def plain(llm, tiny_model, given, adapters):
    """Answers without drafts."""
    answers = ask_all(llm, given, adapters, {"freedraft": "off"})
    assert answers[::3] == continuations(tiny_model, [prompt["prompt_token_ids"] for prompt in given], TOKENS)
    return answers


@pytest.fixture(scope="module")
def llm(tiny_model):
    with engine(tiny_model, speculative_config=SSSD, **SETTINGS) as llm:
        assert runner_of(llm).speculative_config.num_speculative_tokens == 15, "256 tokens for 6 requests hold 41"
        yield llm


def counted(llm, prompt, lora, salt):
    """Draft tokens of one request, and the accepted ones."""
    drafted, accepted = [], []

    def record(step, drafts):
        drafted.append(sum(map(len, drafts)))
        accepted.append(int(step.accepted.sum()))

    with spied(runner_of(llm).drafter, record):
        llm.generate([prompt | {"cache_salt": salt}], ASKED, lora_request=lora, use_tqdm=False)
        settle(llm)
    return sum(drafted), sum(accepted)


@pytest.mark.extended
def test_adapters_answer_as_plain_and_draft_from_their_own_text_only(llm, plain, given, adapters):
    assert len({tuple(answer) for answer in plain}) > 2 * EACH, "the adapters must answer otherwise"
    assert ask_all(llm, given, adapters) == plain
    a, b = adapters["a"], adapters["b"]
    fresh = [counted(llm, given[i], b, f"fresh {i}") for i in range(4)]
    for i in range(4):  # whatever `a` and the model have answered to the same prompt and salt
        counted(llm, given[i], a, f"two {i}")
        counted(llm, given[i], None, f"two {i}")
        assert counted(llm, given[i], b, f"two {i}") == fresh[i]
        assert counted(llm, given[i], b, f"two {i}")[1] >= max(fresh[i][1], TOKENS // 2), "its own text drafts for it"
    from vllm.lora.request import LoRARequest

    moved = LoRARequest("b", 3, a.lora_path)  # another adapter under a name that was in use
    same = counted(llm, given[0], LoRARequest("a", 1, a.lora_path), "moved")
    assert counted(llm, given[0], moved, "two 0") == same
