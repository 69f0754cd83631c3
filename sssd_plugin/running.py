"""`RunningAnswers`: requests of a tenant draft from the answers that its other requests are writing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.live.runs import LearntRuns
from sssd_plugin.drafter import Drafter

LEADING = 8  # prompt tokens before an answer, as context of its first tokens
MOST = 1 << 14  # newest tokens of a tenant's answers; sorting them takes some milliseconds, in a background thread
LEAST, SHARE, OF_EACH = 64, 4, 8  # new tokens before they are sorted again: at least; one in SHARE; of each answer


class Begun(NamedTuple):
    """What is known of a request from its beginning on."""

    prompt_length: int
    tenant: int  # `tenant_number`, or negative: of a request that shares nothing
    group: str  # "" for none


def to_learn(prompt: NDArray[np.int32], answer: NDArray[np.int32], leading: int = LEADING) -> NDArray[np.int32]:
    """Return the document to learn from a request: the last `leading` tokens of its prompt, after its last image
    (negative ids), and its answer; empty without an answer. All are int32 [n]."""
    lead = prompt[max(0, len(prompt) - leading) :] if len(answer) else prompt[:0]
    return np.concatenate([lead[np.flatnonzero(lead < 0).max(initial=-1) + 1 :], answer])


class RunningAnswers:
    """Shows the answers of running requests to the others of their tenants, again when enough has been written."""

    def __init__(self, drafter: Drafter, runs: LearntRuns) -> None:
        self._drafter, self._runs = drafter, runs
        self._new = self._shown = 0
        self._tenants: set[int] = set()  # whose answers are shown

    def gained(self, tokens: int, begun: Mapping[str, Begun]) -> None:
        """After a step of so many tokens. begun: by request."""
        self._new += tokens
        if self._new < max(LEAST, self._shown // SHARE, OF_EACH * len(begun)):
            return
        least, shared = int(self._runs.isolation == "strict"), self._runs.isolation == "shared"
        of_tenant: dict[int, list[tuple[str, int]]] = {}
        for request_id, about in begun.items():
            if about.tenant >= least:
                of_tenant.setdefault(0 if shared else about.tenant, []).append((request_id, about.prompt_length))
        shown: dict[int, list[NDArray[np.int32]]] = {tenant: [] for tenant in self._tenants}
        shown |= {tenant: self._documents(requests) for tenant, requests in of_tenant.items() if len(requests) > 1}
        self._new, self._shown = 0, sum(len(document) for documents in shown.values() for document in documents)
        self._tenants = {tenant for tenant, documents in shown.items() if documents}
        if shown:
            self._runs.show(shown)

    def _documents(self, requests: list[tuple[str, int]]) -> list[NDArray[np.int32]]:
        found, most = [], MOST // len(requests)
        for request_id, prompt_length in requests:
            lead = min(prompt_length, LEADING)
            tokens = self._drafter.tokens(request_id, prompt_length - lead)
            found.append(to_learn(tokens[:lead], tokens[lead:])[-most:])
        return [document for document in found if len(document)]
