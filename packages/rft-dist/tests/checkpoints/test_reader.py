"""Reading a checkpoint: what is compared, what is found, which one is taken, and what it hands out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_core import fault_points
from rft_core.errors import CheckpointError
from rft_dist.checkpoint_format import file_operations
from rft_dist.checkpoint_format.manifest import FileEntry, Manifest, ManifestFault
from rft_dist.checkpoints import reader
from rft_dist.checkpoints.reader import (
    Finding,
    damaged,
    inspect,
    inspect_files,
    is_checkpoint_directory,
    newest_verified,
    open_verified,
    quarantine,
    read_manifest,
    require_equal_components,
)

FILE = "model/config.json"


@pytest.fixture
def path(small_run) -> Path:
    """A checkpoint of step 1."""
    return small_run.save(small_run.store(), 1).path


def rewritten(path: Path, change: Callable[[Manifest], Manifest]) -> Manifest:
    """Another manifest in the place of a checkpoint's."""
    made = change(read_manifest(path))
    (path / "manifest.json").write_bytes(made.to_bytes())
    return made


def found(path: Path) -> list[tuple[str, str, bool]]:
    """File, first word of the problem and whether it is damage, of every finding."""
    return [(finding.file, finding.problem.split()[0], finding.is_damage) for finding in inspect(path)[1]]


def test_a_checkpoint_that_verifies_has_no_findings(path: Path) -> None:
    manifest, findings = inspect(path)
    assert findings == []
    assert manifest == read_manifest(path)
    assert inspect(path, only=[FILE]) == (manifest, [])
    opened = open_verified(path)
    assert (opened.step, opened.path, opened.manifest, opened.model_directory) == (1, path, manifest, path / "model")


def test_names_and_sizes_are_compared_before_any_content(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = reader.digest_file
    monkeypatch.setattr(reader, "digest_file", lambda file: read.append(file.name) or real(file))
    (path / FILE).write_text("longer than it was before, and other bytes")
    (path / "model/extra/notes.txt").unlink()
    (path / "state/b").write_text("x")
    (path / "model/link").symlink_to("config.json")
    os.mkfifo(path / "a")
    assert found(path) == [
        ("a", "is", True),
        ("model/link", "is", True),
        ("model/extra/notes.txt", "is", True),
        ("state/b", "is", True),
        (FILE, "has", True),
    ]
    assert read == []


@pytest.mark.parametrize(("size", "first", "last"), [(3, 3, 21), (30, 22, 29)])
def test_a_file_of_another_size_is_damaged_from_where_it_ends(path: Path, size: int, first: int, last: int) -> None:
    want = next(entry for entry in read_manifest(path).files if entry.path == FILE).digest.size
    assert want == 22
    (path / FILE).write_bytes(bytes(size))
    for findings in (inspect(path)[1], inspect_files(path, read_manifest(path))):
        [finding] = findings
        assert (finding.path, finding.file, finding.first_byte, finding.last_byte) == (path, FILE, first, last)


def test_damage_is_located_in_blocks_and_only_the_files_asked_for_are_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "BLOCK_BYTES", 8)
    monkeypatch.setattr(file_operations, "BLOCK_BYTES", 8)
    content = (path / FILE).read_bytes()
    digest = file_operations.digest_file(path / FILE)
    made = rewritten(
        path,
        lambda old: replace(
            old, files=tuple(FileEntry(FILE, digest) if each.path == FILE else each for each in old.files)
        ),
    )
    for places, first, last in (((0,), 0, 7), ((8,), 8, 15), ((21,), 16, 21), ((9, 17), 8, 21), ((7, 8), 0, 15)):
        changed = bytearray(content)
        for place in places:
            changed[place] ^= 1
        (path / FILE).write_bytes(changed)
        [finding] = inspect_files(path, made, only=[FILE])
        assert (finding.file, finding.first_byte, finding.last_byte) == (FILE, first, last)
        assert finding.is_damage
        assert inspect_files(path, made, only=["state/ledger.json", "model/extra/notes.txt"])
        assert not inspect_files(path, made, only=[])
    other = replace(digest, sha256="0" * 64)
    (path / FILE).write_bytes(content)
    entry = replace(made, files=(FileEntry(FILE, other),))
    [finding] = inspect_files(path, entry)
    assert (finding.first_byte, finding.last_byte) == (0, 21), "the place is not known any closer"


def test_a_manifest_of_another_directory_or_of_other_components_is_damage(path: Path) -> None:
    moved = path.with_name("step_000002")
    shutil.copytree(path, moved)
    assert found(moved) == [("manifest.json", "belongs", True)]
    anywhere = path.with_name("any name")
    moved.rename(anywhere)
    assert found(anywhere) == [], "a copy may have any name that claims no step"
    for names in (("ledger", "optimizer"), ("ledger", "more", "optimizer", "schedule")):
        rewritten(path, lambda old, names=names: replace(old, components=names))
        assert found(path) == [("manifest.json", "lists", True)]


def test_what_cannot_be_read_just_now_is_no_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "denied")

    for name, file in (("digest_file", FILE), ("_walk", ""), ("read_manifest", "manifest.json")):
        with monkeypatch.context() as change:
            change.setattr(reader, name, refuse)
            assert found(path)[0][1:] == ("cannot", False)
            assert file in {finding.file for finding in inspect(path)[1]}


def test_what_stands_in_for_the_manifest_is_told(path: Path) -> None:
    file = path / "manifest.json"
    file.rename(path / "other")
    assert found(path) == [("manifest.json", "is", False)]
    for place in (lambda: file.symlink_to("other"), file.mkdir):
        place()
        assert found(path) == [("manifest.json", "cannot", True)]
        file.rmdir() if not file.is_symlink() else file.unlink()
    os.mkfifo(file)
    assert found(path)[0][0] == "manifest.json"
    file.unlink()
    file.write_bytes(b"{}")
    assert found(path) == [("manifest.json", "not", True)]


def test_a_manifest_larger_than_allowed_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (path / "manifest.json").stat().st_size
    monkeypatch.setattr(reader, "MAX_BYTES", size)
    assert read_manifest(path).step == 1
    monkeypatch.setattr(reader, "MAX_BYTES", size - 1)
    with pytest.raises(ManifestFault):
        read_manifest(path)


def test_a_file_of_tensors_without_a_header_is_told_after_all_bytes_are_right(path: Path) -> None:
    file = "state/optimizer.safetensors"
    (path / file).write_bytes(b"\xff" * 64)
    digest = file_operations.digest_file(path / file)
    made = rewritten(
        path,
        lambda old: replace(old, files=tuple(FileEntry(file, digest) if e.path == file else e for e in old.files)),
    )
    assert found(path) == [(file, "has", True)]
    assert inspect_files(path, made, only=[FILE]) == []
    (path / FILE).write_bytes(bytes(22))
    assert [each[0] for each in found(path)] == [FILE]


def test_a_damaged_checkpoint_asked_for_by_name_is_an_error_and_stays(path: Path) -> None:
    (path / FILE).write_bytes(bytes(22))
    with pytest.raises(CheckpointError) as caught:
        open_verified(path)
    assert caught.value.problem.code == "checkpoint.damaged"
    assert caught.value.problem.where == str(path / FILE)
    assert path.is_dir()
    one, two = (damaged(path, [Finding(path, "a", "p")] * number).problem.what for number in (1, 2))
    assert "more" not in one
    assert "1 more" in two


def test_only_what_is_damaged_is_moved_aside_and_its_findings_say_where(path: Path) -> None:
    harmless = [Finding(path, "", "x", is_damage=False)]
    assert quarantine(path, harmless) == harmless
    assert quarantine(path, []) == []
    nameless = path.with_name("any")
    shutil.copytree(path, nameless)
    real = [Finding(nameless, "", "x")]
    assert quarantine(nameless, real) == real
    assert nameless.is_dir()
    target = path.with_name("quarantine_step_000001")
    both = [*harmless, Finding(path, "a", "y", 1, 2)]
    assert quarantine(path, both) == [replace(each, quarantined_to=target) for each in both]
    assert target.is_dir()
    assert str(quarantine(path, harmless)[0]) == f"{path}: x"
    assert str(replace(both[1], quarantined_to=target)) == f"{path}: a y; kept as {target}"


def test_a_damaged_one_that_cannot_be_moved_stays_and_one_more_finding_says_so(path: Path) -> None:
    def refuse(name: str) -> None:
        if name == "checkpoint.quarantine.before":
            raise OSError(30, "read-only")

    fault_points.install(refuse)
    problems = [Finding(path, "a", "y")]
    first, second = quarantine(path, problems)
    assert first == problems[0]
    assert (second.path, second.is_damage, second.quarantined_to) == (path, False, None)
    assert path.is_dir()


def test_the_newest_is_the_one_saved_last_and_not_that_of_the_highest_step(small_run) -> None:
    store = small_run.store()
    for step in (3, 5, 2):
        small_run.save(store, step)
    others = small_run.store(run_id="run-b")
    small_run.save(others, 9)
    directory = small_run.directory

    def newest(**options: Any) -> tuple[int, int]:
        search = newest_verified(directory, **options)
        return (search.checkpoint.step if search.checkpoint else -1), len(search.findings)

    assert newest(run_id="run-a") == (2, 0)
    manifests = {step: read_manifest(directory / f"step_00000{step}") for step in (2, 3, 5, 9)}
    assert [manifests[step].sequence for step in (3, 5, 2)] == [1, 2, 3]
    assert newest() == (2, 0)
    (directory / "step_000002/manifest.json").write_text("rotten")
    assert newest(run_id="run-a")[0] == 5, "what cannot be read counts as right after the steps below it"
    assert (directory / "step_000002").is_dir()
    (directory / "step_000005/manifest.json").write_text("rotten")
    assert newest(run_id="run-a") == (3, 1)
    assert sorted(each.name for each in directory.iterdir()) == [
        "quarantine_step_000005",
        "step_000002",
        "step_000003",
        "step_000009",
    ]
    (directory / "step_000003" / FILE).write_text("rotten")
    assert newest(run_id="run-a") == (-1, 2)
    assert newest(run_id="run-c") == (-1, 0)


def test_a_checkpoint_hands_out_components_as_they_were_saved(small_run) -> None:
    small_run.save(small_run.store(), 1)
    (second,) = {info.path for info in small_run.save_by_ranks(2, 2)}
    for step, path in ((1, small_run.directory / "step_000001"), (2, second)):
        opened = open_verified(path)
        want = small_run.tensors(step)["optimizer"]
        component = opened.component("optimizer")
        assert set(component.names) == set(want)
        for tensors in (opened.tensors("optimizer"), component.tensors()):
            assert all(torch.equal(tensors[name], want[name]) for name in want)
        reader = opened.blocks("optimizer")
        assert torch.equal(reader.full_tensor("exp_avg/weight"), want["exp_avg/weight"])
        assert opened.records("ledger") == small_run.records(step)["ledger"]
        assert [opened.has_records(name) for name in ("ledger", "optimizer", "none")] == [True, False, False]


class Sink:
    """Asks for all of one tensor."""

    def __init__(self, request: Any) -> None:
        self.request, self.got = request, list[Any]()

    def shard_requests(self) -> list[Any]:
        return [self.request]

    def write(self, name: str, start: tuple[int, ...], tensor: torch.Tensor) -> None:
        self.got.append((name, start, tensor))


def test_a_sink_is_filled_and_what_changed_since_is_an_error(path: Path, small_run) -> None:
    from rft_dist.checkpoint_format.shards import ShardRequest

    opened = open_verified(path)
    request = ShardRequest("exp_avg/weight", (37, 3), torch.float32, (1, 0), (2, 3))
    sink = Sink(request)
    assert opened.load("optimizer", sink) == 1
    opened.component("optimizer").load(sink)
    want = small_run.tensors(1)["optimizer"]["exp_avg/weight"][1:3]
    assert [each[:2] for each in sink.got] == [("exp_avg/weight", (1, 0))] * 2
    assert all(torch.equal(each[2], want) for each in sink.got)
    for name in ("none", "ledger"):
        with pytest.raises(CheckpointError) as caught:
            opened.tensors(name)
        assert caught.value.problem.code == "checkpoint.component_missing"
    blocks = opened.blocks("optimizer")
    for file in ("optimizer.safetensors", "ledger.json"):
        (path / "state" / file).write_bytes(b"\xff" * 64)

    def read_blocks() -> None:
        opened._reading(lambda: blocks.load(sink))

    for read in (lambda: opened.tensors("optimizer"), lambda: opened.records("ledger"), read_blocks):
        with pytest.raises(CheckpointError) as caught:
            read()
        assert caught.value.problem.code == "checkpoint.changed_since_verified"


def test_components_that_are_missing_or_unexpected_are_refused(path: Path) -> None:
    opened = open_verified(path)
    opened.require_components(["schedule", "optimizer", "ledger"])
    for names in (["optimizer", "ledger"], ["schedule", "optimizer", "ledger", "more"]):
        with pytest.raises(CheckpointError) as caught:
            opened.require_components(names)
        assert caught.value.problem.code == "checkpoint.components_differ"
        assert caught.value.problem.where == str(path)
    with pytest.raises(CheckpointError) as caught:
        require_equal_components(["a", "b"], ["c", "b"], where="x")
    assert caught.value.problem.what == "components missing: a; unexpected: c"


def test_a_directory_with_a_manifest_or_the_name_of_a_step_is_a_checkpoint(tmp_path: Path) -> None:
    for name in ("step_000001", "any", "none"):
        (tmp_path / name).mkdir()
    (tmp_path / "any/manifest.json").write_text("")
    (tmp_path / "step_000002").write_text("a file")
    (tmp_path / "none/manifest.json").mkdir()
    assert [name for name in sorted(os.listdir(tmp_path)) if is_checkpoint_directory(tmp_path / name)] == [
        "any",
        "step_000001",
    ]
