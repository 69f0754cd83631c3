"""DISCO: recording, training, the refusal, and inference."""

from pathlib import Path

import numpy as np
import pytest
from lookahead_tools import RECIPE, outcome

from layerskip_plugin.calibrate.disco import Prices, RecordedRounds, train
from layerskip_plugin.lookahead.disco import Disco
from layerskip_plugin.lookahead.records import Recorder, Verifications
from tests.support.disks import full_disk

sklearn = pytest.importorskip("sklearn")
PRICES = Prices(0.3, 0.02)


def records(
    kind: str, rounds: int = 2000, seed: int = 0, longest: int = 8, alpha: float | None = None
) -> Verifications:
    """Made-up verifications, round by round, in which acceptance hangs on the entropy, on the top-1 probability alone,
    or on nothing (`alpha`)."""
    rng = np.random.default_rng(0)
    size = (rounds, longest)
    top = np.sort(rng.dirichlet(np.full(10, 0.4), size), 2)[:, :, ::-1].astype(np.float32)
    entropy = rng.random(size).astype(np.float32) * 3
    chance = {"entropy": 1 / (1 + np.exp(4 * (entropy - 1.5))), "probability": top[:, :, 0]}.get(kind, alpha)
    good = rng.random(size) < chance
    judged = np.append(np.ones((rounds, 1), np.bool_), np.cumprod(good, 1)[:, :-1].astype(np.bool_), 1)
    number, position = np.nonzero(judged)
    request = (number * 40 // rounds).astype(np.int32)
    position, number = position.astype(np.int32), number.astype(np.int32)
    return Verifications(top[judged], entropy[judged], position, good[judged], request, number, "m")


def test_the_classifier_wins_where_entropy_tells_more_and_drafting_pays() -> None:
    """Where the probability tells all, or a pass takes two steps, it is refused."""
    classifier, comparison = train(records("entropy"), PRICES)
    assert comparison.better and comparison.classifier > comparison.confidence + 0.03
    assert 0 < comparison.error < 0.1 and classifier.model == "m"
    assert not train(records("probability"), PRICES)[1].better
    assert not train(records("entropy"), Prices(2.0, 0.0))[1].better


def test_where_nothing_tells_anything_a_fixed_length_is_as_good() -> None:
    """At 80 % accepted "always go on" has the best F1; what pays is a length, which the price decides."""
    data = records("nothing", alpha=0.8)
    lengths = []
    for price in (0.05, 0.3, 0.7):
        _, comparison = train(data, Prices(price, 0.0))
        assert not comparison.better
        d = np.arange(1, 9)
        best = ((1 - 0.8 ** (d + 1)) / 0.2 / (1 + price * d)).max()
        assert comparison.fixed == pytest.approx(best, rel=0.05)
        lengths.append(RecordedRounds(data).best_rule(np.ones(len(data), np.float32), Prices(price, 0.0)).max_length)
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]


def test_the_policy_stops_below_the_threshold() -> None:
    classifier, _ = train(records("entropy", 4000), Prices(0.1, 0.0))
    assert 0.1 < classifier.threshold < 0.8 and classifier.max_length > 2
    policy = Disco(classifier)
    policy.begin(3, RECIPE, 40, 0)
    assert policy.expected_len() == classifier.max_length, "no passes are run ahead that nobody reads"
    top = np.full((3, 10), 0.1, np.float32)
    more = policy.should_continue(0, np.arange(3, dtype=np.int32), top, np.array([0.1, 2.9, 0.2], np.float32))
    assert more.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("n", "requests", "says"), [(40, 40, "at least 100 of each"), (2000, 1, "at least 4 are needed")]
)
def test_too_few_records_are_refused(n: int, requests: int, says: str) -> None:
    data = records("entropy", n)
    data.request[:] %= requests
    with pytest.raises(ValueError, match=says):
        train(data, PRICES)


def test_the_recorder_keeps_what_was_judged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    recorder, expected = Recorder(tmp_path / "r.npz", "m", lambda: (0.5, 0.02)), []
    for step in range(20):
        ids = ["a", "b", f"c{step}"]
        drafted = rng.integers(1, 4, 3).astype(np.int32)
        top, entropy = rng.random((3, 3, 10), np.float32), rng.random((3, 3), np.float32)
        accepted = rng.integers(0, drafted + 1).astype(np.int32)
        recorder.record(outcome(ids, drafted, accepted, top, entropy))
        judged = [(i, k) for i in range(3) for k in range(min(drafted[i], accepted[i] + 1))]
        expected += [(top[i, k], entropy[i, k], k, k < accepted[i]) for i, k in judged]
        recorder.finish(f"c{step}", idle=False)
    with full_disk(20):
        recorder.close()
    assert "cannot write" in caplog.text
    recorder.close()
    held = Verifications.load(tmp_path / "r.npz")
    assert held.model == "m" and held.prices == (0.5, 0.02) and len(held) == len(expected)
    columns = zip(*expected, strict=True)
    for found, wanted in zip((held.top, held.entropy, held.position, held.accepted), columns, strict=True):
        assert np.array_equal(found, wanted)
    starts = np.flatnonzero(held.position == 0)
    assert len({(held.request[i], held.round[i]) for i in starts}) == len(starts) == 60
    assert len(set(held.request.tolist())) == 22


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.npz").write_bytes(b"PK nothing")
    for name, says in (("r.npz", "was not written by option record"), ("missing.npz", "cannot read")):
        with pytest.raises(ValueError, match=says):
            Verifications.load(tmp_path / name)
