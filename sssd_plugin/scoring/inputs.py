"""What is counted at a node, and the inputs of the scoring network, by name.

Drafter, trainer and the tests' oracle read these tables. A table lists how many columns or inputs each name stands for,
in the order of the weights; `starts` makes of it where each name starts.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np

from sssd_plugin import recycled_logits

STORE_ORDERS = 4  # contexts of 1 to 4 tokens in the store, and one of many
SHORT_ORDERS = 3  # contexts of 1 to 3 tokens are looked up in the request by their last token
LONG_ORDERS = np.array([4, 5, 6, 8, 16, 32])  # longer ones by their last four: least matching tokens
REQUEST_ORDERS = SHORT_ORDERS + len(LONG_ORDERS)
SKIP_ORDERS = 3  # contexts in the store that leave out the last token
VARIETIES = 6  # `network.variety` without 0

NODE_KINDS = (STORE_ORDERS + 1) * (REQUEST_ORDERS + 1)
"""Kinds of nodes, by their longest contexts in store and request; as many more with recycled logits."""

Table = TypeVar("Table", bound=NamedTuple)


def starts(table: Table) -> Table:
    """Return where each name of a table starts."""
    return table._make(accumulate((0, *table[:-1])))


class Columns(NamedTuple):
    """Counts of the tokens that followed, shortest contexts first."""

    store: int = STORE_ORDERS + 1
    request: int = REQUEST_ORDERS
    skip_store: int = SKIP_ORDERS  # in the store, without the last token
    skip_request: int = 2  # in the request, one and two tokens before the last one


class NodeInputs(NamedTuple):
    """Inputs common to a node's candidates. Orders and varieties are one-hot."""

    below_root: int = 1
    store_order: int = STORE_ORDERS + 1  # longest context in the store
    request_order: int = REQUEST_ORDERS  # and in the request
    store_variety: int = VARIETIES  # of the followers of these contexts
    request_variety: int = VARIETIES
    many: int = 1  # ln of the length of the context of many tokens
    recycled_order: int = recycled_logits.ORDERS  # longest context with recycled logits


class CandidateInputs(NamedTuple):
    """Inputs of each candidate. Those called counts are ln(count + 0.1) - ln(total + 1), 0 without observations."""

    store: int = 1  # ln of the probability interpolated over contexts in the store
    request: int = 1  # and over those in the request
    surplus: int = 1  # ln of how often it is in the request over how often by its share of the store
    store_counts: int = STORE_ORDERS - 1  # contexts of 2 to 4 tokens
    request_counts: int = SHORT_ORDERS + 1  # of 1 to 4 tokens
    skip_store_counts: int = SKIP_ORDERS
    skip_request_counts: int = 2
    many_counts: int = 1
    long_counts: int = 3  # the longest LONG_ORDERS
    many: int = 1  # as of the node, if it followed that context
    match: int = 1  # ln of its longest match
    longest: int = 1  # whether it follows the longest match
    newest: int = 1  # and the newest
    aligned: int = 1  # whether it follows an alignment
    since: int = 1  # ln of the tokens equal since the edit
    run: int = 1  # ln of the tokens copied before it
    edit: int = 1  # 1 for an insertion, -1 for a deletion
    evidence: int = 1  # share of equal tokens before the copy
    follower: int = 1  # whether it follows the newest occurrence in the store
    learnt: int = 1  # whether that was learnt
    recycled: int = 1  # whether it is among the likeliest by recycled logits
    recycled_log_prob: int = 1


COLUMN, COLUMNS = starts(Columns()), sum(Columns())
NODE, NODE_INPUTS = starts(NodeInputs()), sum(NodeInputs())
CANDIDATE, INPUTS = starts(CandidateInputs()), sum(CandidateInputs())


class LayerRows(NamedTuple):
    """Rows of the weights of the hidden layer."""

    bias: int = 1
    node: int = NODE_INPUTS
    largest: int = INPUTS  # the largest of each input among the candidates
    candidate: int = INPUTS


ROW, ROWS = starts(LayerRows()), sum(LayerRows())
