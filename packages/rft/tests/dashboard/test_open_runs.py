"""The numbers of the runs that are looked at."""

from collections.abc import Callable
from pathlib import Path

from rft.dashboard.open_runs import KnownPoints, OpenRuns

Make = Callable[..., Path]
NAMES = ["reward/mean", "eval/accuracy"]


def test_a_page_gets_the_points_that_are_new_to_it(make_run: Make) -> None:
    run, store = make_run(steps=3), OpenRuns()
    (run / "evals.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5, "rewards": [1, 0]}\n')
    first = store.curves(run, NAMES, {})
    assert first["training"]["series"] == {"reward/mean": [0.25, 0.5, 0.75]}
    assert first["evaluations"]["series"] == {"eval/accuracy": [0.5]}
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/mean": 1}\n')
    known = {"training": KnownPoints(generation=0, rows_a_point=1, complete=3)}
    second = store.curves(run, NAMES, known)
    assert (second["training"]["start"], second["training"]["steps"]) == (3, [4.0])
    assert store.names(run) == ["num_steps", "reward/mean", "time/train", "eval/accuracy"]


def test_points_of_rows_that_were_cut_back_are_given_anew(make_run: Make) -> None:
    run, store = make_run(steps=3), OpenRuns()
    store.curves(run, NAMES, {})
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 9}\n')
    found = store.curves(run, NAMES, {"training": KnownPoints(generation=0, rows_a_point=1, complete=1)})["training"]
    assert (found["generation"], found["start"], found["steps"]) == (1, 0, [1.0])
    assert found["series"] == {"reward/mean": [9.0]}


def test_few_runs_are_kept(make_run: Make) -> None:
    store = OpenRuns(most=1)
    first, second = make_run("a"), make_run("b")
    for run in (first, second, first):
        assert store.curves(run, NAMES, {})["training"]["rows"] == 3
