"""Which run a path means, and what a run that continues is called."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rft import run_lifecycle
from rft.checkpoints.writer import ResumePoint, open_store
from rft.identity.changes import Facts
from rft.identity.continuation import Continuation
from rft_cli.commands.quickstart import command as quickstart
from rft_cli.commands.resume import command_of
from rft_core.errors import OptionsError
from rft_dist.checkpoints.store import CheckpointStore
from rft_dist.settings import CheckpointSettings
from rft_trainer.runs.directory import RunDirectory


def save(store: CheckpointStore, step: int) -> None:
    store.save(
        step,
        tensors={"optimizer": {"a": torch.zeros(1)}},
        records={},
        model_writer=lambda path: (path / "config.json").write_text("{}") and None,
        metadata={},
    )


def directory(path: Path) -> RunDirectory:
    return RunDirectory.create(path, config_text="recipe: {command: sft}\n", command=["rft-train"], environment={})


def test_a_run_in_a_renamed_directory_keeps_its_name_among_its_checkpoints(tmp_path: Path) -> None:
    settings = CheckpointSettings(max_ckpt_num=2)
    first = directory(tmp_path / "first")
    save(open_store(first, settings), 1)
    save(open_store(first, settings), 2)
    first.path.rename(tmp_path / "second")
    second = RunDirectory.open(tmp_path / "second")
    restored = ResumePoint(
        CheckpointStore(second.checkpoints_directory, keep_last=None, keep_bytes=None, run_id="x").open(2)
    )
    save(open_store(second, settings, restored), 3)
    assert sorted(path.name for path in second.checkpoints_directory.iterdir()) == ["step_000002", "step_000003"]


def test_a_new_run_from_the_checkpoint_of_another_has_its_own_name(tmp_path: Path) -> None:
    settings = CheckpointSettings()
    first, second = directory(tmp_path / "first"), directory(tmp_path / "second")
    store = open_store(first, settings)
    save(store, 1)
    assert open_store(second, settings, ResumePoint(store.open(1))).run_id == "second"


def test_a_quickstart_is_found_by_its_directory_and_by_its_warm_up(tmp_path: Path) -> None:
    root = tmp_path / "run"
    warm_start = root / quickstart.WARM_START
    warm_start.mkdir(parents=True)
    assert quickstart.root_of(root) is None
    (root / quickstart.CHOICES).write_text("{}")
    assert quickstart.root_of(root) == root
    assert quickstart.root_of(warm_start) == root
    assert quickstart.root_of(root / "control_sft") is None
    assert quickstart.root_of(tmp_path) is None


def test_a_run_is_continued_by_the_command_in_its_configuration(tmp_path: Path) -> None:
    run = directory(tmp_path / "run")
    assert command_of(run) == "sft"
    run.config_file.write_text("recipe: {command: eval}\n")
    with pytest.raises(OptionsError, match="eval") as caught:
        command_of(run)
    assert caught.value.problem.code == "resume.unknown_command"


def test_what_saved_nothing_is_started_again_by_the_remedy(tmp_path: Path) -> None:
    run = directory(tmp_path / "a run")
    machine = SimpleNamespace(is_first=True)
    resolved = SimpleNamespace(
        settings=SimpleNamespace(checkpoint=CheckpointSettings(save_path=str(run.path))),
        origins={"load_checkpoint": ""},
    )
    with pytest.raises(OptionsError) as started:
        run_lifecycle.start(Continuation(resolved), ["rft-train"], machine, 1, Facts({}, {}, {}))  # pyright: ignore[reportArgumentType]
    assert started.value.problem.do == f"rm -r '{run.path}'"
    save(CheckpointStore(run.checkpoints_directory, keep_last=None, keep_bytes=None, run_id="a run"), 0)
    with pytest.raises(OptionsError) as again:
        run_lifecycle.start(Continuation(resolved), ["rft-train"], machine, 1, Facts({}, {}, {}))  # pyright: ignore[reportArgumentType]
    assert again.value.problem.do.startswith("rft-train resume")
