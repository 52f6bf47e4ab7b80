"""What a writer gives to the store: now or in the background, from the first rank or from all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.checkpoints import writer
from rft.checkpoints.writer import ResumePoint, StoreWriter, make_writer, open_store
from rft_core.checkpoint_places import add_place
from rft_dist.checkpoint_format.layout import run_tag
from rft_dist.checkpoints.retention import Removal
from rft_dist.settings import CheckpointSettings
from rft_trainer.runs.directory import RunDirectory


class Parts:
    """A policy's part of a checkpoint."""

    def local_weights(self) -> Any:
        return {"w": 1}

    def directory_writer(self) -> str:
        return "directory"

    def snapshot(self, copy: Any) -> str:
        return "snapshot"


class Saves:
    """Saves in the background that note what they are given."""

    made: list[Saves] = []  # noqa: RUF012

    def __init__(self, store: Any) -> None:
        self.store, self.begun, self.failed, self.waited = store, list[Any](), False, 0
        Saves.made.append(self)

    def begin(self, step: int, **options: Any) -> None:
        self.begun.append((step, options))

    def wait(self) -> None:
        self.waited += 1


@pytest.fixture(autouse=True)
def saves(monkeypatch: pytest.MonkeyPatch) -> list[Saves]:
    Saves.made = []
    monkeypatch.setattr(writer, "BackgroundSaves", Saves)
    monkeypatch.setattr(writer.StoreExchange, "beside", lambda ranks: ("beside", ranks))
    return Saves.made


def made(rank: int = 0, world_size: int = 1, **options: Any) -> tuple[StoreWriter, list[Any], Any]:
    opened: list[Any] = []
    saved: list[Any] = []
    ranks: Any = SimpleNamespace(rank=rank, world_size=world_size)

    def open_(exchange: Any) -> Any:
        opened.append(exchange)
        return SimpleNamespace(save=lambda step, **given: saved.append((step, given)), opened=opened)

    one = StoreWriter(open_, {"run": 1, "a": 2}, ranks, **options)
    return one, saved, opened


def save(one: StoreWriter, step: int = 3) -> None:
    tensors = {"whole": {"t": 1}, "blocks": [1, 2]}
    one.save(step, tensors=tensors, records={"r": 1}, policy=Parts(), metadata={"a": 5})  # type: ignore[arg-type]


def test_a_store_is_opened_once_and_first_when_something_is_saved(saves: list[Saves]) -> None:
    one, saved, opened = made()
    assert opened == []
    save(one)
    save(one, 4)
    assert len(opened) == 1
    assert [step for step, _ in saved] == [3, 4]
    given = saved[0][1]
    assert given["tensors"] == {"whole": {"t": 1}, "blocks": [1, 2]}
    assert (given["records"], given["metadata"]) == ({"r": 1}, {"run": 1, "a": 5})
    assert (given["model_tensors"], given["model_writer"]) == ({"w": 1}, "directory")
    assert not one.failed
    one.wait()
    assert saves == []


def test_what_every_rank_holds_comes_from_the_first_and_blocks_from_all() -> None:
    one, saved, _ = made(rank=1, world_size=2)
    save(one)
    assert saved[0][1]["tensors"] == {"whole": {}, "blocks": [1, 2]}


@pytest.mark.parametrize("world_size", [1, 2])
def test_in_the_background_copies_are_saved_on_a_channel_of_their_own(saves: list[Saves], world_size: int) -> None:
    one, saved, opened = made(world_size=world_size, in_background=True)
    assert not one.failed
    save(one)
    save(one, 4)
    assert saved == []
    [background] = saves
    assert [step for step, _ in background.begun] == [3, 4]
    given = background.begun[0][1]
    assert given["snapshot"](None) == "snapshot"
    assert (given["records"], given["metadata"], given["model_tensors"]) == ({"r": 1}, {"run": 1, "a": 5}, {"w": 1})
    assert given["tensors"]["whole"] == {"t": 1}
    [exchange] = opened
    assert (exchange[0] == "beside") if world_size == 2 else exchange.world_size == 1
    background.failed = True
    assert one.failed
    one.wait()
    assert background.waited == 1


def test_a_store_keeps_within_the_limits_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(writer, "CheckpointStore", lambda path, **options: asked.append({"path": path, **options}))
    directory = RunDirectory(tmp_path / "run")
    settings = CheckpointSettings(max_ckpt_num=3, max_ckpt_mem=7)

    def point(folder: Path) -> Any:
        manifest = SimpleNamespace(run_id="first name")
        return ResumePoint(SimpleNamespace(path=folder / "step_000001", manifest=manifest))  # type: ignore[arg-type]

    exchange: Any = object()
    open_store(directory, settings, None, exchange)
    open_store(directory, settings, point(directory.checkpoints_directory))
    open_store(directory, settings, point(tmp_path / "other" / "checkpoints"))
    assert [row["run_id"] for row in asked] == ["run", "first name", "run"]
    assert asked[0]["path"] == directory.checkpoints_directory
    assert (asked[0]["keep_last"], asked[0]["keep_bytes"], asked[0]["exchange"]) == (3, 7_000_000_000, exchange)
    assert [row["fallback"] for row in asked] == [None] * 3
    asked.clear()
    place = tmp_path / "second" / f"run-{run_tag(str(directory.path.absolute()))}"
    place.mkdir(parents=True)
    directory.checkpoints_directory.mkdir(parents=True)
    add_place(directory.checkpoints_directory, place)
    elsewhere = replace(settings, fallback_save_path=str(tmp_path / "second"))
    open_store(directory, elsewhere, point(place))
    assert (asked[0]["fallback"], asked[0]["run_id"]) == (place, "first name"), "it continues in its own directory"
    for background in (True, False):
        one: Any = make_writer(directory, CheckpointSettings(async_save=background), {}, exchange, None)
        assert one._in_background is background
        asked.clear()
        one._open_store(exchange)
        assert asked[0]["exchange"] is exchange
        again: Any = make_writer(directory, settings, {}, exchange, point(directory.checkpoints_directory))
        again._open_store(exchange)
        assert (asked[1]["run_id"], asked[1]["keep_last"]) == ("first name", 3)


def test_a_point_to_continue_from_is_read_from_its_checkpoint() -> None:
    checkpoint: Any = SimpleNamespace(
        step=4,
        model_directory=Path("m"),
        manifest=SimpleNamespace(components=("ledger", "optimizer")),
        has_records=lambda name: name == "ledger",
        records=lambda name: {"of": name},
    )
    point = ResumePoint(checkpoint)
    assert (point.step, point.model_directory) == (4, Path("m"))
    assert point.records() == {"ledger": {"of": "ledger"}}


@pytest.mark.parametrize("in_background", [True, False])
def test_what_retention_did_is_told_once_by_the_first_rank(
    saves: list[Saves], in_background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    removed = (Removal(2, 2**30, "keep_last = 3"), Removal(3, 2**29, "keep_last = 3"))
    problem = "step_000001 was not removed: Permission denied"
    info = SimpleNamespace(removed=removed, problems=(problem,), refused=None)
    for rank in (0, 1):
        one, _, _ = made(rank=rank, in_background=in_background)
        one._open_store = lambda _: SimpleNamespace(save=lambda *_, **__: info)  # type: ignore[method-assign]
        save(one)
        for background in saves:
            background.wait = lambda: info  # type: ignore[method-assign]
        one.wait()
        one.wait()
    assert caplog.messages == [
        "deleted step_000002, step_000003 (max_ckpt_num = 3): 1.500 GiB freed",
        f"{problem}; it is tried again after the next save",
    ]


def test_a_save_that_went_to_the_second_directory_is_told_with_what_to_free(caplog: pytest.LogCaptureFixture) -> None:
    refused = SimpleNamespace(what="cannot save step 2: RUN needs 3 GiB, has 1 GiB", do="free 2 GiB on RUN")
    info = SimpleNamespace(removed=(), problems=(), refused=refused, step=2, path=Path("/second/run-1/step_000002"))
    for rank in (0, 1):
        one, _, _ = made(rank=rank)
        one._open_store = lambda _: SimpleNamespace(save=lambda *_, **__: info)  # type: ignore[method-assign]
        save(one)
        one.wait()
    assert caplog.messages == [
        f"{refused.what}; step 2 is in /second/run-1/step_000002 in its place, where a resume finds it; to save in "
        f"the run again: {refused.do}"
    ]


def test_a_limit_of_bytes_is_told_as_its_setting(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    one, _, _ = made()
    info = SimpleNamespace(removed=(Removal(2, 2**30, "keep_bytes = 7000000000"),), problems=(), refused=None)
    one._open_store = lambda _: SimpleNamespace(save=lambda *_, **__: info)  # type: ignore[method-assign]
    save(one)
    assert caplog.messages == ["deleted step_000002 (max_ckpt_mem = 7): 1.000 GiB freed"]
