"""Guards of a run's steps are made from its settings, and the first rank records what they find."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rft.parallel.step_guards import make_guards, make_weight_check
from rft_trainer.runs.checkpointing import Progress
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.settings.run import RunSettings
from rft_trainer.testing.bigram import OneRank
from rft_trainer.update.numeric_guard import Diagnosis, RowFault


def started(path: Path, *, is_first: bool) -> Any:
    machine = SimpleNamespace(is_first=is_first, collectives=OneRank())
    return SimpleNamespace(machine=machine, directory=RunDirectory(path), resume_command="rft-train resume here")


def test_each_model_has_its_guard_and_progress_saves_them(tmp_path: Path) -> None:
    settings = RunSettings(max_rows_set_aside=3, max_norm_spike=8.0)
    for is_first in (True, False):
        run, progress = started(tmp_path / str(is_first), is_first=is_first), Progress(step=4)
        run.directory.path.mkdir()
        guards = make_guards(settings, run, progress, ["policy", "critic"], keeps_out=True)
        assert progress.guards is guards
        assert [guard.part for guard in guards.values()] == ["policy", "critic"]
        guard = guards["critic"]
        assert (guard.max_rows, guard.spike_factor, guard.keeps_out) == (3, 8.0, True)
        assert guard.record_file == str(run.directory.numerics_file)
        assert guard.resumed_with("--max_rows_set_aside 6") == "rft-train resume here --max_rows_set_aside 6"
        guard.resume_command = "rft.open_loop(..., checkpoint=DIRECTORY)"
        changed = guard.resumed_with("--no-packing_samples --micro_train_batch_size 2")
        assert changed == "rft.open_loop(..., checkpoint=DIRECTORY, packing_samples=False, micro_train_batch_size=2)"
        guard.decide(Diagnosis((RowFault(("x",), "loss", 0),)), float("nan"), num_units=9, attempt=0, where="update 9")
        run.directory.close()
        assert run.directory.numerics_file.exists() == is_first
        if is_first:
            assert '"step":5' in run.directory.numerics_file.read_text().replace(" ", "")
        again = Progress(guards={"critic": type(guard)(keeps_out=True)})
        again.load_state(progress.state())
        assert again.guards["critic"].set_aside == {"x": "loss"}


def test_weights_and_moments_of_every_model_are_checked_where_that_is_asked(tmp_path: Path) -> None:
    run = started(tmp_path, is_first=True)

    def model(shards: bool) -> Any:
        return SimpleNamespace(
            weights=SimpleNamespace(local_shards=lambda: [("w", torch.ones(2))]),
            optimizer=SimpleNamespace(state_tensors=lambda: {"exp_avg/w": torch.zeros(2)}),
            shards_weights=shards,
        )

    assert make_weight_check(RunSettings(), run, [model(False)]).every == 0
    check = make_weight_check(RunSettings(weight_check_steps=5), run, [model(False), model(False)])
    assert [name for name, _ in check.tensors()] == ["w", "exp_avg/w", "1/w", "1/exp_avg/w"]
    assert (check.every, check.replicated) == (5, True)
    sharded = make_weight_check(RunSettings(weight_check_steps=5), run, [model(False), model(True)])
    assert not sharded.replicated
