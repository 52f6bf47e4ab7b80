"""Every damage to a stored checkpoint is noticed before a tensor is handed out, and the one before is used."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rft_core.errors import CheckpointError, StorageError
from rft_dist.checkpoint_format.file_operations import BLOCK_BYTES
from rft_dist.checkpoints.reader import inspect, newest_verified, open_verified


def flip_bit(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def zero_page(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = chance.randrange(len(content))
    end = min(start + 4096, len(content))
    replacement = bytes(end - start)
    content[start:end] = replacement if bytes(content[start:end]) != replacement else b"\x01" * (end - start)
    path.write_bytes(content)


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def append(path: Path, chance: random.Random) -> None:
    with path.open("ab") as stream:
        stream.write(bytes(chance.randrange(1, 9)))


def remove(path: Path, chance: random.Random) -> None:
    path.unlink()


def take_from_other_step(path: Path, chance: random.Random) -> None:
    older = Path(str(path).replace("step_000002", "step_000001"))
    shutil.copyfile(older, path)


def swap_with_another(path: Path, chance: random.Random) -> None:
    root = next(parent for parent in path.parents if parent.name == "step_000002")
    others = sorted(other for other in root.rglob("*") if other.is_file() and other.read_bytes() != path.read_bytes())
    other = chance.choice(others)
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


def move_out_and_link(path: Path, chance: random.Random) -> None:
    run = next(parent for parent in path.parents if parent.name == "checkpoints").parent
    elsewhere = run / f"elsewhere-{chance.randrange(10**9)}"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def add_beside(path: Path, chance: random.Random) -> None:
    path.with_name(f"extra-{chance.randrange(100)}").write_bytes(b"x")


DAMAGES: dict[Callable[[Path, random.Random], None], int] = {
    flip_bit: 90,
    zero_page: 40,
    truncate: 50,
    append: 20,
    remove: 20,
    take_from_other_step: 20,
    swap_with_another: 30,
    move_out_and_link: 20,
    add_beside: 20,
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Filled by the first test that has a run at hand."""
    return tmp_path_factory.mktemp("pristine")


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_noticed_and_the_checkpoint_before_is_used(
    make_run, pristine: Path, memory_path: Path, damage
) -> None:
    damage_many(make_run, pristine, memory_path, damage, DAMAGES[damage], num_ranks=1)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_to_the_files_of_two_ranks_is_noticed(make_run, pristine: Path, memory_path: Path, damage) -> None:
    damage_many(make_run, pristine, memory_path, damage, 10, num_ranks=2)


@pytest.mark.night
def test_a_thousand_damaged_files_are_noticed(make_run, pristine: Path, memory_path: Path) -> None:
    """R5."""
    total = 0
    for num_ranks in (1, 2):
        for damage, count in DAMAGES.items():
            damage_many(make_run, pristine, memory_path, damage, 2 * count, num_ranks)
            total += 2 * count
    print(f"\nR5: {total} damaged files, all noticed, the checkpoint before used at once")
    assert total >= 1000


def damage_many(make_run, pristine: Path, memory_path: Path, damage, count: int, num_ranks: int) -> None:
    """Damage a copy of step 2 `count` times: each time it is noticed, and step 1 is used."""
    origin = pristine / f"{num_ranks}" / "checkpoints"
    if not origin.exists():
        run = make_run(origin)
        for step in (1, 2):
            run.save(run.store(), step) if num_ranks == 1 else run.save_by_ranks(num_ranks, step)
    places = sorted(path for path in (origin / "step_000002").rglob("*") if path.is_file())
    earlier = [Path(str(path).replace("step_000002", "step_000001")).read_bytes() for path in places]
    pairs = zip(places, earlier, strict=True)
    files = [path.relative_to(origin) for path, other in pairs if path.read_bytes() != other]  # a constant tensor's
    for number in range(count):
        chance = random.Random(f"{damage.__name__} {number}")
        run = make_run(memory_path / f"{number}" / "checkpoints")
        shutil.copytree(origin, run.directory)
        file = files[number % len(files)]
        damage(run.directory / file, chance)
        _, problems = inspect(run.directory / "step_000002")
        assert problems, f"{damage.__name__} of {file}, case {number}, was not noticed"
        with pytest.raises(CheckpointError):
            open_verified(run.directory / "step_000002")
        search = newest_verified(run.directory)
        assert search.checkpoint is not None
        assert run.state_of(search.checkpoint) == (1, 0)
        assert search.findings
        moved = run.directory / "quarantine_step_000002"
        assert moved.is_dir() != (run.directory / "step_000002").is_dir()
        assert moved.is_dir() or not (run.directory / "step_000002" / "manifest.json").exists()
        shutil.rmtree(memory_path / f"{number}")


def test_a_finding_names_the_file_and_the_bytes_that_differ(small_run) -> None:
    info = small_run.save(small_run.store(), 1, size=400_000)  # 4.8 MB of float32
    path = info.path / "state" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[2 * BLOCK_BYTES + 17] ^= 4
    content[3 * BLOCK_BYTES + 1] ^= 4
    path.write_bytes(content)
    _, (finding,) = inspect(info.path)
    assert (finding.file, finding.first_byte, finding.last_byte) == (
        "state/optimizer.safetensors",
        2 * BLOCK_BYTES,
        4 * BLOCK_BYTES - 1,
    )
    with pytest.raises(CheckpointError) as caught:
        open_verified(info.path)
    found = hashlib.sha256(bytes(content)).hexdigest()
    assert f"is damaged: state/optimizer.safetensors bytes 2097152-4194303, SHA-256 {found} expected" in (
        caught.value.problem.what
    )


def test_a_truncated_file_is_reported_with_both_sizes(small_run) -> None:
    info = small_run.save(small_run.store(), 1)
    path = info.path / "model" / "config.json"
    size = path.stat().st_size
    os.truncate(path, 3)
    _, (finding,) = inspect(info.path)
    assert (finding.file, finding.problem) == ("model/config.json", f"has 3 bytes, expected {size}")


def test_a_checkpoint_under_the_name_of_another_step_is_refused(small_run) -> None:
    info = small_run.save(small_run.store(), 1)
    info.path.rename(info.path.with_name("step_000009"))
    search = newest_verified(small_run.directory)
    assert search.checkpoint is None
    assert "step 1" in search.findings[0].problem


def test_several_damaged_ones_are_walked_past_and_all_kept(small_run) -> None:
    store = small_run.store()
    for step in (1, 2, 3):
        info = small_run.save(store, step)
        if step > 1:
            (info.path / "state" / "ledger.json").write_text("{}")
    search = small_run.store().newest_verified()
    assert search.checkpoint is not None
    assert small_run.state_of(search.checkpoint) == (1, 0)
    assert small_run.names() == ["quarantine_step_000002", "quarantine_step_000003", "step_000001"]
    assert {finding.quarantined_to for finding in search.findings} == {
        small_run.directory / "quarantine_step_000002",
        small_run.directory / "quarantine_step_000003",
    }


def test_a_directory_without_manifest_is_left_where_it_is(small_run) -> None:
    small_run.save(small_run.store(), 1)
    foreign = small_run.directory / "step_000005"
    foreign.mkdir()
    (foreign / "theirs").write_text("x")
    search = newest_verified(small_run.directory)
    assert search.checkpoint is not None
    assert search.checkpoint.step == 1
    assert (foreign / "theirs").read_text() == "x"


def test_a_manifest_with_a_header_that_the_library_refuses_does_not_verify(small_run) -> None:
    def write(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"\xff" * 64)

    store = small_run.store()
    with pytest.raises(StorageError) as caught:
        store.save(1, tensors=small_run.tensors(1), records=small_run.records(1), model_writer=write, metadata={})
    assert caught.value.problem.code == "checkpoint.reads_back_differently"
    assert newest_verified(small_run.directory).checkpoint is None


def test_reading_executes_nothing_and_gives_plain_values(small_run) -> None:
    small_run.save(small_run.store(), 1)
    checkpoint = small_run.store().open(1)
    assert type(checkpoint.records("ledger")) is dict
    assert all(type(value) is torch.Tensor for value in checkpoint.tensors("optimizer").values())
    json.dumps(dict(checkpoint.manifest.metadata))
