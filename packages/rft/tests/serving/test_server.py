"""A reward server as a whole: asked over its socket by the client of the runs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rft.serving.server import RewardServer, start_server
from rft.settings import ServeRewardSettings, ServingSettings
from rft_core.errors import OptionsError
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.in_process import FunctionReward
from rft_trainer.rewards.servers.http_client import Endpoint
from rft_trainer.rewards.servers.remote_reward_model import RemoteReward
from rft_trainer.settings.rewards import RewardSettings


def length(responses: list[str], labels: list[str | None]) -> list[float | None]:
    """The length of each response with a label; none of the others."""
    return [None if label is None else float(len(text)) for text, label in zip(responses, labels, strict=True)]


def settings(**serving: object) -> ServeRewardSettings:
    return ServeRewardSettings(serving=ServingSettings(**{"port": 0, **serving}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def server() -> Iterator[RewardServer]:
    with start_server(settings(), reward=FunctionReward(length)) as running:
        yield running


def test_a_client_gets_the_scores_and_the_reasons(server: RewardServer) -> None:
    remote = RemoteReward("far", Endpoint(server.url, 20.0, 0), batch_size=2)
    items = [RewardItem("p", "q", text, label, "stop", 1) for text, label in (("a", "x"), ("bb", None), ("ccc", "x"))]
    first, second, third = remote(items)
    assert first == Score(1.0, breakdown={"far": 1.0})
    assert (second.value, second.status) == (None, RewardStatus.FAILED)
    assert third.value == 3.0
    assert server.names == ["length"]
    assert server.counters.unscored >= 1


def test_an_address_that_is_taken_is_refused_before_anything_is_loaded(server: RewardServer) -> None:
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(OptionsError) as caught:
        start_server(settings(port=port))
    problem = caught.value.problem
    assert (problem.code, f"port {port}" in problem.what) == ("serving.address", True)
    assert problem.do.startswith("--port ")
    assert problem.do != f"--port {port}"


def test_an_address_that_others_reach_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RFT_REMOTE_TOKEN", raising=False)
    with pytest.raises(OptionsError) as caught:
        start_server(settings(host="0.0.0.0"))
    assert caught.value.problem.code == "serving.no_token"


def test_the_port_is_free_after_the_end_and_what_functions_print_is_in_the_log(tmp_path: Path) -> None:
    function = tmp_path / "reward.py"
    function.write_text('def one(response):\n    print("asked about", response)\n    return 1.0\n')
    chosen = ServeRewardSettings(
        serving=ServingSettings(port=0, reward_log=str(tmp_path / "log.txt")),
        reward=RewardSettings(reward=f"{function}:one"),
    )
    with start_server(chosen) as running:
        port = int(running.url.rpartition(":")[2].partition("/")[0])
        [score] = RemoteReward("far", Endpoint(running.url, 20.0, 0))([RewardItem("p", "q", "a", None, "stop", 1)])
    assert score.value == 1.0
    assert "asked about a" in (tmp_path / "log.txt").read_text()
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_routes_choose_by_a_column_that_requests_bring() -> None:
    chosen = RewardSettings(reward_routes="arc=choice,*=exact", choice_options_key="options")
    given = ServeRewardSettings(serving=ServingSettings(port=0), reward=chosen)
    with start_server(given) as running:
        remote = RemoteReward("far", Endpoint(running.url, 20.0, 0), batch_size=8)
        # by a made-up prompt, which has no columns
        remote.start()
        arc = {"data_source": "arc", "options": ["1", "2"]}
        items = [
            RewardItem("p", "q", text, label, "stop", 1, columns=columns)
            for text, label, columns in (("(B)", "2", arc), ("(B)", "2", arc | {"data_source": "gsm8k"}))
        ]
        right, wrong = remote(items)
        assert (right.value, right.breakdown["far/choice"]) == (1.0, 1.0)
        assert (wrong.value, "far/choice" in wrong.breakdown) == (0.0, False)
        [refused] = remote([RewardItem("p", "q", "(B)", "2", "stop", 1, columns={"options": ["1", "2"]})])
        assert refused.status is RewardStatus.FAILED
        assert "data_source" in refused.detail
    assert running.names == ["choice", "exact"]
