"""What the store is asked for by a save beside training, from which thread, and when there is memory for a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core import fault_points
from rft_dist.checkpoint_format.shards import Shard
from rft_dist.checkpoints import async_writer
from rft_dist.checkpoints.async_writer import BackgroundSaves, Copy
from rft_dist.checkpoints.host_copies import RESERVE_BYTES, HostCopies
from rft_dist.checkpoints.writer import encode_record


class Store:
    """In the place of a `CheckpointStore`: notes what it is asked to save, in which thread."""

    def __init__(self, directory: Path, *, is_first: bool = True) -> None:
        self.directory, self.is_first = directory, is_first
        self.saved: list[dict[str, Any]] = []
        self.threads: list[threading.Thread] = []
        self.error: Exception | None = None

    def save(self, step: int, *, model_writer: Callable[[Path], None], **what: Any) -> str:
        self.threads.append(threading.current_thread())
        model_writer(self.directory)
        self.saved.append({"step": step, **what})
        if self.error is not None:
            raise self.error
        return f"saved {step}"

    @property
    def beside(self) -> list[bool]:
        """Of each save, whether another thread did it."""
        return [thread is not threading.current_thread() for thread in self.threads]


def saves_of(store: Any) -> BackgroundSaves:
    return BackgroundSaves(store)


class Model:
    """Its weights are what the writer writes."""

    def __init__(self) -> None:
        self.weight = torch.ones(2, 2, requires_grad=True)
        self.written: list[Tensor] = []

    def snapshot(self, copy: Copy) -> Callable[[Path], None]:
        copied = copy("weight", self.weight)
        return lambda directory: self.written.append(copied)


def begin(saves: BackgroundSaves, step: int, model: Model | None = None, **changes: Any) -> dict[str, Tensor]:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
    given: dict[str, Any] = {"records": {"ledger": {"x": 1}}, "metadata": {"loss": 0.5}} | changes
    saves.begin(step, tensors={"optimizer": tensors}, snapshot=(model or Model()).snapshot, **given)
    return tensors


def values(shards: Mapping[str, list[Shard]]) -> dict[str, list[Any]]:
    return {name: [(shard.name, shard.data.tolist()) for shard in part] for name, part in shards.items()}


OPTIMIZER = {"optimizer": [("a", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]), ("b", [1.0] * 4)]}


@pytest.mark.parametrize("memory", [None, 0])
def test_the_store_is_given_everything_at_once_or_beside_training(
    memory: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_writer, "free_host_memory", lambda: memory)
    store, model = Store(tmp_path), Model()
    saves = saves_of(store)
    assert saves.wait() is None
    weights = {"part": torch.full((3,), 2.0)}
    tensors = begin(saves, 5, model, model_tensors=weights)
    if memory is not None:
        assert store.beside == [False]
        assert not model.written[0].requires_grad
        assert model.written[0].data_ptr() == model.weight.data_ptr(), "no copy is made"
    assert saves.wait() == "saved 5"
    assert saves.wait() == "saved 5", "the last save is told as often as one asks"
    assert store.beside == [memory is None]
    [saved] = store.saved
    assert values(saved["tensors"]) == OPTIMIZER
    assert (saved["step"], saved["metadata"]) == (5, {"loss": 0.5})
    assert {name: tensor.tolist() for name, tensor in saved["model_tensors"].items()} == {"part": [2.0] * 3}
    assert model.written[0].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    shared = saved["tensors"]["optimizer"][0].data.data_ptr() == tensors["a"].data_ptr()
    assert shared == (memory is not None)


def test_what_training_changes_afterwards_is_not_saved(tmp_path: Path) -> None:
    store, model = Store(tmp_path), Model()
    saves, may_write = saves_of(store), threading.Event()
    save = store.save

    def later(step: int, **what: Any) -> str:
        may_write.wait(30)
        return save(step, **what)

    store.save = later  # type: ignore[method-assign]
    weights, metadata, records = {"part": torch.ones(3)}, {"loss": 0.5}, {"ledger": {"x": 1}}
    tensors = begin(saves, 1, model, model_tensors=weights, metadata=metadata, records=records)
    for tensor in (*tensors.values(), weights["part"], model.weight.detach()):
        tensor.zero_()
    metadata["loss"] = 9.0
    records["ledger"]["x"] = 9
    may_write.set()
    saves.wait()
    [saved] = store.saved
    assert values(saved["tensors"]) == OPTIMIZER
    assert saved["metadata"] == {"loss": 0.5}
    assert saved["records"]["ledger"] == encode_record("ledger", {"x": 1}, step=1, directory=tmp_path)
    assert saved["model_tensors"]["part"].tolist() == [1.0] * 3
    assert model.written[0].tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("memory", [None, 0])
def test_only_the_first_rank_writes_the_model_s_directory(
    memory: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_writer, "free_host_memory", lambda: memory)
    store, model = Store(tmp_path, is_first=False), Model()
    saves = saves_of(store)
    begin(saves, 5, model)
    assert saves.wait() == "saved 5"
    assert model.written == []
    assert list(tmp_path.iterdir()) == []
    assert store.saved[0]["model_tensors"] is None


def test_copies_are_complete_before_the_thread_starts_and_a_stop_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(HostCopies, "finish", lambda copies: order.append("copied"))
    store = Store(tmp_path)
    fault_points.install(order.append)
    saves = saves_of(store)
    begin(saves, 1)
    saves.wait()
    assert order == ["copied", "background_save.copied", "background_save.written"]
    assert store.threads[0].daemon


def test_an_error_is_raised_once_and_the_next_save_may_succeed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saves = saves_of(store)
    store.error = OSError("the disk is full")
    begin(saves, 1)
    with pytest.raises(OSError, match="full"):
        saves.wait()
    assert not saves.failed
    assert saves.wait() is None
    store.error = None
    begin(saves, 2)
    assert saves.wait() == "saved 2"


def test_there_is_room_for_half_more_than_what_is_given_beside_a_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 numbers of the optimizer and 2 of the model are 48 bytes; half of that is the estimate for its directory."""
    weights = {"part": torch.ones(2)}
    free = [0]
    monkeypatch.setattr(async_writer, "free_host_memory", lambda: free[0])

    def beside(saves: BackgroundSaves, store: Store, memory: int) -> bool:
        free[0] = memory
        begin(saves, 1, model_tensors=weights)
        saves.wait()
        return store.beside[-1]

    store = Store(tmp_path)
    saves = saves_of(store)
    assert not beside(saves, store, RESERVE_BYTES + 71)
    assert beside(saves, store, RESERVE_BYTES + 72)
    # 48 bytes of copies and 16 of the model's weight are there now and used again
    assert not beside(saves, store, RESERVE_BYTES + 7)
    assert beside(saves, store, RESERVE_BYTES + 8)
    assert not beside(saves, store, RESERVE_BYTES - 1)


def test_buffers_that_are_there_already_are_no_memory_that_is_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: list[int | None] = [None]
    monkeypatch.setattr(async_writer, "free_host_memory", lambda: free[0])
    store = Store(tmp_path)
    saves = saves_of(store)
    begin(saves, 1, model_tensors={"part": torch.ones(1000)})
    for step, memory in enumerate((RESERVE_BYTES, RESERVE_BYTES - 1), 2):
        free[0] = memory
        begin(saves, step)
    saves.wait()
    assert store.beside == [True, True, False], "the reserve stays whole whatever is used again"
