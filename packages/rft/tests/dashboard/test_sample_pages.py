"""Pages of sampled answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft.dashboard import sample_pages
from rft.dashboard.run_folders import RequestRefused, RunFolders
from rft.dashboard.sample_pages import SampleQuery, real_or_none, sample_page, whole_or_none
from rft_trainer.rollout_files.selection import RowFilter

Make = Callable[..., Path]
ANSWERS: list[dict[str, Any]] = [
    {"prompt_id": "p", "sample": 0, "prompt": "2+3=", "response": "5", "reward": 1.0, "finish_reason": "stop"},
    {"prompt_id": "p", "sample": 1, "prompt": "2+3=", "response": "Six", "reward": 0.0, "finish_reason": "length"},
    {"prompt_id": "q", "sample": 0, "prompt": "1+1=", "response": "2", "failure": "timeout", "label": "2"},
]


@pytest.fixture
def run(make_run: Make) -> Path:
    return make_run(answers=ANSWERS)


def page(run: Path, **query: Any) -> dict[str, Any]:
    return sample_page(RunFolders([run.parent]), run, SampleQuery(**query))


def found(run: Path, **query: Any) -> list[str]:
    return [row["response"] for group in page(run, **query)["groups"] for row in group["answers"]]


def test_groups_of_all_steps_are_shown_the_newest_first(run: Path) -> None:
    shown = page(run)
    assert [(group["step"], group["prompt_id"]) for group in shown["groups"]] == [
        *((3, "p"), (3, "q")),
        *((1, "p"), (1, "q")),
    ]
    assert (shown["searched"], shown["before"], shown["steps"]) == (6, None, [1, 3])
    assert shown["groups"][1]["label"] == "2"
    assert shown["groups"][1]["answers"][0]["failure"] == "timeout"


def test_answers_are_found_by_what_they_hold(run: Path) -> None:
    assert found(run, text="six") == ["Six", "Six"]
    assert found(run, text="1+1") == ["2", "2"]
    assert found(run, rows=RowFilter(step=1, reward_min=0.5)) == ["5"]
    assert found(run, rows=RowFilter(step=1, finish_reason="length")) == ["Six"]
    assert found(run, rows=RowFilter(step=3, prompt_id="q")) == ["2"]
    assert found(run, rows=RowFilter(step=2)) == []


def test_a_page_ends_with_the_step_that_fills_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_pages, "GROUPS_A_PAGE", 1)
    first = page(run)
    assert ([group["step"] for group in first["groups"]], first["before"]) == ([3, 3], 3)
    second = page(run, before=first["before"])
    assert ([group["step"] for group in second["groups"]], second["before"]) == ([1, 1], None)


def test_a_long_text_is_cut(make_run: Make) -> None:
    (text, _) = found(make_run("long", answers=[{"prompt": "p", "response": "x" * 30_000}]))
    assert text.endswith("... (30,000 characters)")


def test_a_file_that_leads_elsewhere_is_not_read(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text('{"response": "secret"}\n')
    (run / "rollouts" / "step_000009.jsonl").symlink_to(tmp_path / "secret.jsonl")
    with pytest.raises(RequestRefused, match="leads out"):
        page(run)


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "\u0661"])
def test_a_number_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(RequestRefused):
        whole_or_none(text, "step")


def test_numbers_are_read() -> None:
    assert (whole_or_none("", "a"), whole_or_none("12", "a")) == (None, 12)
    assert (real_or_none("", "a"), real_or_none("-1.5", "a")) == (None, -1.5)
    for text in ("nan", "inf", "x"):
        with pytest.raises(RequestRefused):
            real_or_none(text, "reward_min")
