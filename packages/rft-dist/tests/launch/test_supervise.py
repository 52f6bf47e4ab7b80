"""A run whose process dies goes on from its newest checkpoint, as often as is asked for; any other end stays one."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from rft_core.errors import ExitCode, NoProgressError
from rft_dist.launch.spawn import Ended
from rft_dist.launch.supervise import note_run, supervise

KILLED = 128 + signal.SIGKILL
Start = Callable[[Path | None, Mapping[str, str]], Ended]


class FakeRun:
    """A run that ends as it is told: (exit code, last step, step of the checkpoint that it has reached, cause)."""

    def __init__(self, path: Path, ends: Sequence[tuple[int, int, int, str]], *, asked: bool = False) -> None:
        self.path, self.ends, self.asked = path, iter(ends), asked
        self.starts: list[Path | None] = []

    def __call__(self, run: Path | None, variables: Mapping[str, str]) -> Ended:
        self.starts.append(run)
        code, step, saved, cause = next(self.ends)
        if step:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            note_run(self.path, variables)
            (self.path / "metrics.jsonl").write_text(f'{{"step": {step}}}\n{{"step": 9')
            if saved:
                (self.path / "checkpoints" / f"step_{saved:06d}").mkdir(parents=True, exist_ok=True)
            if cause:
                (self.path / "error.json").write_text(json.dumps({"what": cause}))
        return Ended(code, 0 if code else None, (code,), (), self.asked)


def test_a_run_that_is_killed_goes_on_until_it_is_done(tmp_path: Path) -> None:
    run = FakeRun(
        tmp_path / "run", [(KILLED, 0, 0, ""), (KILLED, 3, 2, ""), (9, 5, 4, "rank 1 is gone"), (0, 8, 8, "")]
    )
    assert supervise(run, 1) == 0
    assert run.starts == [None, None, run.path, run.path]
    log = (run.path / "logs" / "rank_0.log").read_text()
    assert "restart 1 of 1 from step 2: it was killed by SIGKILL after step 3" in log
    assert "restart 1 of 1 from step 4: it ended with exit code 9 after step 5: rank 1 is gone" in log


@pytest.mark.parametrize(
    "code", [0, *(int(code) for code in ExitCode if code not in (0, ExitCode.PEER)), 130, 143, 138]
)
def test_an_end_of_its_own_is_not_started_again(tmp_path: Path, code: int) -> None:
    run = FakeRun(tmp_path / "run", [(code, 3, 2, "")])
    assert supervise(run, 5) == code
    assert len(run.starts) == 1


def test_what_dies_after_a_signal_to_end_stays_ended(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [(KILLED, 3, 2, "")], asked=True)
    assert supervise(run, 5) == KILLED
    assert len(run.starts) == 1


def test_restarts_without_a_newer_checkpoint_end(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [(KILLED, step, 2, "") for step in (3, 4, 5)])
    with pytest.raises(NoProgressError) as caught:
        supervise(run, 2)
    problem = caught.value.problem
    assert problem.what == (
        "2 restarts from step 2 led to no newer checkpoint; of the last, it was killed by SIGKILL after step 5"
    )
    assert f"rft-train resume {run.path}" in problem.do
    assert len(run.starts) == 3


def test_two_starts_that_end_alike_are_enough(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [(1, 3, 2, "unexpected KeyError"), (1, 3, 2, "unexpected KeyError")])
    with pytest.raises(
        NoProgressError, match=r"two starts from step 2 ended alike: .*after step 3: unexpected KeyError"
    ):
        supervise(run, 9)
    other = FakeRun(tmp_path / "other", [(1, 3, 2, "one"), (1, 3, 2, "another"), (0, 3, 2, "")])
    assert supervise(other, 9) == 0


def test_rows_that_an_evaluation_keeps_are_progress(tmp_path: Path) -> None:
    sizes = iter([0, 10, 10, 20, 20, 20, 20])
    evaluation = FakeRun(tmp_path / "run", [(KILLED, 0, 0, "")] * 9)
    with pytest.raises(NoProgressError, match="ended alike"):
        supervise(evaluation, 1, lambda: next(sizes))
    assert len(evaluation.starts) == 3, "the second kept more rows, and the third as many as the second"


def test_what_never_begins_names_no_run(tmp_path: Path) -> None:
    with pytest.raises(NoProgressError) as caught:
        supervise(FakeRun(tmp_path / "run", [(1, 0, 0, "")] * 2), 9)
    assert caught.value.problem.state == "nothing was begun"
    note_run(tmp_path, {})  # nobody asks where the run is
    assert list(tmp_path.iterdir()) == []
