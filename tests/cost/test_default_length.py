"""The default number of draft tokens: what gains something and fits, and the reason."""

import math

import pytest
from known import LLAMA3_8B

from freedraft.cost.auto_by_batch import CHAIN_TOKENS_PER_STEP, candidate_lengths
from freedraft.cost.default_length import CHAIN, TREE, Room
from freedraft.cost.explain import full_graphs
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.roofline import weight_bytes

LLAMA, QWEN, GEMMA = 128_256, 151_936, 262_144  # vocabularies
STATE = 48 * 48 * 128 * 128 * 4  # of a 27B of Qwen3.6's kind, 151 MB
CACHE = 0.92 * 80e9 - 2 * 27e9


@pytest.mark.parametrize(
    ("room", "trees", "length", "words"),
    [
        (Room(256, LLAMA), False, 15, "longer chains"),
        (Room(1024, LLAMA), False, 15, "longer chains"),
        (Room(256, LLAMA), True, 31, "larger trees"),
        (Room(1024, LLAMA), True, 15, "31 would take grammar masks of 501 MiB for 1,024 requests"),
        (Room(1024, QWEN), False, 7, "15 would take grammar masks of 296 MiB"),
        (Room(1024, GEMMA), False, 7, "15 would take grammar masks of 512 MiB"),
        (Room(4096, GEMMA), False, 1, "3 would take grammar masks of 512 MiB"),
        (Room(256, LLAMA, one_length=True, few="ranks that share experts"), False, 3, "share experts"),
        (Room(256, QWEN, state=STATE, more=STATE, cache=CACHE), False, 7, "15 would take recurrent states of 2.42 GB"),
        (Room(64, QWEN, state=STATE, more=STATE, cache=CACHE, held=64), False, 1, "38.65 GB for 64 requests, from 9.8"),
        (Room(8, QWEN, state=STATE, more=STATE, cache=CACHE, held=8), False, 7, "19.33 GB for 8 requests, from 9.8"),
        (Room(256, QWEN, few="of no class"), False, 3, "of no class"),
        (Room(64, QWEN, state=2 * STATE, more=STATE, cache=7e9), False, 1, "recurrent states of 0.75 GB"),
        (Room(256, QWEN, one_length=True, state=STATE, more=STATE, cache=5e9), False, 1, "3 would take recurrent"),
        (Room(256, QWEN, state=STATE, more=0.0, cache=CACHE), False, 15, "longer chains"),  # no states of draft tokens
    ],
)
def test_the_default(room: Room, trees: bool, length: int, words: str) -> None:
    found, why = room.default(TREE, trees=trees)
    assert found == length and words in why and "\n" not in why


def test_twice_as_long_chains_gain_nothing() -> None:
    assert CHAIN_TOKENS_PER_STEP[2 * (1 + CHAIN) + 1] - CHAIN_TOKENS_PER_STEP[1 + CHAIN + 1] < 0.005


def test_a_number_that_is_given_takes_what_it_takes() -> None:
    room = Room(1024, QWEN)
    assert not room.excess(7) and "593 MiB" in room.excess(31)
    assert math.isinf(room.cache) and room.states(31) == 0


def test_the_weights_of_a_model() -> None:
    assert weight_bytes(ModelShape.from_config(LLAMA3_8B)) == pytest.approx(2 * 8.03e9, rel=0.01)
    mixtral = LLAMA3_8B | {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}
    assert weight_bytes(ModelShape.from_config(mixtral)) == pytest.approx(2 * 46.7e9, rel=0.01)
    assert weight_bytes(ModelShape.from_config(mixtral), 8) == pytest.approx(2 * 46.7e9 / 8, rel=0.01)


def test_full_graphs() -> None:
    """As vLLM 0.32 lists them."""
    assert [full_graphs(1024, candidate_lengths(length)) for length in (15, 31)] == [230, 246]
    assert [full_graphs(256, (length,)) for length in (7, 15, 31)] == [48, 32, 16]
