"""What a power loss leaves: after a save its checkpoint, at any instant before it the earlier one, and never a part."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rft_core import durable_files
from rft_dist.checkpoint_format.layout import pin_path
from rft_dist.checkpoints.reader import newest_verified

if TYPE_CHECKING:
    from support.durable_disk import DurableDisk, Event
    from support.power_loss import PowerLoss

SCENARIOS = {
    "the next step": [(1, 0), (2, 0)],
    "the same step again": [(1, 0), (1, 7)],
    "steps with pruning, and one again": [(1, 0), (2, 0), (3, 0), (3, 7)],
}


def state_on_disk(run, disk: DurableDisk, target: Path) -> tuple[int, int] | None:
    """The newest state that verifies in what the disk holds."""
    found = newest_verified(disk.copy_to(run.directory, target)).checkpoint
    return None if found is None else run.state_of(found)


@pytest.fixture
def run(make_run, memory_path: Path):
    """A run in memory, whose files the recording layer keeps."""
    return make_run(memory_path / "run" / "checkpoints")


def test_a_save_is_on_the_disk_when_it_returns(run, memory_path: Path, durable_disk: DurableDisk) -> None:
    store = run.store()
    for step in (1, 2):
        run.save(store, step)
        assert state_on_disk(run, durable_disk, memory_path / f"lost_{step}") == (step, 0)


def test_the_folder_of_a_run_is_on_the_disk_before_its_first_checkpoint(
    run, memory_path: Path, durable_disk: DurableDisk
) -> None:
    run.directory.parent.mkdir()
    run.save(run.store(), 1)
    found = newest_verified(durable_disk.copy_to(run.directory.parent, memory_path / "lost") / "checkpoints")
    assert found.checkpoint is not None


@pytest.mark.parametrize("by_ranks", [False, True], ids=["one rank", "two ranks"])
def test_a_directory_takes_its_final_name_after_all_that_is_in_it_is_on_the_disk(
    run, durable_disk: DurableDisk, by_ranks: bool
) -> None:
    if by_ranks:
        run.save_by_ranks(2, 1)
    else:
        run.save(run.store(), 1)
    [published] = [
        event for event in durable_disk.events if event.path.name == "step_000001" and event.kind == "rename"
    ]
    assert published.unsynced == ()


@pytest.mark.parametrize("step", [2, 1], ids=["the next step", "the same step again"])
def test_a_power_loss_at_any_instant_leaves_the_old_state_or_the_new(
    run, memory_path: Path, durable_disk: DurableDisk, step: int
) -> None:
    run.save(run.store(), 1)
    store = run.store(keep_last=1)
    found: list[tuple[int, int] | None] = []

    def lose_power(event: Event) -> None:
        if event.path.is_relative_to(run.directory) and len(found) < 500:
            found.append(None)
            durable_disk.after = None  # what is read there is no part of the save
            found[-1] = state_on_disk(run, durable_disk, memory_path / f"lost_{len(found)}")
            durable_disk.after = lose_power

    durable_disk.after = lose_power
    run.save(store, step, salt=7)
    durable_disk.after = None
    old, new = (1, 0), (step, 7)
    assert len(found) > 15
    assert found == [old] * found.count(old) + [new] * found.count(new), "and once it is the new one it stays so"
    assert found[-1] == new


def unreadable_states(run, power_loss: PowerLoss, scratch: Path, states: list[tuple[int, int]], most: int) -> list[str]:
    """Save the states one after another, and name each state of the disk that holds neither the last nor the next.

    A store that is opened in what the disk holds puts in order what was left; it may not lose it either.
    """
    store = run.store(keep_last=1)
    for step, salt in states:
        run.save(store, step, salt=salt)
        power_loss.acknowledged = (step, salt)
    power_loss.note("the end")
    lost: list[str] = []
    for number, (instant, state) in enumerate(power_loss.states(1, most)):
        folder = state.write(scratch / f"{number}")
        done = instant.acknowledged
        allowed = {None, states[0]} if done is None else {done, *states[states.index(done) + 1 :][:1]}
        found = newest_verified(folder / "checkpoints").checkpoint
        first = None if found is None else run.state_of(found)
        run_again = type(run)(folder / "checkpoints")
        run_again.store()
        found = newest_verified(run_again.directory).checkpoint
        second = None if found is None else run.state_of(found)
        if first not in allowed or second != first:
            lost.append(f"before {instant.before}: {first}, then {second}, instead of {allowed}")
        shutil.rmtree(folder)
    return lost


@pytest.fixture
def power_loss(run, power_loss_below: Callable[[Path], PowerLoss]) -> PowerLoss:
    """All that the disk may hold of a run's folder, from now on."""
    run.directory.mkdir(parents=True)
    return power_loss_below(run.directory.parent)


def test_no_part_of_what_was_not_synced_costs_an_acknowledged_checkpoint(
    run, memory_path: Path, power_loss: PowerLoss
) -> None:
    assert unreadable_states(run, power_loss, memory_path, SCENARIOS["the next step"], 100) == []
    assert sum(instant.num_states for instant in power_loss.instants) > 10**4


@pytest.mark.parametrize(
    "number", [pytest.param(700, id="many"), pytest.param(17_000, id="night", marks=[pytest.mark.night])]
)
@pytest.mark.parametrize("states", SCENARIOS.values(), ids=SCENARIOS)
def test_thousands_of_parts_of_what_was_not_synced_cost_no_acknowledged_checkpoint(
    run, memory_path: Path, power_loss: PowerLoss, states: list[tuple[int, int]], number: int
) -> None:
    assert unreadable_states(run, power_loss, memory_path, states, number) == []
    print(f"\nR4: {len(list(power_loss.states(1, number)))} states of {len(power_loss.instants)} instants")


def test_without_syncs_of_directories_such_states_cost_a_checkpoint(
    run, memory_path: Path, power_loss: PowerLoss, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_files, "sync_directory", lambda _: None)
    assert unreadable_states(run, power_loss, memory_path, SCENARIOS["the next step"], 50)


def test_a_removed_checkpoint_is_gone_from_the_disk_when_the_save_returns(
    run, memory_path: Path, durable_disk: DurableDisk
) -> None:
    store = run.store(keep_last=1)
    for step in (1, 2, 3):
        run.save(store, step)
    lost = durable_disk.copy_to(run.directory, memory_path / "lost")
    assert [path.name for path in lost.iterdir()] == ["step_000003"]


def test_a_pinned_checkpoint_stays_however_many_follow(small_run) -> None:
    store = small_run.store(keep_last=1)
    small_run.save(store, 1)
    pin_path(small_run.directory, 1).touch()
    for step in (2, 3):
        small_run.save(store, step)
    assert small_run.names() == ["step_000001", "step_000001.pin", "step_000003"]
    pin_path(small_run.directory, 1).unlink()
    small_run.save(store, 4)
    assert small_run.names() == ["step_000004"]
