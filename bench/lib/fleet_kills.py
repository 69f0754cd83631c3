"""Processes of a fleet, killed at random moments: what is in its bucket, and seen by its servers, afterwards."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from freedraft.tenants import tenant_key
from sssd_plugin.datastore.build.sorting import Sorter
from sssd_plugin.datastore.disk.bucket import BATCHES, Bucket
from sssd_plugin.datastore.disk.sections import learnt_sub_indices
from sssd_plugin.datastore.fleet import compaction, maintenance, replica
from sssd_plugin.datastore.fleet.batch import seal
from sssd_plugin.datastore.index.search import find_ngram
from sssd_plugin.datastore.live.store import open_live
from sssd_plugin.datastore.live.tenants import tenant_digest
from sssd_plugin.datastore.records import Erasure, Record

VOCAB = 1000
PERIOD = 0.1
"""Seconds between a server's looks at the bucket, and between its batches; so that a second has many of both."""
NAMES = str(tenant_key("even")), str(tenant_key("odd"))
SEEN = 40
_MEMORY = 4 << 30
_DOCUMENTS = 60


def text_of(number: int) -> list[int]:
    """The document of a number: two ids that only it has side by side, and then those of its tenant."""
    return [number // 600, 300 + number % 600, *([900 + number % 2] * (number % 50))]


class Fleet:
    """A bucket in a folder, and which documents its servers have to see.

    Attributes:
        expected: by tenant.
        next: the number of the next document.
    """

    def __init__(self, folder: Path) -> None:
        os.environ["FREEDRAFT_CACHE"] = str(folder / "cache")
        replica.POLL_SECONDS = replica.PUBLISH_SECONDS = PERIOD
        self.folder, self.url = folder, f"file://{folder}/bucket"
        self.progress = folder / "progress"
        self.bucket = Bucket(self.url)
        self.bucket.publish(compaction.start(VOCAB, None, "tenant", None), 1)
        key = bytes.fromhex(compaction.newest(self.bucket)[3].key)
        self.digests = tuple(tenant_digest(key, name) for name in NAMES)
        self.expected: tuple[set[int], set[int]] = set(), set()
        self.next = 0

    def publish(self, numbers: Iterable[int]) -> None:
        """Put documents into a batch of a replica of their own."""
        records = [Record(self.digests[n % 2], _now(), np.array(text_of(n), np.int32)) for n in numbers]
        self.bucket.write(f"{BATCHES}/r{time.monotonic_ns()}-00000000", seal(records, _now() + 1))

    def compact(self) -> None:
        compaction.compact(self.bucket, Sorter(), memory=_MEMORY)

    def held(self) -> tuple[list[int], list[int]]:
        """The documents of each tenant after a compaction; of one that is not as it was written, -1."""
        self.compact()
        _, path, manifest, _ = compaction.newest(self.bucket)
        found: tuple[list[int], list[int]] = [], []
        for sub in learnt_sub_indices(path, manifest):
            for record in sub.records():
                tokens = record.tokens.tolist()
                number = 600 * tokens[0] + tokens[1] - 300
                found[self.digests.index(record.tenant)].append(number if tokens == text_of(number) else -1)
        return sorted(found[0]), sorted(found[1])

    def seen_wrongly(self, rng: np.random.Generator) -> int:
        """How many of some documents a new server shows to another tenant, or not to their own, or though erased."""
        server = open_live(self.url, VOCAB)
        server.flush()
        wrong = 0
        for number in rng.integers(0, max(1, self.next), SEEN).tolist():
            query = np.array(text_of(number), np.int32)
            for tenant, name in enumerate([*NAMES, None]):
                view, _ = server.view(np.array([server.tenant(name)]))  # which keeps the addresses in its table valid
                places = [find_ngram(view.table, row, query, 0, len(query)) for row in range(len(view.table))]
                seen = sum(high - low for low, high in places)
                wrong += seen != (tenant == number % 2 and number in self.expected[tenant])
        server.close()
        return wrong

    def copies(self) -> bool:
        """Whether text of the odd tenant stands anywhere in the bucket or in its copies on this host."""
        marker = np.array([901] * 4, "<i4").tobytes()
        return any(marker in path.read_bytes() for path in self.folder.rglob("*") if path.is_file())


def publish_forever(fleet: Fleet) -> None:
    """Learn as a server does."""
    server = open_live(fleet.url, VOCAB)
    server.flush()
    with fleet.progress.open("w", buffering=1) as progress:
        for number in range(fleet.next, 1 << 30):
            while not server.insert(np.array(text_of(number), np.int32), server.tenant(NAMES[number % 2])):
                time.sleep(0.001)
            progress.write(f"{number} {time.time()}\n")
            time.sleep(0.002)


def compact_forever(fleet: Fleet) -> None:
    """Put batches into the bucket, and compact after each."""
    for number in range(fleet.next, 1 << 30, 6):
        fleet.publish(range(number, number + 6))
        with fleet.progress.open("a") as progress:
            progress.write(f"{number + 5} {time.time()}\n")
        fleet.compact()


def forget_odd(fleet: Fleet) -> None:
    """Erase what a tenant wrote."""
    maintenance.forget(fleet.url, [NAMES[1]], None, _MEMORY)


WORKS = {"publishing": publish_forever, "forgetting": forget_odd, "compacting": compact_forever}


def kills_of(work: Callable[[Fleet], None], times: int) -> dict[str, Any]:
    """Kill a process at random moments of its work: what comes of the bucket is what was there before and what the
    process has published, in its order, or that without one tenant's. Before it compacts, that tenant is erased."""
    rng = np.random.default_rng()
    wrong = back = copies = seen = ended = lost = 0
    oldest = 0.0
    with tempfile.TemporaryDirectory() as name:
        fleet = Fleet(Path(name))
        most = 1.5
        if work is forget_odd:
            started = time.monotonic()
            forget_odd(fleet)
            most = 2 * (time.monotonic() - started)
        done = fleet.folder / "done"
        for _ in range(times):
            if work is not publish_forever:
                numbers = range(fleet.next, fleet.next + _DOCUMENTS)
                fleet.next += _DOCUMENTS
                fleet.publish(numbers[: _DOCUMENTS // 2])
                fleet.compact()
                fleet.publish(numbers[_DOCUMENTS // 2 :])
                for number in numbers:
                    fleet.expected[number % 2].add(number)
            if work is compact_forever:
                compaction.announce(fleet.bucket, [Erasure(fleet.digests[1], _now() + 1)])
                fleet.expected[1].clear()
                time.sleep(0.01)  # what is learnt now stays
            killed, confirmed = _killed(work, fleet, done, float(rng.random()) * most)
            ended += confirmed
            held = fleet.held()
            learnt = [(int(n), float(at)) for n, at in (line.split() for line in _lines(fleet.progress))]
            until = max((*held[0], *held[1], fleet.next - 1)) + 1
            missing = [at for n, at in learnt if n >= until]
            lost += bool(missing)
            oldest = max([oldest, *(killed - at for at in missing)])
            for number in range(fleet.next, until):
                fleet.expected[number % 2].add(number)
            fleet.next = max([until, *(n + 1 for n, _ in learnt)])
            if work is forget_odd and (confirmed or not held[1]):
                back += len(held[1]) > 0
                fleet.expected[1].clear()
                time.sleep(2.5 * PERIOD)  # what the command erased may have come until then
            wrong += any(texts != sorted(known) for texts, known in zip(held, fleet.expected, strict=True))
            seen += fleet.seen_wrongly(rng)
            copies += not fleet.expected[1] and fleet.copies()
    result = {
        "kills": times,
        "documents": fleet.next,
        "restarts_with_wrong_data": wrong,
        "documents_seen_wrongly": seen,
        "documents_looked_for": times * SEEN,
    }
    if work is not publish_forever:
        result |= {"erasures_that_came_back": back, "erasures_that_left_copies": copies}
    if work is forget_odd:
        return result | {"ended_before_the_kill": ended}
    return result | {"restarts_that_lost_something": lost, "oldest_lost_ms": round(oldest * 1e3, 1)}


def _killed(work: Callable[[Fleet], None], fleet: Fleet, done: Path, after: float) -> tuple[float, bool]:
    """Kill a process after so many seconds of its work; when that was, and whether it had ended by itself."""
    fleet.progress.unlink(missing_ok=True)
    done.unlink(missing_ok=True)
    context = multiprocessing.get_context("fork")
    begun = context.Event()

    def run() -> None:
        begun.set()
        work(fleet)
        done.touch()

    process = context.Process(target=run)
    process.start()
    begun.wait()
    process.join(after)
    killed = time.time()
    process.kill()
    process.join()
    return killed, done.exists()


def _lines(path: Path) -> list[str]:
    """The lines that were written whole."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def _now() -> int:
    return time.time_ns() // 1_000_000
