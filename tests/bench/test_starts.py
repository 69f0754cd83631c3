"""What `bench/starts.py` says of how a start ended."""

import os
import time

import pytest
from pydantic import BaseModel, field_validator

from bench.starts import forked
from freedraft.config import ConfigError


class Engine(BaseModel):
    tokens: int

    @field_validator("tokens")
    @classmethod
    def fits(cls, tokens):
        raise ValueError("too many tokens")


def started():
    os.write(1, b"freedraft: method 'x': drafts are trees, in attention Y\n")


def configured():
    raise ConfigError("freedraft: method 'x': no")


def crashed():
    os.write(2, b"(EngineCore) ERROR KeyError: 'cause'\n")
    raise RuntimeError("see root cause above")


def asserts():
    os.write(2, b"AssertionError\n")
    os.kill(os.getpid(), 9)  # as SGLang ends


def waits():
    time.sleep(60)


@pytest.mark.parametrize(
    "start, outcome, line",
    [
        (started, "started", None),
        (configured, "refused", "freedraft: method 'x': no"),
        (lambda: Engine(tokens=1), "refused", "too many tokens"),
        (crashed, "failed", "KeyError: 'cause'"),
        (lambda: int("x"), "failed", "invalid literal for int() with base 10: 'x'"),
        (asserts, "failed", "AssertionError"),
        (waits, "failed", "no end after 1 s"),
    ],
)
def test_how_a_start_ended(tmp_path, start, outcome, line):
    ended = forked(start, tmp_path / "log", 1 if start is waits else 30)
    assert (ended["outcome"], ended.get("line")) == (outcome, line)
    assert ended["drafts"] == ("trees" if outcome == "started" else None)
