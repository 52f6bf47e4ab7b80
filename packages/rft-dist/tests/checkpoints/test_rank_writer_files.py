"""Files that a rank writes into the staging directory, one rank after another in one process."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from rft_core import fault_points
from rft_dist.checkpoint_format.file_operations import digest_file
from rft_dist.checkpoint_format.manifest import entry_from_json
from rft_dist.checkpoint_format.resharding import Block, StoredTensor, from_json
from rft_dist.checkpoint_format.shards import Shard, full_shard
from rft_dist.checkpoints import rank_writer
from rft_dist.checkpoints.rank_writer import RankParts, write_rank
from rft_dist.checkpoints.save_plan import Plan, announce

W = torch.arange(12.0).view(4, 3)
UPPER, LOWER = (Shard("w", (4, 3), (start, 0), W[start : start + 2]) for start in (0, 2))
STEP = full_shard("step", torch.tensor(3, dtype=torch.int64))


def parts(shards: dict[str, list[Shard]], **others: Any) -> RankParts:
    return RankParts(shards, others.get("records", {}), others.get("writer"), others.get("tensors"))


def staged(staging: Path, *ranks: RankParts) -> tuple[Plan, list[dict[str, Any]]]:
    """What every rank answers; all of its entries are true."""
    plan = Plan(tuple(announce(7, rank.shards, rank.model_tensors) for rank in ranks))
    for folder in ("state", "model", *(f"state/{name}" for name in plan.components if plan.is_sharded(name))):
        (staging / folder).mkdir(parents=True, exist_ok=True)
    answers = [write_rank(staging, number, plan, rank) for number, rank in enumerate(ranks)]
    for answer in answers:
        for entry in map(entry_from_json, answer["files"]):
            assert entry.digest == digest_file(staging / entry.path)
    return plan, answers


def paths(answer: dict[str, Any]) -> list[str]:
    return [entry["path"] for entry in answer["files"]]


def test_a_component_that_one_rank_holds_is_one_file_without_a_table(tmp_path: Path) -> None:
    records = {"ledger": b"{}\n"}
    _, (first, second) = staged(
        tmp_path, parts({"a": [STEP], "b": []}, records=records), parts({"a": [], "c": [full_shard("w", W)]})
    )
    assert paths(first) == ["state/a.safetensors", "state/b.safetensors", "state/ledger.json"]
    assert paths(second) == ["state/c.safetensors"]
    assert first["tables"] == second["tables"] == {}
    assert load_file(tmp_path / "state/a.safetensors")["step"].item() == 3
    assert load_file(tmp_path / "state/b.safetensors") == {}
    assert (tmp_path / "state/ledger.json").read_bytes() == b"{}\n"
    with safe_open(tmp_path / "state/a.safetensors", framework="pt") as stream:
        assert stream.metadata() is None


def test_a_component_of_two_ranks_is_two_files_with_a_table_of_their_blocks(tmp_path: Path) -> None:
    _, answers = staged(tmp_path, parts({"o": [UPPER, STEP]}), parts({"o": [LOWER]}))
    files = [f"state/o/rank_0000{rank}-of-00002.safetensors" for rank in range(2)]
    assert [paths(answer) for answer in answers] == [files[:1], files[1:]]
    tables = [from_json(answer["tables"]["o"]) for answer in answers]
    assert tables[0] == {
        "w": StoredTensor("F32", (4, 3), (Block(files[0], "w@0,0", (0, 0), (2, 3)),)),
        "step": StoredTensor("I64", (), (Block(files[0], "step", (), ()),)),
    }
    assert tables[1] == {"w": StoredTensor("F32", (4, 3), (Block(files[1], "w@2,0", (2, 0), (2, 3)),))}
    with safe_open(tmp_path / files[0], framework="pt") as stream:
        described = stream.metadata()["blocks"]
    assert described == '{"step":["step",[],[]],"w@0,0":["w",[4,3],[0,0]]}'
    assert torch.equal(load_file(tmp_path / files[1])["w@2,0"], W[2:])


def test_two_blocks_of_one_tensor_are_in_one_row_of_the_table(tmp_path: Path) -> None:
    _, (answer,) = staged(tmp_path, parts({"o": [UPPER, LOWER]}))
    entry = from_json(answer["tables"]["o"])["w"]
    assert [block.start for block in entry.blocks] == [(0, 0), (2, 0)]


def config(directory: Path) -> None:
    """A model writer of files at three levels."""
    (directory / "b" / "deep").mkdir(parents=True)
    for name in ("config.json", "b/z.txt", "b/deep/a.txt", "a.txt"):
        (directory / name).write_text(name)


@pytest.mark.parametrize("tensors", [None, {"v": torch.ones(3), "u": torch.zeros(2, dtype=torch.int8)}])
def test_what_the_model_writer_wrote_is_listed_in_order(tmp_path: Path, tensors: dict[str, Tensor] | None) -> None:
    _, (answer,) = staged(tmp_path, parts({}, writer=config, tensors=tensors))
    names = ["a.txt", "b/deep/a.txt", "b/z.txt", "config.json"]
    weights = ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    assert paths(answer) == [f"model/{name}" for name in (*names, *(weights if tensors else ()))]


def test_each_rank_writes_its_weights_and_the_first_one_the_index(tmp_path: Path) -> None:
    later = tmp_path / "model" / "model-00002-of-00002.safetensors"

    def writer(directory: Path) -> None:
        config(directory)
        later.write_bytes(b"a rank that is ahead is writing this")

    ranks = [parts({}, writer=config, tensors={}), parts({}, tensors={"v": torch.ones(3)}), parts({}, tensors={"u": W})]
    plan, answers = staged(tmp_path / "all", *ranks)
    assert [paths(answer)[-1] for answer in answers] == [
        "model/model.safetensors.index.json",
        "model/model-00001-of-00002.safetensors",
        "model/model-00002-of-00002.safetensors",
    ]
    assert [len(answer["files"]) for answer in answers] == [5, 1, 1]
    folder = tmp_path / "all" / "model"
    content = (folder / "model.safetensors.index.json").read_text()
    assert content == json.dumps(plan.model_index(), indent=2) + "\n"
    assert torch.equal(load_file(folder / "model-00002-of-00002.safetensors")["u"], W)
    with safe_open(folder / "model-00001-of-00002.safetensors", framework="pt") as stream:
        assert stream.metadata() == {"format": "pt"}
    for name in ("state", "model"):
        (tmp_path / name).mkdir()
    first = write_rank(tmp_path, 0, plan, parts({}, writer=writer, tensors={}))
    assert f"model/{later.name}" not in paths(first)


def test_every_file_and_every_folder_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []
    files: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        rank_writer, "sync_directory", lambda path: folders.append(path.relative_to(tmp_path).as_posix())
    )

    def digest(path: Path, *, sync: bool = False) -> Any:
        files.append((path.name, sync))
        return digest_file(path)

    monkeypatch.setattr(rank_writer, "digest_file", digest)
    tensors = {"v": torch.ones(3)}
    staged(
        tmp_path,
        parts({"o": [UPPER], "p": [STEP]}, writer=config, tensors={}),
        parts({"o": [LOWER]}, tensors=tensors),
        parts({"o": []}, tensors={}),
    )
    assert folders[:5] == ["state/o", "state", "model/b/deep", "model/b", "model"]
    assert folders[5:] == ["state/o", "state", "model", "state"]
    assert files == [("a.txt", True), ("a.txt", True), ("z.txt", True), ("config.json", True)]


def test_the_model_writer_works_between_two_points(tmp_path: Path) -> None:
    passed: list[str] = []
    fault_points.install(passed.append)
    staged(tmp_path, parts({}, writer=lambda _: passed.append("writes")))
    at = passed.index("writes")
    assert passed[at - 1 : at + 2] == ["checkpoint.model.write.before", "writes", "checkpoint.model.write.after"]


@pytest.mark.parametrize(
    ("text", "number"), [("I/O error: No space left on device (os error 28)", errno.ENOSPC), ("no header", 0)]
)
def test_the_library_s_error_becomes_that_of_the_system(tmp_path: Path, text: str, number: int) -> None:
    def writer(directory: Path) -> None:
        raise SafetensorError(text)

    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is compared
        staged(tmp_path, parts({}, writer=writer))
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / "model"))


@pytest.mark.parametrize("link", [lambda path: path.symlink_to("config.json"), lambda path: path.symlink_to("b")])
def test_a_link_of_the_model_writer_is_refused(tmp_path: Path, link: Callable[[Path], None]) -> None:
    def writer(directory: Path) -> None:
        config(directory)
        link(directory / "link")

    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is compared
        staged(tmp_path, parts({}, writer=writer))
    assert caught.value.errno == errno.ELOOP
