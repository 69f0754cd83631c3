"""`freedraft top` on the metrics page that a drafter's process serves."""

import json
import socket

import pytest
from typer.testing import CliRunner

from freedraft import cli, metrics, top
from freedraft.config import ConfigError
from freedraft.metrics import Metrics


def port() -> int:
    served = metrics.serve(0)
    assert served is not None
    return served


def test_rates_between_two_readings_and_the_command() -> None:
    drafter, url = Metrics("topped"), f"http://127.0.0.1:{port()}/metrics"
    drafter.requests.set(3)
    drafter.speedup.set(1.25)
    before = top.read(url)
    for counter, more in (("request_steps", 40), ("tokens", 90), ("drafted", 100), ("accepted", 50)):
        getattr(drafter, counter).inc(more)
    drafter.undrafted("no match").inc(10)
    drafter.seconds.observe(3e-4)
    for length, drafts in ((0, 2), (1, 3), (3, 5)):
        drafter.head_lengths("mtp", str(length)).inc(drafts)
    shown = {title: values["topped"] for title, values in top.numbers(top.read(url), before, 4.0).items()}
    expected = {"running requests": 3, "tokens per second": 22.5, "tokens per step (1 without drafts)": 2.25,
                "draft tokens accepted": 0.5, "speed-up, estimated": 1.25, "requests without a draft": 0.25,
                "  token 1 of 'mtp'": 0.8, "  token 2 of 'mtp'": 0.5, "  token 3 of 'mtp'": 0.5,
                "  nothing similar found": 0.25, "ms to draft, per step": 0.3}  # fmt: skip
    assert {title: shown[title] for title in expected} == pytest.approx(expected)
    done = CliRunner(env={"COLUMNS": "400"}).invoke(cli.app, ["top", str(port()), "--once"])
    assert done.exit_code == 0 and "topped" in done.output and "tokens per second" in done.output
    done = CliRunner().invoke(cli.app, ["top", str(port()), "--json"])
    assert done.exit_code == 0 and json.loads(done.output)["running requests"]["topped"] == 3


def test_nobody_answers() -> None:
    done = CliRunner().invoke(cli.app, ["top", "1", "--once"])
    assert done.exit_code == 2 and "metrics_port" in done.output and done.output.count("\n") == 1


def test_an_address_of_ones_own_is_served_and_others_are_refused_in_one_line() -> None:
    everywhere = metrics.serve(0, host="0.0.0.0")
    assert everywhere != port() and top.read(f"http://127.0.0.2:{everywhere}/metrics")
    with pytest.raises(OSError):  # the other one is for this host's own address alone
        socket.create_connection(("127.0.0.2", port()), 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        used = taken.getsockname()[1]
        addresses = [("127.0.0.1", used), ("0.0.0.0", used), ("no-such-host.invalid", 9100), ("192.0.2.1", 9100)]
        for host, number in addresses:
            for ask in (metrics.check_address, lambda p, h: metrics.serve(p, host=h)):
                with pytest.raises(ConfigError) as refused:
                    ask(number, host)
                text = str(refused.value)
                assert f"{host}:{number}" in text and "'metrics_host'" in text and "\n" not in text
    metrics.check_address(None, "no-such-host.invalid")
    metrics.check_address(0, "127.0.0.1")
