"""`Tenant`: the runs of one tenant's text."""

from dataclasses import dataclass, field

from sssd_plugin.datastore.index.runs import Run, View

FACTOR = 4  # a run is merged with its newer neighbour unless it is at least as many times as large


@dataclass(slots=True, eq=False)
class Tenant:
    """Text learnt from one tenant's requests, or from all if tenants are not kept apart."""

    runs: list[Run] = field(default_factory=list)  # oldest and largest first
    memtable: Run | None = None  # run of the newest documents, to merge the next one into
    running: Run | None = None  # of answers that are still being written
    shows: int = 0  # changes of `running` that were asked for
    waiting: int = 0  # runs that wait to be sorted
    hidden: int = 0  # erasures to be applied; until then its text is not drafted from
    tidying: bool = False  # a merge of `runs` is queued
    view: View | None = None  # view of its requests; None after a change

    @property
    def all_runs(self) -> list[Run]:
        memtable = self.memtable  # first: other threads read without a lock
        return [*self.runs, memtable] if memtable else [*self.runs]

    @property
    def taught_at(self) -> int:
        """When its newest document was learnt, ms since 1970; 0 without documents."""
        return max((int(run.documents[-1, 0]) for run in self.all_runs), default=0)

    def runs_to_replace(self, max_runs: int, max_tokens: int) -> list[Run]:
        """Return two neighbours to merge; empty if there is nothing to do.

        Args:
            max_runs: bound, the memtable included. Once reached, the smallest neighbours are merged regardless of
                sizes.
            max_tokens: of the merged run.
        """
        runs = self.runs
        pairs, sizes = range(len(runs) - 1), [run.n for run in runs]
        close = [i for i in pairs if sizes[i] < FACTOR * sizes[i + 1] and sizes[i] + sizes[i + 1] <= max_tokens]
        if pairs and not close and len(runs) + 1 >= max_runs:
            close = [min(pairs, key=lambda i: sizes[i] + sizes[i + 1])]
        return runs[close[-1] : close[-1] + 2] if close else []
