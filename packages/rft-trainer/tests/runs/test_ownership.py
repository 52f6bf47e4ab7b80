"""Who else can write the directory of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import OptionsError
from rft_trainer.runs import ownership
from rft_trainer.runs.ownership import other_owner, refuse_writable


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    (path / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "identity.json", "env.json", "command.txt", "metrics.jsonl"):
        (path / name).write_text("x")
        (path / name).chmod(0o664)
    path.chmod(0o775)
    (path / "checkpoints").chmod(0o775)
    return path


def test_a_run_that_a_group_can_write_is_continued(run: Path) -> None:
    refuse_writable(run)


@pytest.mark.parametrize("name", ["", "config.yaml", "identity.json", "env.json", "command.txt", "checkpoints"])
def test_a_run_that_everybody_can_write_is_refused_with_the_remedy(run: Path, name: str) -> None:
    (run / name).chmod(0o777 if (run / name).is_dir() else 0o666)
    with pytest.raises(OptionsError, match="every user of this machine") as caught:
        refuse_writable(run)
    problem = caught.value.problem
    assert problem.where == str(run / name)
    assert problem.do.endswith(f"chmod -R o-w {run}")
    os.system(f"chmod -R o-w {run}")
    refuse_writable(run)


def test_a_directory_in_which_others_replace_nothing_is_taken(run: Path) -> None:
    run.chmod(0o1777)
    refuse_writable(run)


def test_where_no_modes_are_kept_none_is_compared(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.chmod(0o777)
    actual = os.fstat

    def one_for_all(descriptor: int) -> os.stat_result:
        found = list(actual(descriptor))
        return os.stat_result([found[0] | 0o777, *found[1:]])

    monkeypatch.setattr(ownership.os, "fstat", one_for_all)
    refuse_writable(run)


def test_the_owner_of_a_run_is_named_where_it_is_somebody_else(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert other_owner(run) == ""
    me = os.geteuid()
    monkeypatch.setattr(ownership.os, "geteuid", lambda: me + 4711)
    assert other_owner(run) == ("" if me == 0 else ownership._name(me))

    def of_somebody(path: Path, **options: Any) -> os.stat_result:
        found = list(os.stat(path, **options))
        return os.stat_result([*found[:4], 54321, *found[5:]])

    monkeypatch.setattr(Path, "stat", of_somebody)
    assert other_owner(run) == "54321"
