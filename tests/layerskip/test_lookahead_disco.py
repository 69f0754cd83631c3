"""DISCO: recording, training, the refusal, and inference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from layerskip_plugin.lookahead import Confidence, Disco, Recording, Verifications
from layerskip_plugin.lookahead.disco import Classifier, best_f1_threshold, f1, train

sklearn = pytest.importorskip("sklearn")


def records(kind: str, n: int = 3000, seed: int = 0) -> Verifications:
    """Made-up verifications in which acceptance hangs on the entropy, or on the top-1 probability alone."""
    rng = np.random.default_rng(seed)
    top = np.sort(rng.dirichlet(np.full(10, 0.4), n), 1)[:, ::-1].astype(np.float32)
    entropy = rng.random(n).astype(np.float32) * 3
    chance = 1 / (1 + np.exp(4 * (entropy - 1.5))) if kind == "entropy" else top[:, 0]
    position = rng.integers(0, 6, n).astype(np.int32)
    request = np.sort(rng.integers(0, 40, n)).astype(np.int32)
    return Verifications(top, entropy, position, rng.random(n) < chance, request, np.arange(n, dtype=np.int32), "m")


def test_where_entropy_tells_more_the_classifier_wins() -> None:
    classifier, comparison = train(records("entropy"))
    assert comparison.better and comparison.classifier > comparison.confidence + 0.1
    assert 0 < comparison.error < 0.1 and classifier.model == "m"


def test_where_the_probability_tells_all_the_classifier_is_refused() -> None:
    assert not train(records("probability"))[1].better


def test_the_network_is_the_one_that_was_trained() -> None:
    """numpy inference and scikit-learn's own give the same probabilities."""
    from sklearn.neural_network import MLPClassifier

    data = records("entropy", 800)
    x = np.concatenate([data.top, data.entropy[:, None], data.position[:, None]], 1)
    network = MLPClassifier((8,), max_iter=50, random_state=0)
    mean, scale = x.mean(0).astype(np.float32), x.std(0).astype(np.float32)
    with pytest.warns(Warning):
        network.fit((x - mean) / scale, data.accepted)
    (w1, w2), (b1, b2) = network.coefs_, network.intercepts_
    ours = Classifier(mean, scale, *(w.astype(np.float32) for w in (w1, b1, w2, b2)), threshold=0.5)
    expected = network.predict_proba((x - mean) / scale)[:, 1]
    assert np.abs(ours.probability(data.top, data.entropy, data.position) - expected).max() < 1e-4


def test_file_round_trip_and_another_model(tmp_path: Path) -> None:
    data = records("entropy", 1200)
    classifier, _ = train(data)
    classifier.save(tmp_path / "d.json", {})
    loaded = Classifier.load(tmp_path / "d.json", "m")
    same = [c.probability(data.top, data.entropy, data.position) for c in (classifier, loaded)]
    assert np.abs(same[0] - same[1]).max() < 1e-3
    with pytest.raises(ValueError, match="another model"):
        Classifier.load(tmp_path / "d.json", "other")
    (tmp_path / "d.json").write_text('{"format": "freedraft disco 1", "hidden": 2, "weights": {}}')
    with pytest.raises(ValueError, match="is damaged"):
        Classifier.load(tmp_path / "d.json")


def test_the_policy_stops_below_the_threshold() -> None:
    classifier, _ = train(records("entropy", 1500))
    policy = Disco(classifier)
    policy.begin(["a", "b", "c"], np.zeros(3, np.intp), 4)
    top = np.full((3, 10), 0.1, np.float32)
    more = policy.should_continue(0, np.arange(3, dtype=np.int32), top, np.array([0.1, 2.9, 0.2], np.float32))
    assert more.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("n", "requests", "says"), [(50, 40, "at least 100 of each"), (2000, 1, "at least 4 are needed")]
)
def test_too_few_records_are_refused(n: int, requests: int, says: str) -> None:
    data = records("entropy", n)
    data.request[:] %= requests
    with pytest.raises(ValueError, match=says):
        train(data)


def test_recording_keeps_what_was_judged_and_changes_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    recorder, plain = Recording(Confidence(0.5), tmp_path / "r.npz", "m"), Confidence(0.5)
    expected = []
    for step in range(20):
        ids = ["a", "b", f"c{step}"]
        recorder.begin(ids, np.zeros(len(ids), np.intp), 3)
        plain.begin(ids, np.zeros(len(ids), np.intp), 3)
        rows, drafted, seen = np.arange(3, dtype=np.int32), np.zeros(3, np.int32), {}
        for position in range(3):
            top = np.sort(rng.random((len(rows), 10), np.float32), 1)[:, ::-1]
            entropy = rng.random(len(rows), np.float32)
            drafted[rows] += 1
            seen |= {(int(r), position): (top[i], entropy[i]) for i, r in enumerate(rows)}
            more = recorder.should_continue(position, rows, top, entropy)
            assert (more == plain.should_continue(position, rows, top[:, :1], None)).all()
            rows = rows[more]
        accepted = np.array([rng.integers(0, n + 1) for n in drafted], np.int32)
        recorder.record_acceptance(ids, drafted, accepted, accepted)
        expected += [
            (seen[i, k], k, k < accepted[i]) for i in range(3) for k in range(min(drafted[i], accepted[i] + 1))
        ]
        recorder.finish([f"c{step}"])
    recorder.save()
    held = Verifications.load(tmp_path / "r.npz")
    assert held.model == "m" and len(held) == len(expected)
    for i, ((top, entropy), position, good) in enumerate(expected):
        assert (held.top[i] == top).all() and held.entropy[i] == entropy
        assert held.position[i] == position and held.accepted[i] == good
    starts = np.flatnonzero(held.position == 0)
    assert len({(held.request[i], held.round[i]) for i in starts}) == len(starts) == 60
    assert len(set(held.request.tolist())) == 22


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.npz").write_bytes(b"PK nothing")
    with pytest.raises(ValueError, match="no file of recorded verifications"):
        Verifications.load(tmp_path / "r.npz")
    with pytest.raises(ValueError, match="cannot read"):
        Verifications.load(tmp_path / "missing.npz")


def test_f1_threshold_is_that_of_exhaustive_search() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        score = np.round(rng.random(25), 1).astype(np.float32)
        actual = rng.random(25) < score
        if actual.any():
            found = best_f1_threshold(score, actual)
            assert f1(score >= found, actual) == pytest.approx(max(f1(score >= t, actual) for t in np.unique(score)))
