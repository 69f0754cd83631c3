"""Models and requests that vLLM's tests share."""

import itertools
import json

from layerskip_plugin.skip_set import SkipSet, model_fingerprint
from tests.support import prompts
from tests.support.models import save, tiny_model

TINY = {"vocab_size": 24, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
TINY |= {"max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1}


def save_tiny(family, folder):
    """A random model of that family with a vocabulary of 24 and no tokenizer."""
    return save(tiny_model(family, seed=11, num_hidden_layers=2, **TINY), folder)


def save_sets(model, folder, **skipped):
    """Files of skip sets of this model, by name: of which layers the attention, and of which the MLP."""
    config = json.loads((model / "config.json").read_text())
    paths = {name: folder / f"{name}.json" for name in skipped}
    for name, (attention, mlp) in skipped.items():
        layers, fingerprint = config["num_hidden_layers"], model_fingerprint(config)
        SkipSet(layers, frozenset(attention), frozenset(mlp), fingerprint).save(paths[name])
    return [str(path) for path in paths.values()]


def two_skip_sets(model, folder, **options):
    """Options of a method with one set that skips nothing, and one that does. Without attention the first layer begins
    with its MLP; without MLP the last one of two ends with its attention."""
    sets = save_sets(model, folder, empty=(set(), set()), some=({0}, {1}))
    given = {"method": "layerskip", "num_speculative_tokens": 3, "lookahead": "fixed", "skip_set": sets}
    return given | options


def token_prompts(ids):
    return [{"prompt_token_ids": tokens} for tokens in ids]


def parameters(max_tokens, **arguments):
    """Greedy, unless told otherwise."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=max_tokens, **{"temperature": 0} | arguments)


def generate(llm, prompts, asked):
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, asked, use_tqdm=False)]


def metric(llm, name):
    return sum(m.value for m in llm.get_metrics() if m.name == name)


# One request of the server's: a temperature, a seed, and parameters that vLLM's rejection sampler does not know.
SAMPLED = {"temperature": 0.8, "seed": 7, "top_p": 0.95, "min_p": 0.02, "logit_bias": {28: -2.0}}

SAMPLED_PROMPT = [5, 9, 17, 5, 9, 3, 5, 9, 17, 22, 5, 9]


# What sampled requests ask for besides a temperature and a seed.
ASKED = [
    {},
    {"top_k": 5, "bad_words": ["a", "the"]},
    {"top_p": 0.8, "top_k": 8},
    {"min_p": 0.1},
    {"logit_bias": {3: 2.0, 5: -4.0}, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
    {"min_tokens": 9, "stop_token_ids": [3, 4, 5, 6], "logprobs": 3},
    {"allowed_token_ids": [*range(2, 12)], "presence_penalty": 0.4, "logprobs": 0},
]


# Sampling with seeds, on model runner V2: filters and penalties in turn. vLLM refuses min_p and logit_bias with drafts.
SEEDED_PROMPTS = [*prompts.random_ids([12] * 6, 24, first=2, seed=3), SAMPLED_PROMPT, 4 * [2, 3, 4]]
SEEDS, TEMPERATURES = (1, 2**40 + 3, 77), (0.3, 0.9, 1.3)
FILTERS = [
    {},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_k": 8, "top_p": 0.9},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3},
]


def greedy_case(prompts, tokens=30, *, skip_set="", **more):
    """A case of `serve.py`: greedy answers, drafted with a skip set."""
    asked = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    asked |= {"extra_args": {"skip_set": skip_set}} if skip_set else {}
    return {"prompts": [prompt["prompt_token_ids"] for prompt in prompts], "parameters": asked} | more


def seeded_case():
    """A case of `serve.py`: each eighth of prompts by seeds by temperatures, and a greedy request."""
    product = list(itertools.product(SEEDED_PROMPTS, SEEDS, TEMPERATURES))
    chosen = [(*product[i], FILTERS[i % len(FILTERS)]) for i in range(0, len(product), 8)]
    each = [{"seed": seed, "temperature": warm} | filters for _, seed, warm, filters in chosen]
    return {
        "prompts": [*(prompt for prompt, *_ in chosen), SAMPLED_PROMPT],
        "each": [*each, {"temperature": 0}],
        "parameters": {"max_tokens": 24, "ignore_eos": True},
    }


def recycled(served, answers, given):
    """Compare what a served engine has recycled of each node with greedy answers, which follow the likeliest token.

    Returns:
        How many texts could be compared, and how many there are.
    """
    texts = [(*prompt["prompt_token_ids"], *answer) for prompt, answer in zip(given, answers, strict=True)]
    following = {text[:i]: text[i] for text in texts for i in range(len(text))}
    said = {tuple(text[:-1]): text[-1] for text in served["engine"]["said"]}
    compared = said.keys() & following.keys()
    assert all(said[text] == following[text] for text in compared)
    return len(compared), len(said)


def class_case(lengths=(12, 30, 5, 20), tokens=16, **more):
    """A case of `serve.py` for models of `model_classes`: prompts of these lengths, greedily and with seeds."""
    ids = prompts.random_ids(lengths, 32, first=2, seed=3)
    seeded = [{"temperature": 0.8, "seed": seed, "top_p": 0.95} for seed in range(len(ids))]
    asked = {"prompts": 2 * ids, "each": [{"temperature": 0}] * len(ids) + seeded}
    return asked | {"parameters": {"max_tokens": tokens, "ignore_eos": True}} | more
