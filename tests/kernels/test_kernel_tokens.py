"""`top_tokens` against a full sort; `newest_tokens` and `extend_drafts` against Python lists."""

import numpy as np
import torch
from freedraft_kernels import top_tokens
from freedraft_kernels.device.extend_drafts import extend_drafts
from freedraft_kernels.device.newest_tokens import newest_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import DEVICE, EXAMPLES, by_each, runs_triton


def random_logits(rows: int, vocab: int, values: int, seed: int) -> torch.Tensor:
    """Of few different values, so that many are equal, with zeros of either sign and infinities among them."""
    rng = np.random.default_rng(seed)
    special = rng.choice([0.0, -0.0, -np.inf, -1e-45, 1e-45], (rows, vocab))
    logits = np.where(rng.random((rows, vocab)) < 0.2, special, rng.integers(-values, values, (rows, vocab)) / 3)
    return torch.tensor(logits, dtype=torch.float32)


def by_sorting(row: list[float], count: int) -> list[int]:
    """The likeliest tokens; none of a row with NaN or +inf."""
    if not all(value < np.inf for value in row):
        return [-1] * count
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    return [token if np.isfinite(row[token]) else -1 for token in order[:count]]


@by_each
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.integers(0, 4),
    st.one_of(st.integers(8, 700), st.sampled_from([1, 7, 63, 64, 65, 4096, 4097, 9000])),
    st.one_of(st.just(1), st.integers(1, 1000)),
    st.integers(1, 8),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 2**32 - 1),
)
def test_top_tokens_are_what_sorting_gives(
    backend: str, device: str, rows: int, vocab: int, values: int, count: int, dtype: torch.dtype, seed: int
) -> None:
    logits, count = random_logits(rows, vocab, values, seed).to(dtype), min(count, vocab)
    if seed % 3 and rows:
        logits[-1] = torch.where(torch.arange(vocab) < seed % 5, logits[-1], -torch.inf)  # few or none
        logits[0, seed % vocab] = [torch.nan, torch.inf][seed % 2]
    tokens, log_probs = (part.cpu() for part in top_tokens(logits.to(device), count, backend=backend))
    assert tokens.tolist() == [by_sorting(row, count) for row in logits.tolist()]
    expected = torch.log_softmax(logits.double(), -1).gather(1, tokens.clamp(min=0).long())
    expected, rounding = expected.masked_fill(tokens < 0, -torch.inf), max(1e-5, values * 2.0**-23)
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=rounding, equal_nan=False)
    assert torch.equal(tokens, top_tokens(logits, count, backend="reference")[0])


@by_each
def test_the_vocabulary_of_a_large_model(backend: str, device: str) -> None:
    logits = torch.cat([random_logits(1, 128_256, values, values) for values in (1, 40_000)]).bfloat16()
    logits[1, [128_255, 64, 127]] = 20_000.0
    tokens, _ = top_tokens(logits.to(device), 8, backend=backend)  # type: ignore[arg-type]
    assert tokens.tolist() == [by_sorting(row, 8) for row in logits.tolist()]
    assert tokens[1, :3].tolist() == [64, 127, 128_255]


@runs_triton
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.randoms(use_true_random=False), st.integers(1, 17))
def test_newest_tokens_by_triton_are_what_lists_give(lengths: list[int], random, length: int) -> None:
    device = DEVICE
    slots = random.sample(range(len(lengths)), len(lengths))
    texts = [[100 * slot + i for i in range(known)] for slot, known in enumerate(lengths)]
    tokens = torch.full((len(texts), 41), -7, dtype=torch.int32)[:, :40]
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    gained = torch.arange(len(slots), dtype=torch.int32) % (length + 2)
    out = torch.full((len(slots), length + 4), -1, dtype=torch.int32, device=device)
    drafts = torch.full((len(slots), length), -1, device=device)
    rejected = torch.tensor([random.randint(0, 3) for _ in slots], dtype=torch.int32)
    where = torch.tensor(slots, dtype=torch.int32, device=device)
    known = torch.tensor(lengths, dtype=torch.int32, device=device)
    newest_tokens(tokens.to(device), known, where, gained.to(device), rejected.to(device), out, drafts)
    for b, slot in enumerate(slots):
        padded = [texts[slot][0]] * (length + 1) + texts[slot]
        verified = max(0, int(gained[b] - 1 + rejected[b]))
        assert out[b].tolist() == [int(gained[b]), verified, lengths[slot], *padded[-length - 1 :]]
        assert drafts[b].tolist() == [texts[slot][-1]] * length


@runs_triton
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(1, 5), st.integers(0, 12), st.randoms(use_true_random=False))
def test_n_grams_by_triton_go_on_behind_drafts_that_they_begin_with(own: int, more: int, random) -> None:
    length, slots, text = own + more, 6, [7] * 100
    drafts, ngrams = ([[random.randint(0, 1) for _ in range(length)] for _ in range(slots)] for _ in range(2))
    chosen = random.sample(range(slots), 4)
    verified = [random.choice([0, own, length]) for _ in chosen]
    rows, ends = [0], [0]
    for n in verified:
        rows.append(rows[-1] + 1 + n)
        ends.append(ends[-1] + 1 + n + random.randint(0, 2))
    wanted, inputs = [[*draft] for draft in drafts], text[: ends[-1]]
    for b, slot in enumerate(chosen):
        if drafts[slot][:own] == ngrams[slot][:own]:
            wanted[slot] = ngrams[slot]
            first = ends[b + 1] - verified[b]
            inputs[first + own : ends[b + 1]] = ngrams[slot][own : verified[b]]
    found, tokens = torch.tensor(drafts).to(DEVICE), torch.tensor(text[: ends[-1]], dtype=torch.int32).to(DEVICE)
    where, ends_, rows_ = (torch.tensor(x, dtype=torch.int32).to(DEVICE) for x in (chosen, ends, rows))
    extend_drafts(found, torch.tensor(ngrams).to(DEVICE), where, tokens, ends_, rows_, own)
    assert found.tolist() == wanted and tokens.tolist() == inputs
    from bench.heads_replay import NONE, tail

    merged = tail(np.array(drafts)[:, :own], np.array(ngrams))  # as the replay has it, which marks what is left alone
    assert np.where(merged == NONE, drafts, merged)[chosen].tolist() == [wanted[slot] for slot in chosen]
    nowhere = torch.zeros_like(rows_)
    extend_drafts(found, torch.tensor(ngrams).to(DEVICE), where, tokens, nowhere, nowhere, own)
    assert tokens.tolist() == inputs
