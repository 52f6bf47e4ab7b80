"""Several runs beside one another."""

from collections.abc import Callable
from pathlib import Path

from rft.dashboard.run_comparison import compared, setting_differences

Make = Callable[..., Path]


def test_settings_that_differ_are_named_with_the_value_of_each_run(make_run: Make, folder: Path) -> None:
    runs = [make_run("a", rate=0.001), make_run("b", rate=0.01)]
    assert setting_differences(runs) == [["actor_learning_rate", "0.001", "0.01"]]
    bare = folder / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text("")
    assert ["prompt_data", "data # 1.jsonl", None] in setting_differences([runs[0], bare])


def test_runs_are_named_with_their_command(make_run: Make) -> None:
    assert compared([make_run("a", summary={"outcome": "finished"})]) == [
        {"name": "a", "verb": "rl", "outcome": "finished"}
    ]
