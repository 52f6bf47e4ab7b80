"""Answers of the dashboard."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from rft.dashboard.json_answers import DashboardAnswers, encoded, harmless
from rft.dashboard.run_folders import RequestRefused, RunFolders

Make = Callable[..., Path]
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e"
ANSWER = {"prompt_id": "p", "sample": 0, "prompt": HOSTILE, "response": HOSTILE, "reward": 1.0}


@pytest.fixture
def answers(folder: Path, make_run: Make) -> DashboardAnswers:
    make_run("a", rate=0.001, answers=[ANSWER])
    make_run("b", rate=0.01)
    return DashboardAnswers(RunFolders([folder]))


def digests(answers: DashboardAnswers) -> dict[str, str]:
    return {run["name"]: run["id"] for run in answers.of("/api/runs", {})["runs"]}


def test_every_page_has_an_answer_that_is_json(answers: DashboardAnswers) -> None:
    a, b = (digests(answers)[name] for name in "ab")
    asked = {
        "/api/runs": {},
        "/api/run": {"run": [a]},
        "/api/curves": {"run": [a], "name": ["reward/mean"], "training": ["0,1,2"]},
        "/api/compare": {"run": [a, b]},
        "/api/samples": {"run": [a], "step": ["3"], "reward_min": ["0.5"], "truncated": [""]},
        "/api/tokens": {"run": [a], "step": ["3"], "group": ["p"], "quantity": ["advantage"]},
    }
    found = {path: json.loads(encoded(answers.of(path, parameters))) for path, parameters in asked.items()}
    assert found["/api/run"]["step"] == 3
    assert found["/api/curves"]["training"]["start"] == 2
    assert found["/api/compare"]["settings"] == [["actor_learning_rate", "0.001", "0.01"]]
    assert found["/api/tokens"]["answers"] == {}
    (group,) = found["/api/samples"]["groups"]
    assert group["prompt"] == "<script>alert(1)</script>\\x1b[31m\\u202e"


@pytest.mark.parametrize(
    ("path", "parameters", "code"),
    [
        ("/api/none", {}, 404),
        ("/api/run", {}, 400),
        ("/api/run", {"run": ["../../etc"]}, 404),
        ("/api/compare", {"run": ["x"]}, 400),
        ("/api/compare", {"run": ["x", "y"]}, 404),
        ("/api/curves", {"run": ["{a}"], "name": ["x"] * 65}, 400),
        ("/api/curves", {"run": ["{a}"], "training": ["a,b,c"]}, 400),
        ("/api/samples", {"run": ["{a}"], "step": ["-1"]}, 400),
        ("/api/samples", {"run": ["{a}"], "reward_max": ["nan"]}, 400),
        ("/api/tokens", {"run": ["{a}"], "step": ["3"], "group": ["p"], "quantity": ["x"]}, 400),
    ],
)
def test_what_cannot_be_answered_is_refused(
    answers: DashboardAnswers, path: str, parameters: dict[str, list[str]], code: int
) -> None:
    a = digests(answers)["a"]
    given = {name: [a if value == "{a}" else value for value in values] for name, values in parameters.items()}
    with pytest.raises(RequestRefused) as caught:
        answers.of(path, given)
    assert caught.value.code == code


def test_a_run_whose_files_lead_elsewhere_is_in_the_list_with_the_reason(
    answers: DashboardAnswers, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("{}")
    (folder / "a" / "env.json").symlink_to(tmp_path / "secret")
    (entry,) = (run for run in answers.of("/api/runs", {})["runs"] if run["name"] == "a")
    assert (entry["state"], entry["why"]) == (
        "unreadable",
        "env.json leads out of the folders of this dashboard",
    )


def test_an_answer_holds_nothing_that_steers_and_no_number_that_is_none() -> None:
    given = {"a\x07": [math.inf, math.nan, 1.5, 2, True, None, ("\u202e",)]}
    assert harmless(given) == {"a\\x07": [None, None, 1.5, 2, True, None, ["\\u202e"]]}
