"""One save: in which order it goes about, what it refuses before and after, and what it leaves."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core import fault_points
from rft_core.errors import CheckpointError, StorageError
from rft_dist.checkpoint_format import layout
from rft_dist.checkpoint_format.manifest import Manifest
from rft_dist.checkpoint_format.shards import Shard, full_shard
from rft_dist.checkpoints import writer
from rft_dist.checkpoints.reader import inspect, newest_verified, open_verified, read_manifest
from rft_dist.checkpoints.save_plan import Plan, announce
from rft_dist.checkpoints.writer import SaveRequest, encode_record, restore_displaced, write_checkpoint
from rft_dist.collectives import SingleProcess
from rft_dist.testing.checkpoint_ranks import ThreadExchange, run_ranks


def config(salt: int) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "config.json").write_text(f"{salt}")

    return write


def request(directory: Path, step: int = 7, salt: int = 0, **changes: Any) -> SaveRequest:
    directory.mkdir(exist_ok=True)
    base = SaveRequest(
        directory=directory,
        run_id="r",
        step=step,
        parent_step=5,
        sequence=3,
        shards={"opt": [full_shard("w", torch.full((4, 3), float(salt)))]},
        records={"ledger": {"salt": salt}},
        components=("ledger", "opt"),
        model_writer=config(salt),
        metadata={"best": 0.5},
        model_bytes=1000,
        last_good=None,
        exchange=SingleProcess(),
    )
    return replace(base, **changes)


def save(directory: Path, step: int = 7, salt: int = 0, **changes: Any) -> Manifest:
    made = request(directory, step, salt, **changes)
    return write_checkpoint(made, Plan((announce(step, made.shards, made.model_tensors),)))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def salt_of(path: Path) -> int:
    checkpoint = open_verified(path)
    salt = checkpoint.records("ledger")["salt"]
    assert torch.equal(checkpoint.tensors("opt")["w"], torch.full((4, 3), float(salt)))
    assert (checkpoint.model_directory / "config.json").read_text() == f"{salt}"
    return salt


def refused(directory: Path, code: str, **changes: Any) -> None:
    with pytest.raises((CheckpointError, StorageError)) as caught:
        save(directory, **changes)
    assert caught.value.problem.code == code


def at(point: str, action: Callable[[], Any]) -> None:
    """Do this at a point of the save."""
    fault_points.install(lambda name: action() if name == f"checkpoint.{point}" else None)


def test_the_manifest_says_what_was_saved_when_and_with_what(tmp_path: Path) -> None:
    made = save(tmp_path, metadata={"best": 0.5, "b": [1]})
    assert names(tmp_path) == ["step_000007"]
    assert read_manifest(tmp_path / "step_000007") == made
    assert (made.run_id, made.step, made.parent_step, made.sequence) == ("r", 7, 5, 3)
    assert (made.components, dict(made.sharded), made.format_version) == (("ledger", "opt"), {}, 1)
    assert [entry.path for entry in made.files] == ["model/config.json", "state/ledger.json", "state/opt.safetensors"]
    versions = made.metadata["versions"]
    assert dict(made.metadata) == {"versions": versions, "best": 0.5, "b": [1]}
    assert set(versions) == {"python", "rft-dist", "torch", "safetensors"}
    assert versions["torch"] == version("torch")
    created = datetime.fromisoformat(made.created)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", made.created)
    assert abs(datetime.now(UTC) - created) < timedelta(minutes=5)
    assert salt_of(tmp_path / "step_000007") == 0


def test_a_save_goes_about_in_this_order_and_flushes_before_it_renames(tmp_path: Path) -> None:
    points: list[str] = []

    def recorded(**changes: Any) -> list[str]:
        points.clear()
        fault_points.install(points.append)
        save(tmp_path, **changes)
        short = [point.removeprefix("checkpoint.").removesuffix(".before") for point in points if point[-5:] == "efore"]
        return [point for point in short if point not in ("file.open", "file.write")]

    state = ["file.sync", "file.sync", "directory.sync", "model.write", "file.sync", "directory.sync"]
    staged = ["space", "mkdir", "mkdir", "mkdir", *state, "file.sync", "directory.sync"]
    published = ["publish", "directory.sync", "verify"]
    assert recorded() == [*staged, *published]
    removed = ["unlink"] * 2 + ["rmdir"] + ["unlink"] * 2 + ["rmdir"] * 2 + ["directory.sync"]
    replaced = recorded(salt=1)
    assert replaced[: len(staged) + 5] == [*staged, "displace", "directory.sync", *published]
    assert sorted(replaced[len(staged) + 5 :]) == sorted(removed)
    assert replaced[-1] == "directory.sync"
    assert names(tmp_path) == ["step_000007"]
    assert salt_of(tmp_path / "step_000007") == 1


def test_a_save_begins_only_where_all_of_its_bytes_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = request(tmp_path, model_tensors={"v": torch.ones(5)})
    plan = Plan((announce(7, made.shards, made.model_tensors),))
    need = 65536 + 1000 + plan.num_tensor_bytes + 20 + len(b'{"salt":0}\n')
    asked: list[Path] = []

    def free(path: Path) -> int:
        asked.append(path)
        return need - 1

    monkeypatch.setattr(writer, "free_bytes", free)
    refused(tmp_path, "checkpoint.too_little_space", model_tensors={"v": torch.ones(5)})
    assert asked == [tmp_path]
    assert names(tmp_path) == []
    monkeypatch.setattr(writer, "free_bytes", lambda _: need)
    write_checkpoint(made, plan)
    assert names(tmp_path) == ["step_000007"]


@pytest.mark.parametrize(
    "changes",
    [
        {"components": ("ledger", "../opt")},
        {"records": {"ledger": {"x": float("nan")}}},
        {"records": {"ledger": {1: 2}}},
        {"metadata": {"x": object()}},
    ],
    ids=["name", "number", "key", "metadata"],
)
def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path: Path, changes: dict[str, Any]) -> None:
    at("mkdir.before", lambda: pytest.fail("a directory was made"))
    refused(tmp_path, "checkpoint.bad_component", **changes)
    assert names(tmp_path) == []


def test_a_record_that_was_encoded_before_is_written_as_it_is(tmp_path: Path) -> None:
    value = {"b": 1, "a": [2]}
    encoded = encode_record("ledger", value, step=7, directory=tmp_path)
    value["b"] = 2
    assert encoded.content == b'{"a":[2],"b":1}\n'
    save(tmp_path, records={"ledger": encoded})
    assert (tmp_path / "step_000007/state/ledger.json").read_bytes() == encoded.content


def test_a_run_replaces_its_own_checkpoints_only(tmp_path: Path) -> None:
    save(tmp_path, salt=1, run_id="other")
    refused(tmp_path, "checkpoint.step_of_another_run", salt=2)
    assert names(tmp_path) == ["step_000007"]
    assert salt_of(tmp_path / "step_000007") == 1
    save(tmp_path, salt=3, run_id="other")
    assert salt_of(tmp_path / "step_000007") == 3


@pytest.mark.parametrize("damage", ["manifest.json", "model/config.json", "all"])
def test_what_holds_the_name_and_is_no_checkpoint_is_kept_under_another_one(tmp_path: Path, damage: str) -> None:
    if damage == "all":
        (tmp_path / "step_000007").mkdir()
    else:
        save(tmp_path, salt=1)
        (tmp_path / "step_000007" / damage).write_text("rotten")
    save(tmp_path, salt=2)
    assert names(tmp_path) == ["quarantine_step_000007", "step_000007"]
    assert salt_of(tmp_path / "step_000007") == 2


@pytest.mark.parametrize("earlier", [False, True])
def test_bytes_that_read_back_differently_are_no_checkpoint(tmp_path: Path, earlier: bool) -> None:
    if earlier:
        save(tmp_path, salt=1)
    at("verify.before", lambda: (tmp_path / "step_000007/model/config.json").write_text("x"))
    refused(tmp_path, "checkpoint.reads_back_differently", salt=2)
    assert names(tmp_path) == ["quarantine_step_000007", *(["step_000007"] if earlier else [])]
    if earlier:
        assert salt_of(tmp_path / "step_000007") == 1


@pytest.mark.parametrize("point", ["mkdir.before", "model.write.before", "file.sync.before", "publish.before"])
def test_a_refused_operation_leaves_what_was_there_and_nothing_else(tmp_path: Path, point: str) -> None:
    save(tmp_path, salt=1)

    def refuse() -> None:
        raise OSError(28, "no space left")

    at(point, refuse)
    refused(tmp_path, "checkpoint.save_refused", salt=2)
    assert names(tmp_path) == ["step_000007"]
    assert salt_of(tmp_path / "step_000007") == 1


def test_a_checkpoint_that_could_not_be_read_back_stays_beside_the_earlier_one(tmp_path: Path) -> None:
    save(tmp_path, salt=1)

    def refuse() -> None:
        raise OSError(5, "broken")

    at("verify.before", refuse)
    refused(tmp_path, "checkpoint.save_refused", salt=2)
    displaced = layout.replaced_name(7, "r")
    assert names(tmp_path) == [displaced, "step_000007"]
    assert [salt_of(tmp_path / name) for name in (displaced, "step_000007")] == [1, 2]


def test_staged_files_that_cannot_be_removed_are_left_to_the_next_save(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        if name in ("checkpoint.publish.before", "checkpoint.unlink.before"):
            raise OSError(5, "broken")

    fault_points.install(refuse)
    refused(tmp_path, "checkpoint.save_refused")
    assert [name.startswith(".staging-step_000007-") for name in names(tmp_path)] == [True]


@pytest.mark.parametrize("newer", ["none", "whole", "rotten", "foreign"])
def test_a_displaced_checkpoint_counts_until_a_newer_one_verifies(
    tmp_path: Path, newer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, salt=1)
    target, displaced = tmp_path / "step_000007", tmp_path / layout.replaced_name(7, "r")
    target.rename(displaced)
    if newer == "foreign":
        target.mkdir()
    elif newer != "none":
        save(tmp_path, salt=2)
    if newer == "rotten":
        (target / "model/config.json").write_text("rotten")
    flushed: list[Path] = []
    monkeypatch.setattr(writer, "sync_directory", flushed.append)
    restore_displaced(displaced, target)
    assert (
        names(tmp_path)
        == {
            "none": ["step_000007"],
            "whole": ["step_000007"],
            "rotten": ["quarantine_step_000007", "step_000007"],
            "foreign": [displaced.name, "step_000007"],
        }[newer]
    )
    assert flushed == ([tmp_path] if newer == "whole" else [])
    if newer != "foreign":
        assert salt_of(target) == (2 if newer == "whole" else 1)


WEIGHT = torch.arange(12.0).view(4, 3)


def of_ranks(directory: Path, **changes: Any) -> list[Any]:
    """What a save by two ranks gave, each with half of a tensor and weights of its own."""

    def work(exchange: ThreadExchange) -> Manifest:
        rank = exchange.rank
        tensors: dict[str, Tensor] = {f"v{rank}": torch.full((3,), float(rank))}
        shards = {"opt": [Shard("w", (4, 3), (2 * rank, 0), WEIGHT[2 * rank : 2 * rank + 2])]}
        made = request(directory, exchange=exchange, shards=shards, model_tensors=tensors, **changes)
        if rank:
            made = replace(made, records={}, model_writer=None)
        each = [
            announce(7, {"opt": [Shard("w", (4, 3), (start, 0), WEIGHT[:2])]}, {f"v{start // 2}": torch.ones(3)})
            for start in (0, 2)
        ]
        return write_checkpoint(made, Plan(tuple(each)))

    return run_ranks(2, work)


def codes(outcomes: list[Any]) -> list[str]:
    return [outcome.problem.code for outcome in outcomes]


def test_ranks_write_one_checkpoint_and_know_the_same_of_it(tmp_path: Path) -> None:
    first, second = of_ranks(tmp_path)
    assert replace(first, created="") == replace(second, created="")
    assert names(tmp_path) == ["step_000007"]
    checkpoint = open_verified(tmp_path / "step_000007")
    assert checkpoint.manifest == first
    assert torch.equal(checkpoint.tensors("opt")["w"], WEIGHT)
    assert [entry.path for entry in first.files] == sorted(entry.path for entry in first.files)
    assert [block.start for block in first.sharded["opt"]["w"].blocks] == [(0, 0), (2, 0)]
    index = json.loads((checkpoint.model_directory / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == ["v0", "v1"]


def test_each_rank_reads_back_what_it_wrote_and_the_first_one_all_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[str, list[str]] = {}
    real = writer.inspect_files
    monkeypatch.setattr(writer, "inspect", lambda path, only: read.update(first=sorted(only)) or inspect(path))
    monkeypatch.setattr(
        writer, "inspect_files", lambda path, made, only: read.update(second=sorted(only)) or real(path, made, only)
    )
    of_ranks(tmp_path)
    state, weights = "state/opt/rank_0000{}-of-00002.safetensors", "model/model-0000{}-of-00002.safetensors"
    others = ["model/config.json", "model/model.safetensors.index.json", "state/ledger.json"]
    assert read["first"] == sorted([state.format(0), weights.format(1), *others])
    assert read["second"] == sorted([state.format(1), weights.format(2)])


def test_a_file_of_another_rank_that_reads_back_differently_is_told_by_all(tmp_path: Path) -> None:
    file = tmp_path / "step_000007/state/opt/rank_00001-of-00002.safetensors"
    at("verify.before", lambda: file.write_bytes(bytes(file.stat().st_size)))
    assert codes(of_ranks(tmp_path)) == ["checkpoint.reads_back_differently"] * 2
    assert names(tmp_path) == ["quarantine_step_000007"]


def test_ranks_that_write_into_folders_of_their_own_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = writer.write_rank

    def elsewhere(staging: Path, rank: int, plan: Plan, parts: Any) -> dict[str, Any]:
        answer = real(staging, rank, plan, parts)
        if rank == 1:
            os.unlink(staging / answer["files"][0]["path"])
        return answer

    monkeypatch.setattr(writer, "write_rank", elsewhere)
    assert codes(of_ranks(tmp_path)) == ["checkpoint.not_shared"] * 2
    assert names(tmp_path) == []


def test_what_one_rank_is_refused_all_are_told_and_the_first_one_cleans_up(tmp_path: Path) -> None:
    assert codes(of_ranks(tmp_path, components=("..",))) == ["checkpoint.bad_component"] * 2
    assert names(tmp_path) == []
    of_ranks(tmp_path)
    assert newest_verified(tmp_path).checkpoint is not None
