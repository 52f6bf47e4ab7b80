"""A loop of one's own goes on to the bit, and a checkpoint that cannot be used is an error."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rft_cli.pretrainer.checkpoint_manager import CheckpointManager, weights_of
from rft_cli.pretrainer.configs import CheckpointConfig
from rft_core.errors import CheckpointError


class Wrapped(nn.Module):
    """A model in torch.compile and DDP, as far as the names of weights go."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = nn.Module()
        self.module._orig_mod = model


class Loop:
    """A small model with dropout, whose data are drawn at random."""

    def __init__(self, width: int = 4, *, is_wrapped: bool = False) -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        self.model = nn.Sequential(nn.Linear(3, width), nn.Dropout(0.5), nn.Linear(width, 1))
        self.wrapped = Wrapped(self.model) if is_wrapped else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)

    def epoch(self) -> float:
        drawn = torch.randn(5, 3) * random.random() + np.random.rand()
        loss = self.model(drawn).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def save(self, manager: CheckpointManager, epoch: int, loss: float) -> Path | None:
        return manager.save_checkpoint(epoch, self.wrapped, self.optimizer, self.scheduler, loss=loss)

    def load(self, manager: CheckpointManager) -> tuple[int, float]:
        return manager.load_checkpoint(self.model, self.optimizer, self.scheduler)


def manager(folder: Path, **changes: object) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(checkpoint_dir=str(folder), **changes))  # type: ignore[arg-type]


def run(loop: Loop, keeper: CheckpointManager, first: int, last: int) -> dict[str, Tensor]:
    for epoch in range(first, last):
        loop.save(keeper, epoch, loop.epoch())
    return {name: value.clone() for name, value in weights_of(loop.model).items()}


def test_a_loop_that_goes_on_ends_with_the_weights_of_one_that_was_never_stopped(tmp_path: Path) -> None:
    straight = run(Loop(), manager(tmp_path / "a"), 0, 4)
    run(Loop(), manager(tmp_path / "b"), 0, 2)
    again, keeper = Loop(), manager(tmp_path / "b", resume_from_checkpoint="auto")
    random.random()  # what another program draws before does not count
    first, best = again.load(keeper)
    assert first == 2
    assert math.isfinite(best)
    resumed = run(again, keeper, first, 4)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    files = [path.suffix for path in (tmp_path / "b").rglob("*") if path.is_file()]
    assert set(files) == {".safetensors", ".json"}


def test_names_of_weights_are_those_of_the_model_without_its_wrappers(tmp_path: Path) -> None:
    wrapped = Loop(is_wrapped=True)
    assert all(name.startswith("module._orig_mod.") for name in wrapped.wrapped.state_dict())
    wrapped.save(manager(tmp_path), 0, 1.0)
    plain = Loop()
    plain.epoch()
    plain.load(manager(tmp_path, resume_from_checkpoint=str(tmp_path)))
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), wrapped.model.parameters(), strict=True))


def test_another_model_is_refused_with_each_shape_and_nothing_is_changed(tmp_path: Path) -> None:
    loop = Loop()
    loop.save(manager(tmp_path), 0, 1.0)
    other = Loop(width=6)
    before = {name: value.clone() for name, value in weights_of(other.model).items()}
    with pytest.raises(CheckpointError) as caught:
        other.load(manager(tmp_path, resume_from_checkpoint="auto"))
    assert caught.value.problem.code == "checkpoint.other_model"
    assert "0.weight has shape (4, 3) in the checkpoint and (6, 3) now" in caught.value.problem.what
    assert all(torch.equal(before[name], value) for name, value in weights_of(other.model).items())


@pytest.mark.parametrize("named", ["auto", "missing"])
def test_a_checkpoint_that_is_not_there_is_an_error(named: str, tmp_path: Path) -> None:
    where = named if named == "auto" else str(tmp_path / named)
    with pytest.raises(CheckpointError):
        Loop().load(manager(tmp_path, resume_from_checkpoint=where))
    assert list(tmp_path.iterdir()) == []


def test_the_last_and_the_best_are_kept_and_a_loss_that_is_no_number_is_not_the_best(tmp_path: Path) -> None:
    loop, keeper = Loop(), manager(tmp_path, keep_last_n=1)
    for epoch, loss in enumerate([2.0, 0.5, math.nan, 1.0]):
        loop.save(keeper, epoch, loss)
    assert keeper.best_loss == 0.5
    again = manager(tmp_path, keep_last_n=1, resume_from_checkpoint="auto")
    assert loop.load(again) == (4, 0.5)
    loop.save(again, 4, 3.0)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step_")) == [
        "step_000002",
        "step_000005",
    ]


def test_an_epoch_between_two_saves_is_not_written_and_other_ranks_write_nothing(tmp_path: Path) -> None:
    loop, keeper = Loop(), manager(tmp_path, save_interval=2, save_best=False)
    assert loop.save(keeper, 0, 1.0) is None
    assert loop.save(keeper, 1, 1.0) == tmp_path / "step_000002"
    other = CheckpointManager(CheckpointConfig(checkpoint_dir=str(tmp_path / "b")), rank=1)
    assert loop.save(other, 0, 1.0) is None
    assert not (tmp_path / "b").exists()


def test_a_state_that_was_not_saved_is_named(tmp_path: Path) -> None:
    loop = Loop()
    manager(tmp_path).save_checkpoint(0, loop.model, loop.optimizer)
    with pytest.raises(CheckpointError, match="no state of a scheduler"):
        loop.load(manager(tmp_path, resume_from_checkpoint="auto"))
