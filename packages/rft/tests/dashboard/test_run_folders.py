"""Runs in folders, and the paths that are read."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rft.dashboard import run_folders
from rft.dashboard.run_folders import RequestRefused, RunFolders
from rft_core.errors import OptionsError

Make = Callable[..., Path]


def test_runs_are_found_below_a_folder_and_never_through_a_link(folder: Path, make_run: Make, tmp_path: Path) -> None:
    made = [make_run("a"), make_run("deep/b")]
    (folder / "latest").symlink_to(made[0])
    outside = tmp_path / "other"
    outside.mkdir()
    (outside / "metrics.jsonl").write_text("")
    (folder / "link").symlink_to(outside)
    (made[0] / "checkpoints" / "inner").mkdir(parents=True)
    (made[0] / "checkpoints" / "inner" / "metrics.jsonl").write_text("")
    made.insert(1, make_run("a/warm_start"))  # of an earlier stage
    folders = RunFolders([folder])
    assert sorted(folders.runs().values()) == made
    assert [folders.place(run) for run in made] == ["runs", "runs/a", "runs/deep"]
    assert list(RunFolders([made[0]]).runs().values()) == made[:2]


def test_a_run_is_named_by_its_digest_alone(folder: Path, make_run: Make) -> None:
    run = make_run()
    folders = RunFolders([folder])
    (digest,) = folders.runs()
    assert folders.run(digest) == run
    for name in ("", "mine", "../mine", str(run), "0" * 20):
        with pytest.raises(RequestRefused) as caught:
            folders.run(name)
        assert caught.value.code == 404


@pytest.mark.parametrize("entry", ["metrics.jsonl", "config.yaml", "rollouts"])
def test_a_run_whose_file_leads_elsewhere_is_not_read(folder: Path, make_run: Make, tmp_path: Path, entry: str) -> None:
    run = make_run()
    secret = tmp_path / "secret"
    if entry == "rollouts":
        (run / entry).rmdir()
        secret.mkdir()
    else:
        (run / entry).unlink()
        secret.write_text("{}")
    (run / entry).symlink_to(secret)
    folders = RunFolders([folder])
    with pytest.raises(RequestRefused, match="leads out") as caught:
        folders.run(next(iter(folders.runs())))
    assert caught.value.code == 403


def test_a_pipe_is_not_read(folder: Path, make_run: Make) -> None:
    run = make_run()
    os.mkfifo(run / "numerics.jsonl")
    folders = RunFolders([folder])
    with pytest.raises(RequestRefused, match="no file"):
        folders.run(next(iter(folders.runs())))


def test_more_runs_than_are_looked_at_are_told(folder: Path, make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        make_run(name)
    monkeypatch.setattr(run_folders, "MOST_RUNS", 2)
    folders = RunFolders([folder])
    assert (len(folders.runs()), folders.is_cut) == (2, True)


def test_a_folder_that_is_none_is_refused(folder: Path) -> None:
    for given in ([folder / "no" / "where"], []):
        with pytest.raises(OptionsError) as caught:
            RunFolders(given)
        assert caught.value.problem.code == "dashboard.no_folder"
        if given:
            assert caught.value.problem.do == f"rft-train dashboard {folder}"
