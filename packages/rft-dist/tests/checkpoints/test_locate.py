"""What may stand after --ckpt_path, and what is said where there is nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rft_core.errors import CheckpointError, ExitCode
from rft_dist.checkpoints.locate import resolve_checkpoint, unverified_checkpoint


@pytest.fixture
def run_directory(small_run) -> Path:
    """A run with steps 10, 20 and 30, of episodes 1, 1 and 2."""
    store = small_run.store()
    for step, episode in ((10, 1), (20, 1), (30, 2)):
        small_run.save(store, step, episode=episode)
    return small_run.directory.parent


@pytest.mark.parametrize(
    ("form", "step"),
    [
        (".", 30),
        ("checkpoints", 30),
        ("checkpoints/", 30),
        ("checkpoints/step_000010", 10),
        ("checkpoints/step_10", 10),
        ("step_20", 20),
        ("checkpoints/global_step20", 20),
        ("checkpoints/episode_1", 20),
        ("checkpoints/episode_2", 30),
        ("episode_2", 30),
        ("checkpoints/step_000010/manifest.json", 10),
        ("checkpoints/step_000010/model", 10),
        ("checkpoints/step_000010/model/extra/notes.txt", 10),
        ("checkpoints/step_000020/state/optimizer.safetensors", 20),
    ],
)
def test_every_form_of_path_gives_the_checkpoint_it_means(small_run, run_directory: Path, form: str, step: int) -> None:
    resolved = resolve_checkpoint(run_directory / form)
    assert small_run.state_of(resolved.checkpoint) == (step, 0)
    assert resolved.findings == ()
    assert unverified_checkpoint(run_directory / form) == resolved.checkpoint.path


def test_without_verification_the_one_saved_last_is_meant_and_nothing_is_moved(small_run, run_directory: Path) -> None:
    folder = run_directory / "checkpoints"
    (folder / "step_000030" / "manifest.json").write_bytes(b"damaged")
    (folder / "step_000020" / "model" / "config.json").write_bytes(b"damaged, which only verification finds")
    names = sorted(path.name for path in folder.iterdir())
    assert unverified_checkpoint(run_directory) == folder / "step_000020"
    assert sorted(path.name for path in folder.iterdir()) == names
    assert unverified_checkpoint(run_directory / "nowhere") is None


def test_a_relative_path_and_a_link_to_a_run_are_followed(
    small_run, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_directory.parent / "latest").symlink_to(run_directory)
    assert resolve_checkpoint(run_directory.parent / "latest").checkpoint.step == 30
    monkeypatch.chdir(run_directory / "checkpoints" / "step_000010" / "model")
    assert resolve_checkpoint(Path("config.json")).checkpoint.step == 10
    assert resolve_checkpoint(Path(".")).checkpoint.step == 10


@pytest.mark.parametrize("form", ["checkpoints/step_000025", "checkpoints/episode_7", "nowhere/at/all"])
def test_nothing_found_is_an_error_with_its_own_exit_code(run_directory: Path, form: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(run_directory / form, asked_by="--ckpt_path", origin="run.yaml")
    problem = caught.value.problem
    assert caught.value.exit_code == ExitCode.NO_CHECKPOINT
    assert problem.what == f"nothing to resume at {run_directory / form} (asked by --ckpt_path from run.yaml)"
    assert f"{run_directory / form} does not exist" in problem.where


def test_the_nearest_valid_step_and_the_command_for_it_are_named(run_directory: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(run_directory / "checkpoints" / "step_000012")
    nearest = run_directory / "checkpoints" / "step_000010"
    assert f"nearest valid: step 10 at {nearest}" in caught.value.problem.state
    assert caught.value.problem.do == f"--ckpt_path {nearest}"


@pytest.mark.parametrize(
    ("asked", "step"), [("step_000018", 20), ("step_26", 30), ("step_000099", 30), ("episode_7", 30), ("step_1", 10)]
)
def test_the_nearest_is_that_of_the_step_asked_for_or_else_the_last(run_directory: Path, asked: str, step: int) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(run_directory / "checkpoints" / asked)
    assert caught.value.problem.do == f"--ckpt_path {run_directory / 'checkpoints' / f'step_0000{step}'}"


def test_an_empty_directory_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "other.txt").touch()
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(tmp_path)
    assert caught.value.problem.code == "checkpoint.nothing_to_resume"
    assert caught.value.problem.where == f"{tmp_path} holds other.txt"
    assert "--load_checkpoint" in caught.value.problem.why


def test_a_named_step_that_is_damaged_is_refused_and_left_in_place(run_directory: Path) -> None:
    path = run_directory / "checkpoints" / "step_000020"
    os.truncate(path / "model" / "config.json", 1)
    for form in (path, path / "model", run_directory / "step_20", run_directory / "episode_1"):
        with pytest.raises(CheckpointError, match=r"model/config\.json has 1") as caught:
            resolve_checkpoint(form)
        assert caught.value.problem.code == "checkpoint.damaged"
    assert path.is_dir()


def test_a_folder_whose_newest_is_damaged_gives_the_one_before_and_says_so(small_run, run_directory: Path) -> None:
    os.truncate(run_directory / "checkpoints" / "step_000030" / "model" / "config.json", 1)
    resolved = resolve_checkpoint(run_directory)
    assert small_run.state_of(resolved.checkpoint) == (20, 0)
    assert resolved.findings[0].quarantined_to == run_directory / "checkpoints" / "quarantine_step_000030"


def test_a_folder_in_which_nothing_verifies_is_an_error_that_names_the_damage(run_directory: Path) -> None:
    for step in (10, 20, 30):
        os.truncate(run_directory / "checkpoints" / f"step_0000{step}" / "model" / "config.json", 1)
    with pytest.raises(
        CheckpointError, match=r"none of those in it verifies: .*model/config\.json has 1 bytes"
    ) as caught:
        resolve_checkpoint(run_directory)
    assert caught.value.problem.code == "checkpoint.nothing_to_resume"
