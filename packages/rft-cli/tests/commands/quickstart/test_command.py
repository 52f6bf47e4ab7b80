"""A quickstart begins in a directory of its own, with choices that exist; all else is refused at once."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rft_cli.commands.quickstart import command as quickstart
from rft_cli.commands.quickstart.tasks import TASKS
from rft_core.errors import OptionsError


@pytest.mark.parametrize("name", ["config.yaml", "checkpoints", quickstart.WARM_START])
def test_a_quickstart_never_writes_over_a_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "prepare", lambda *_: pytest.fail("nothing may be prepared"))
    run = tmp_path / "run"
    (run / name).mkdir(parents=True)
    with pytest.raises(OptionsError) as caught:
        quickstart.run(["--save_path", str(run)])
    problem = caught.value.problem
    assert (problem.code, problem.where, problem.do) == ("run.exists", "--save_path", f"rft-train resume {run}")
    assert [path.name for path in run.iterdir()] == [name]


@pytest.mark.parametrize(
    ("words", "choices"),
    [
        ("", {}),
        ("--seed 7", {"seed": 7}),
        ("--seed=7 --steps=12", {"seed": 7, "steps": 12}),
        ("--save-path=a=b --control sft --seconds 5", {"save_path": "a=b", "control": "sft", "seconds": 5.0}),
        ("--task images --control shuffled_images", {"task": "images", "control": "shuffled_images"}),
        ("--task images", {"task": "images"}),
        ("--nproc 3", {"nproc": 3}),
        ("--task calculator --control noisy_answers", {"task": "calculator", "control": "noisy_answers"}),
        ("--control shuffled_rewards --seed 0", {"control": "shuffled_rewards"}),
    ],
)
def test_flags_are_choices_and_the_rest_is_as_documented(words: str, choices: dict[str, Any]) -> None:
    documented = {"seed": 0, "save_path": "", "control": "none", "seconds": 120.0, "steps": 0, "task": "additions"}
    documented |= {"nproc": 0}
    parsed = quickstart.parse(words.split())
    assert asdict(parsed) == {**documented, **choices}
    assert quickstart.QuickstartOptions() == quickstart.parse([])
    assert parsed.learned is TASKS[parsed.task]


@pytest.mark.parametrize(
    ("words", "do"),
    [
        ("--sede 1", "--seed"),
        ("--qqqq 1", "rft-train quickstart --help"),
        ("seed 1", "--seed"),
        ("--seed", "rft-train quickstart --help"),
        ("--seed 1 --steps", "rft-train quickstart --help"),
        ("--seed -1", "--seed 0"),
        ("--steps many", "--steps 0"),
        ("--seconds 1.5", "--seconds 120"),
        ("--task sums", "--task images"),
        ("--control shuffled_images", "--task images"),
        ("--control noisy_answers", "--task calculator"),
        ("--control nothing", "--control shuffled_rewards"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_with_one_that_does(words: str, do: str) -> None:
    with pytest.raises(OptionsError) as caught:
        quickstart.parse(words.split())
    assert (caught.value.problem.code, caught.value.problem.do) == ("option.quickstart", do)
