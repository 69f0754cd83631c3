"""`RunningAnswers`: requests of a tenant draft from the answers that its other requests are writing."""

from collections.abc import Mapping

import numpy as np

from sssd_plugin.datastore.live.runs import LearntRuns
from sssd_plugin.drafter import Drafter

LEADING = 8  # prompt tokens before an answer, as context of its first tokens
MOST = 1 << 14  # newest tokens of a tenant's answers; sorting them takes some milliseconds, in a background thread
LEAST, EACH = 64, 8  # tokens between two looks at all requests: at least; of each, on average
SHARE = 4  # a tenant's answers are shown again once one in SHARE tokens is new


class RunningAnswers:
    """Shows the answers of running requests to the others of their tenants, again when enough has been written."""

    def __init__(self, drafter: Drafter, runs: LearntRuns) -> None:
        self._drafter, self._runs, self._new = drafter, runs, 0
        self._shown: dict[int, tuple[int, int]] = {}  # tokens shown, and about how many were written since, by tenant

    def gained(self, tokens: int, begun: Mapping[str, tuple[int, int]]) -> None:
        """Count `tokens` that a step wrote. begun: by request, the length of its prompt and its `tenant_number`."""
        self._new += tokens
        if self._new < max(LEAST, EACH * len(begun)):
            return
        least, each, self._new = int(self._runs.isolation == "strict"), self._new // max(1, len(begun)), 0
        shared, together = self._runs.isolation == "shared", dict[int, list[tuple[str, int]]]()
        for request_id, (prompt_length, tenant) in begun.items():
            if tenant >= least:
                together.setdefault(0 if shared else tenant, []).append((request_id, prompt_length))
        for tenant in [tenant for tenant in self._shown if len(together.get(tenant, ())) < 2]:
            del self._shown[tenant]
            self._runs.show(tenant, ())
        for tenant, requests in together.items():
            shown, since = self._shown.get(tenant, (0, 0))
            since += each * len(requests)
            if len(requests) > 1:
                if SHARE * since >= shown:
                    shown, since = self._show(tenant, requests), 0
                self._shown[tenant] = shown, since

    def _show(self, tenant: int, requests: list[tuple[str, int]]) -> int:
        answers, most = [], MOST // len(requests)
        for request_id, prompt_length in requests:
            tokens = self._drafter.tokens(request_id, max(0, prompt_length - LEADING), most)
            answers.append(tokens[np.flatnonzero(tokens < 0).max(initial=-1) + 1 :])  # after the last image
        self._runs.show(tenant, answers)
        return sum(map(len, answers))
