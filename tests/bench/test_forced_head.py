"""bench/lib/forcing.py: drafts of a head become recorded tokens as often as is asked."""

import sys
from pathlib import Path

import pytest
import torch

from bench import forced
from bench.lib import forcing

SHARES = [0.85, 0.6, 0.2]


def test_a_head_is_right_as_often_as_is_asked_and_says_the_same_again(tmp_path: Path) -> None:
    texts = [([0, 1], [(7 * i + n) % 50 for i in range(2000)]) for n in range(3)]
    forcing.save_texts(tmp_path, texts, SHARES)
    hooked = forcing.Forcing(tmp_path)
    hooked.begin(5, "1-1")
    hooked.begin(2, "2-1")
    slots, found = torch.tensor([5, 2], dtype=torch.int32), []
    for length in range(2, 1999):
        drafts = torch.full((2, 3), -7, dtype=torch.int64)
        hooked.draft(drafts, slots, torch.tensor([length, length], dtype=torch.int32))
        again = torch.zeros_like(drafts)
        hooked.draft(again, slots, torch.tensor([length, length], dtype=torch.int32))
        assert torch.equal(drafts, again) and drafts.min() >= 0
        truth = torch.tensor([[*prompt, *answer][length : length + 3] for prompt, answer in texts[1:]])
        right = (drafts == truth).cumprod(1)
        assert torch.equal((drafts == truth).long(), right), "a token behind a wrong one is wrong, too"
        found.append(right)
    assert torch.cat(found).double().mean(0).tolist() == pytest.approx(SHARES, abs=0.03)
    hooked.on, drafts = False, torch.zeros(2, 3, dtype=torch.int64)
    hooked.draft(drafts, slots, torch.tensor([9, 9], dtype=torch.int32))
    assert not drafts.any(), "an engine's own drafts are left alone"


def test_arms_of_a_head_get_its_folder_and_need_a_gpu_or_model_runner_v2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    for name in ("head", "sssd+head"):
        arm = forced.ARMS["vllm"][name]
        made = forced.with_head(arm, tmp_path, 3)
        assert made == arm | {"model": str(tmp_path / "head"), "num_speculative_tokens": 3}
        assert forced.why_not(made, cuda=False) == "it needs a GPU" and forced.why_not(made, cuda=True) is None
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        assert forced.why_not(made, cuda=False) is None
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    own = {"method": "eagle", "model": "mine", "num_speculative_tokens": 5}
    assert forced.with_head(own, tmp_path, 3) == own
    for other in (None, forced.CHAIN):
        assert forced.with_head(other, tmp_path, 3) == other


@pytest.mark.parametrize("shares", [["0.5", "0.6"], ["1.5"], ["-1"]])
def test_shares_that_cannot_be_are_one_line(
    shares: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench/forced.py", "--trace", "none", "--tokenizer", "none", "--head", *shares]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        forced.main()
    assert ended.value.code == 2 and "--head must be falling shares" in capsys.readouterr().err.splitlines()[-1]
