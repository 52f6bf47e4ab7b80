"""Limits as they are given, the order of a removal, and what is done about directories of processes that ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rft_core import fault_points
from rft_core.errors import OptionsError
from rft_dist.checkpoint_format.layout import dead_name, run_tag, step_name
from rft_dist.checkpoints.reader import open_verified
from rft_dist.checkpoints.retention import Removal, RetentionPolicy, Stored, plan_removals, remove_checkpoint, sweep

RUN = "run-a"
NO_SUCH_PROCESS = 999_999_999
SYNCED = ["directory.sync.before", "directory.sync.after"]


@pytest.mark.parametrize("name", ["keep_last", "keep_bytes"])
def test_a_limit_is_at_least_one_or_none(name: str) -> None:
    for allowed in (1, None):
        RetentionPolicy(**({"keep_last": None, "keep_bytes": None} | {name: allowed}))
    for refused in (0, -1):
        with pytest.raises(OptionsError) as caught:
            RetentionPolicy(**({"keep_last": None, "keep_bytes": None} | {name: refused}))
        assert caught.value.problem.code == "checkpoint.bad_limit"
        assert caught.value.problem.what == f"{name} = {refused}"


def steps(stored: list[Stored], keep_last: int | None, keep_bytes: int | None, *protected: int) -> list[int]:
    policy = RetentionPolicy(keep_last, keep_bytes)
    return [removal.step for removal in plan_removals(stored, policy, dict.fromkeys(protected, "best"))]


def test_limits_are_what_is_kept_with_the_newest_and_the_protected_counted() -> None:
    stored = [Stored(step, step, 10 * step) for step in (1, 2, 3, 4)]
    assert steps(stored, 4, None) == []
    assert steps(stored, 3, None) == [1]
    assert steps(stored, 1, None) == [1, 2, 3]
    assert steps(stored, 2, None, 1) == [2, 3]
    assert steps(stored, 1, None, 1, 2) == [3]
    assert steps(stored, None, 100) == []
    assert steps(stored, None, 99) == [1]
    assert steps(stored, None, 70) == [1, 2], "the limit is still met by what it names"
    assert steps(stored, None, 69) == [1, 2, 3]
    assert steps(stored, None, 80, 1) == [2], "a protected one takes its part of the limit"
    assert steps(stored, None, 79, 1) == [2, 3]
    assert steps(stored, None, None) == []
    assert steps([], 1, 1) == []


def test_the_newest_is_the_one_saved_last_and_of_two_saved_together_that_of_the_later_step() -> None:
    assert steps([Stored(9, 1, 1), Stored(3, 2, 1), Stored(5, 2, 1)], 1, None) == [9, 3]
    assert steps([Stored(9, 1, 1), Stored(3, 2, 1), Stored(5, 2, 1)], 2, None) == [9]


def test_everything_older_than_what_did_not_fit_goes_for_the_same_reason() -> None:
    stored = [Stored(1, 1, 1), Stored(2, 2, 50), Stored(3, 3, 10), Stored(4, 4, 10)]
    reason = "keep_bytes = 30"
    assert plan_removals(stored, RetentionPolicy(3, 30), {}) == [Removal(1, 1, reason), Removal(2, 50, reason)]
    both = plan_removals(stored, RetentionPolicy(2, 20), {})
    assert [removal.reason for removal in both] == ["keep_last = 2"] * 2


def trace() -> list[str]:
    """Operations from now on, in order."""
    passed: list[str] = []
    fault_points.install(lambda name: passed.append(name.removeprefix("checkpoint.")))
    return passed


def fill(directory: Path, text: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "file").write_text(text)
    return directory


def test_a_checkpoint_has_lost_its_name_for_good_before_its_first_file_goes(tmp_path: Path) -> None:
    fill(tmp_path / step_name(3), "three")
    passed = trace()
    remove_checkpoint(tmp_path, 3, RUN)
    unlinked = ["unlink.before", "unlink.after", "rmdir.before", "rmdir.after"]
    assert passed == ["retire.before", "retire.after", *SYNCED, *unlinked, *SYNCED]
    assert list(tmp_path.iterdir()) == []


def test_a_removal_that_stopped_half_way_does_not_stop_the_next_of_its_step(tmp_path: Path) -> None:
    fill(tmp_path / dead_name(3, RUN), "half")
    fill(tmp_path / step_name(3), "three")
    fill(tmp_path / step_name(4), "four")
    remove_checkpoint(tmp_path, 3, RUN)
    assert [path.name for path in tmp_path.iterdir()] == [step_name(4)]


def leftover(directory: Path, prefix: str, pid: int, run: str = RUN) -> Path:
    return fill(directory / f"{prefix}{step_name(4)}-{pid}-{run_tag(run)}", prefix)


@pytest.mark.parametrize("prefix", [".staging-", "dead_"])
def test_what_this_process_or_a_dead_one_left_is_swept_for_good(prefix: str, tmp_path: Path) -> None:
    for pid in (os.getpid(), NO_SUCH_PROCESS):
        leftover(tmp_path, prefix, pid)
        foreign = leftover(tmp_path, prefix, pid, "other")
        passed = trace()
        sweep(tmp_path, RUN)
        assert [path.name for path in tmp_path.iterdir()] == [foreign.name]
        assert passed[-2:] == SYNCED
        (foreign / "file").unlink()
        foreign.rmdir()


def test_what_a_living_process_of_the_run_has_is_left_to_it_and_the_process_unharmed(tmp_path: Path) -> None:
    program = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        paths = [leftover(tmp_path, prefix, process.pid) for prefix in (".staging-", "dead_", "dead_replaced_")]
        sweep(tmp_path, RUN)
    assert all(path.is_dir() for path in paths)
    assert process.returncode == 0, "it was looked for, and got no signal"
    sweep(tmp_path, RUN)
    assert [path.name for path in tmp_path.iterdir()] == [step_name(4)]


def test_a_process_of_another_user_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, signal: int) -> None:
        raise PermissionError

    path = leftover(tmp_path, ".staging-", NO_SUCH_PROCESS)
    monkeypatch.setattr(os, "kill", refuse)
    sweep(tmp_path, RUN)
    assert path.is_dir()


def test_a_displaced_checkpoint_comes_back_where_the_newer_one_never_came(small_run) -> None:
    small_run.save(small_run.store(), 4)
    there = small_run.directory / step_name(4)
    displaced = there.rename(there.with_name(f"dead_replaced_{step_name(4)}-{NO_SUCH_PROCESS}-{run_tag(RUN)}"))
    sweep(small_run.directory, RUN)
    assert not displaced.exists()
    assert small_run.state_of(open_verified(there)) == (4, 0)
