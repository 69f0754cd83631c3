"""Copies from the device hold what was computed when they were queued."""

import pytest
import torch

from freedraft.engines.copies import to_host

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("columns", [slice(None), slice(1, 3)])
def test_values_arrive_as_they_were(device: str, columns: slice) -> None:
    values = torch.arange(12, dtype=torch.int32, device=device).view(3, 4)
    wanted = values[:, columns].tolist()
    copied = to_host(values[:, columns])
    if device != "cpu":
        values.zero_()
    assert copied.wait().tolist() == wanted and copied.arrived()


@GPU
def test_a_copy_waits_for_the_devices_work() -> None:
    busy = torch.zeros(1, device="cuda")
    torch.cuda._sleep(1_000_000_000)
    copied = to_host(busy + 1)
    assert not copied.arrived() and copied.wait().tolist() == [1.0]
