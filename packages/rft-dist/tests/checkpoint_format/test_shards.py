"""Blocks of tensors: how a flat range is cut, who writes what, and that any blocks come back from any others."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rft_core.errors import CheckpointError
from rft_dist.checkpoint_format.shards import (
    Shard,
    ShardRequest,
    assign_by_bytes,
    flat_blocks,
    flat_offset,
    flat_requests,
    flat_shards,
    full_shard,
)
from rft_dist.checkpoints.reader import Checkpoint
from rft_dist.checkpoints.store import CheckpointStore
from rft_dist.testing.checkpoint_ranks import run_ranks

SHAPES = {
    "rows": (7, 3),
    "few rows": (2, 5),
    "cube": (3, 4, 5),
    "vector": (11,),
    "scalar": (),
    "none": (0, 4),
    "one": (1, 1, 6),
}
CUTS = ("rows", "columns", "flat", "rank 0", "by bytes")
PAIRS = [(saved, loaded) for saved in (1, 2, 3, 4) for loaded in (1, 2, 3, 4)]


def states() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    found["half"] = torch.randn(9, 2, generator=generator).to(torch.bfloat16)
    found["step"] = torch.tensor(12345678901, dtype=torch.int64)
    found["mask"] = torch.rand(5, generator=generator) > 0.5
    return found


def chunk(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """FSDP2's rows of a rank: ceil(length / ranks) each, the last ranks fewer or none."""
    size = -(-length // world_size)
    return min(rank * size, length), min((rank + 1) * size, length)


def blocks_of(cut: str, rank: int, world_size: int) -> list[Shard]:
    """What a rank gives under a way of cutting."""
    found: list[Shard] = []
    tensors = states()
    owners = assign_by_bytes({name: t.numel() * t.element_size() for name, t in tensors.items()}, world_size)
    for name, tensor in tensors.items():
        shape, start = tuple(tensor.shape), [0] * tensor.ndim
        axis = {"rows": 0, "columns": tensor.ndim - 1}.get(cut, 0)
        if cut == "rank 0" or cut == "by bytes" or not tensor.ndim:
            owner = owners[name] if cut == "by bytes" else 0
            found += [full_shard(name, tensor)] if rank == owner else []
        elif cut == "flat":
            size = -(-tensor.numel() // world_size)
            piece = tensor.reshape(-1)[rank * size : (rank + 1) * size]
            found += flat_shards(name, shape, min(rank * size, tensor.numel()), piece)
        else:
            first, end = chunk(shape[axis], rank, world_size)
            start[axis] = first
            piece = tensor.narrow(axis, first, end - first)
            is_given = bool(piece.numel()) or (rank == 0 and not tensor.numel())
            found += [Shard(name, shape, tuple(start), piece)] if is_given else []
    return found


class Sink:
    """Wants the blocks of a way of cutting, and checks each one that it gets."""

    def __init__(self, cut: str, rank: int, world_size: int) -> None:
        self.shards = blocks_of(cut, rank, world_size)
        self.got = 0

    def shard_requests(self) -> list[ShardRequest]:
        return [ShardRequest(s.name, s.global_shape, s.data.dtype, s.start, tuple(s.data.shape)) for s in self.shards]

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        (want,) = [s.data for s in self.shards if s.name == name and s.start == start]
        assert tensor.dtype == want.dtype
        assert tensor.shape == want.shape
        assert torch.equal(tensor, want), name
        self.got += 1


def save_with(directory: Path, cut: str, world_size: int, step: int = 1, **options) -> list:
    def save(exchange) -> object:
        store = CheckpointStore(directory, keep_last=2, keep_bytes=None, run_id="r", exchange=exchange)
        return store.save(
            step,
            tensors={"optimizer": blocks_of(cut, exchange.rank, world_size)},
            records={"ledger": {"step": step}},
            model_writer=lambda path: (path / "config.json").write_text("{}") and None,
            metadata={"episode": 1},
            **options,
        )

    return run_ranks(world_size, save)


def opened(directory: Path, step: int = 1) -> Checkpoint:
    return CheckpointStore(directory, keep_last=None, keep_bytes=None, run_id="r").open(step)


@pytest.mark.parametrize(
    ("shape", "offset", "numel", "expected"),
    [
        ((4, 3), 2, 9, [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]),
        ((4, 3), 0, 12, [((0, 0), (4, 3))]),
        ((4, 3), 4, 1, [((1, 1), (1, 1))]),
        ((2, 2, 2), 1, 4, [((0, 0, 1), (1, 1, 1)), ((0, 1, 0), (1, 1, 2)), ((1, 0, 0), (1, 1, 1))]),
        ((), 0, 1, [((), ())]),
        ((5,), 1, 3, [((1,), (3,))]),
        ((3, 2), 2, 0, []),
    ],
)
def test_a_flat_range_is_cut_into_these_blocks(shape, offset, numel, expected) -> None:
    assert list(flat_blocks(shape, offset, numel)) == expected


def test_the_blocks_of_any_flat_range_follow_one_another_and_are_few() -> None:
    draw = random.Random(1)
    for _ in range(300):
        shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 4)))
        size = math.prod(shape)
        offset = draw.randint(0, size)
        numel = draw.randint(0, size - offset)
        tensor = torch.arange(size).view(shape)
        position, blocks = offset, list(flat_blocks(shape, offset, numel))
        for start, extent in blocks:
            assert flat_offset(shape, start) == position
            block = tensor[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))]
            assert block.reshape(-1).tolist() == list(range(position, position + math.prod(extent)))
            position += math.prod(extent)
        assert position == offset + numel
        assert len(blocks) <= 2 * len(shape) - 1


def test_flat_wanted_mirrors_flat_shards() -> None:
    tensor = torch.randn(5, 4)
    shards = flat_shards("w", (5, 4), 3, tensor.reshape(-1)[3:14])
    wanted = flat_requests("w", (5, 4), torch.float32, 3, 11)
    assert [(s.start, tuple(s.data.shape)) for s in shards] == [(w.start, w.shape) for w in wanted]
    assert torch.cat([s.data.reshape(-1) for s in shards]).equal(tensor.reshape(-1)[3:14])


def test_tensors_are_assigned_so_that_ranks_have_equal_bytes() -> None:
    owners = assign_by_bytes({"a": 8, "b": 7, "c": 6, "d": 5, "e": 4}, 2)
    assert owners == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 0}
    assert assign_by_bytes({"a": 8}, 3) == {"a": 0}


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_any_ranks_load_what_any_ranks_saved(memory_path: Path, saved: int, loaded: int) -> None:
    """R9: rows as FSDP2 cuts them, columns as tensor parallel does, flat ranges as ZeRO does, and whole tensors."""
    expected = states()
    for step, cut in enumerate(CUTS):
        for outcome in save_with(memory_path, cut, saved, step):
            assert getattr(outcome, "step", outcome) == step
        checkpoint = opened(memory_path, step)
        found = checkpoint.tensors("optimizer")
        assert set(found) == set(expected)
        assert all(found[name].dtype == expected[name].dtype for name in expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        for other in CUTS:
            for rank in range(loaded):
                sink = Sink(other, rank, loaded)
                assert checkpoint.load("optimizer", sink) == sink.got == len(sink.shards)


def test_a_component_of_one_rank_is_the_file_that_one_process_writes(tmp_path: Path) -> None:
    for world_size in (1, 3):
        save_with(tmp_path / f"{world_size}", "rank 0", world_size)
    files = [tmp_path / f"{n}" / "step_000001" / "state" / "optimizer.safetensors" for n in (1, 3)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert set(load_file(files[0])) == set(states())
    assert b'"format_version":1' in (tmp_path / "3" / "step_000001" / "manifest.json").read_bytes()


def test_a_file_of_a_rank_tells_its_blocks_without_the_manifest(tmp_path: Path) -> None:
    import json

    from safetensors import safe_open

    save_with(tmp_path, "rows", 2)
    path = tmp_path / "step_000001" / "state" / "optimizer" / "rank_00001-of-00002.safetensors"
    with safe_open(path, framework="pt") as stream:
        described = json.loads(stream.metadata()["blocks"])
        assert described["rows@4,0"] == ["rows", [7, 3], [4, 0]]
        assert torch.equal(stream.get_tensor("rows@4,0"), states()["rows"][4:])
    assert b'"format_version":2' in (tmp_path / "step_000001" / "manifest.json").read_bytes()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            ShardRequest("absent", (2,), torch.float32, (0,), (2,)),
            "tensor absent: wanted float32 [2], the checkpoint has no",
        ),
        (
            ShardRequest("rows", (7, 4), torch.float32, (0, 0), (7, 4)),
            "tensor rows: wanted float32 [7, 4], the checkpoint has float32 [7, 3]",
        ),
        (
            ShardRequest("half", (9, 2), torch.float32, (0, 0), (1, 2)),
            "tensor half: wanted float32 [9, 2], the checkpoint has bfloat16 [9, 2]",
        ),
    ],
)
def test_what_is_not_there_as_wanted_is_named_and_nothing_is_put(
    tmp_path: Path, wanted: ShardRequest, message: str
) -> None:
    save_with(tmp_path, "rows", 2)

    class One(Sink):
        def shard_requests(self) -> list[ShardRequest]:
            return [*super().shard_requests(), wanted]

    sink = One("flat", 0, 2)
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path).load("optimizer", sink)
    assert caught.value.problem.what.startswith(message)
    assert sink.got == 0


def broken(rank: int, kind: str) -> list[Shard]:
    tensor = torch.arange(12.0).view(4, 3)
    half = Shard("w", (4, 3), (2 * rank, 0), tensor[2 * rank : 2 * rank + 2])
    if kind == "a gap":
        return [half] if rank == 0 else []
    if kind == "twice":
        return [full_shard("w", tensor)]
    if kind == "overlapping columns":
        return [Shard("w", (4, 3), (0, rank), tensor[:, rank : rank + 2])]
    if kind == "another shape":
        return [half] if rank == 0 else [Shard("w", (4, 4), (2, 0), torch.zeros(2, 4))]
    return [half] if rank == 0 else [Shard("w", (4, 3), (2, 0), half.data.double())]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("a gap", "its blocks hold 6 of 12 elements"),
        ("twice", "two ranks give the same elements"),
        ("overlapping columns", "two ranks give the same elements"),
        ("another shape", "ranks give it as F32 [4, 3] and F32 [4, 4]"),
        ("another dtype", "ranks give it as F32 [4, 3] and F64 [4, 3]"),
    ],
)
def test_blocks_that_do_not_make_up_the_tensor_are_refused_on_every_rank(
    tmp_path: Path, kind: str, message: str
) -> None:
    save_with(tmp_path, "rows", 2)

    def save(exchange) -> object:
        store = CheckpointStore(tmp_path, keep_last=1, keep_bytes=None, run_id="r", exchange=exchange)
        parts = {"optimizer": broken(exchange.rank, kind)}
        return store.save(2, tensors=parts, records={}, model_writer=lambda _: None, metadata={})

    for outcome in run_ranks(2, save):
        assert isinstance(outcome, CheckpointError)
        assert f"tensor w of component optimizer: {message}" in outcome.problem.what
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001"]
