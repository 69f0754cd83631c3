"""What lies between SGLang's batches and a method: tokens on their way to the host, trees cut to what may be verified,
and who a request's tenant is. The rest: real engines."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from freedraft.draft import DraftBatch
from freedraft.engines.sglang.drafting import AcceptedTokens, Drafting
from freedraft.engines.sglang.requests import tenant_of
from freedraft.guarded_method import GuardedMethod
from freedraft.step import EngineContext
from freedraft.tenants import tenant_key
from sssd_plugin.method import SPEC

NODES = 6


def request(**fields):
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Req("a", "", array("q", [1]), SamplingParams(), **fields)


def test_an_adapter_makes_another_tenant():
    """SGLang appends its id to the extra_key."""
    assert request(extra_key="x", lora_id="7f").extra_key == "x7f" == request(extra_key="x7f").extra_key
    for fields in ({}, {"cache_salt": "y"}, {"extra_key": "x"}, {"extra_key": "x", "cache_salt": "y"}):
        keys = fields.get("cache_salt"), fields.get("extra_key")
        assert tenant_of(request(**fields)) == tenant_key(*keys)
        assert tenant_of(request(lora_id="7f", **fields)) == tenant_key(*keys, "7f")


@pytest.mark.parametrize(
    ("nodes", "trees", "counts", "width"), [(4, False, [3, 2], 4), (4, True, [4, 4], 4), (5, True, [5, 5], NODES)]
)
def test_trees_are_cut_to_chains_and_verified_at_widths_that_could_be_prepared(nodes, trees, counts, width):
    context = EngineContext(vocab_size=100, max_draft_tokens=NODES - 1, widths=(1, 4, NODES))
    guarded = GuardedMethod(SPEC, SPEC.options.parse({"live": "off", "policy": "fixed"}), context)
    drafting = Drafting(guarded, context.widths, 4, AcceptedTokens(256, NODES), trees=trees)
    drafting.keep_widths((4, NODES))
    assert guarded.method.controller.widths.tolist() == [4, NODES]
    branched, roots = DraftBatch.empty(2, nodes), np.array([7, 8], np.int32)
    branched.parents[:] = [[-1, 0, 1, 0, 3][:nodes], [-1, 0, 0, 1, 3][:nodes]]
    branched.counts[:] = nodes
    tree = drafting._cut(branched, roots)
    assert tree.counts.tolist() == counts and tree.tokens.shape == (2, width) and tree.tokens[:, 0].tolist() == [7, 8]
    none = drafting._cut(DraftBatch.roots(roots), roots)
    assert none.tokens.shape == (2, 4) and none.counts.tolist() == [1, 1]
    guarded.close()


def put(accepted, rows, first):
    """A step that stores tokens `first`, `first + 1` for each pool row."""
    ones = torch.ones(len(rows), dtype=torch.int32)
    tokens = torch.tensor([first, first + 1] + [0] * (NODES - 2), dtype=torch.int32)
    accepted.put(torch.tensor(rows), tokens.repeat(len(rows), 1), 2 * ones, ones)


def test_a_step_reads_the_newest_tokens_of_each_request_and_keeps_them():
    """Also those of a prefill some steps ago; a late thread keeps them after the next step."""
    accepted = AcceptedTokens(256, NODES)
    for rows, first in (([3, 250], 10), ([7], 20), ([3], 30)):
        put(accepted, rows, first)
    gained = accepted.read(np.array([250, 3, 7]))
    assert gained.tokens.reshape(3, -1)[:, 2:4].tolist() == [[10, 11], [30, 31], [20, 21]]
    put(accepted, [3, 250], 40)
    assert accepted.read(np.array([3])).tokens[2:4].tolist() == [40, 41]
    assert gained.tokens[gained.ends - 1].tolist() == [11, 31, 21] and gained.seq_lens.tolist() == [1, 1, 1]


def test_a_step_copies_its_own_rows_only():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
            made = operation(*arguments, **keywords or {})
            self.elements += made.numel() if isinstance(made, torch.Tensor) else 0
            return made

    accepted = AcceptedTokens(4096, NODES)
    with Counting() as counting:
        for first in range(50):  # of prefills, which nobody reads
            put(accepted, [5, 9], first)
    assert counting.elements < 50 * 200 and len(accepted._copies) == 1
