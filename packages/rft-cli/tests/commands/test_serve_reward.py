"""`rft-train serve-reward`: what is said while it serves, and at its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from rft_cli.commands import serve_reward


@pytest.mark.parametrize("variable", ["", "RFT_REMOTE_TOKEN"])
def test_it_serves_until_it_is_stopped_and_says_what_it_answered(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped, asked = threading.Event(), list[Any]()

    @contextmanager
    def until_stopped() -> Iterator[threading.Event]:
        stopped.set()
        yield stopped

    @contextmanager
    def start_server(settings: Any) -> Iterator[Any]:
        asked.append((settings.reward.reward, settings.serving.port))
        figures = SimpleNamespace(requests=1200, responses=34000, unscored=2)
        url = "http://127.0.0.1:9/score"
        yield SimpleNamespace(url=url, names=["math", "judge"], counters=figures, token_variable=variable)
        asked.append("closed")

    monkeypatch.setattr(serve_reward, "until_stopped", until_stopped)
    monkeypatch.setattr(serve_reward, "start_server", start_server)
    assert serve_reward.run(["--reward", "math", "--port", "0"]) == 0
    assert asked == [("math", 0), "closed"]
    rewards, serving, health, answered = capsys.readouterr().out.splitlines()
    assert rewards.endswith("math, judge")
    assert "--remote_rm_url http://127.0.0.1:9/score" in serving
    assert ("RFT_REMOTE_TOKEN" in serving) is bool(variable)
    assert "http://127.0.0.1:9/health" in health
    assert "1,200 requests: 34,000 responses, 2 unscored" in answered
