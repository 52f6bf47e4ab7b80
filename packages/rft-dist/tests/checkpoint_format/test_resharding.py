"""Tables of blocks: their JSON, which of them make up a tensor, and reading any block from any others."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rft_core.errors import CheckpointError
from rft_dist.checkpoint_format import resharding
from rft_dist.checkpoint_format.resharding import (
    Block,
    BlockReader,
    StoredTensor,
    block_key,
    from_json,
    key_of,
    merged,
    rank_file,
    table_of_files,
    to_json,
)
from rft_dist.checkpoint_format.shards import Shard, ShardRequest

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and shape."""

ROW = ["F32", [4, 3], [["a", [0, 0], [2, 3]], ["b", [2, 0], [2, 3]]]]


def block(start: Sequence[int], shape: Sequence[int], *, of: Sequence[int], file: str = "a", name: str = "w") -> Block:
    return Block(file, block_key(name, start, is_whole=tuple(shape) == tuple(of)), tuple(start), tuple(shape))


def stored(shape: tuple[int, ...], boxes: Sequence[Box], dtype: str = "F32") -> StoredTensor:
    return StoredTensor(dtype, shape, tuple(block(*box, of=shape, file=f"{n}") for n, box in enumerate(boxes)))


def test_files_and_blocks_have_these_names() -> None:
    assert rank_file("optimizer", 3, 16) == "state/optimizer/rank_00003-of-00016.safetensors"
    assert key_of(Shard("w", (4, 3), (2, 0), torch.zeros(2, 3))) == "w@2,0"
    assert key_of(Shard("w", (4, 3), (0, 0), torch.zeros(4, 3))) == "w"
    assert key_of(Shard("s", (), (), torch.tensor(1.0))) == "s"


def test_a_table_comes_back_from_json_as_it_went_in() -> None:
    whole = StoredTensor("BF16", (), (Block("a", "s", (), ()),))
    table = {
        "w": stored((4, 3), [((0, 0), (2, 3)), ((2, 0), (2, 3))]),
        "s": whole,
        "none": StoredTensor("I8", (0,), ()),
    }
    encoded = to_json(table)
    assert encoded["w"] == ["F32", [4, 3], [["0", [0, 0], [2, 3]], ["1", [2, 0], [2, 3]]]]
    assert encoded["s"] == ["BF16", [], [["a", [], []]]]
    assert from_json(encoded) == table
    assert [each.key for each in from_json(encoded)["w"].blocks] == ["w@0,0", "w@2,0"]


def changed(place: Sequence[int], value: object) -> list[Any]:
    """The row of a tensor with another value at a place."""
    row: list[Any] = [ROW[0], [*ROW[1]], [[file, [*start], [*shape]] for file, start, shape in ROW[2]]]  # type: ignore[misc]
    inner = row
    for number in place[:-1]:
        inner = inner[number]
    inner[place[-1]] = value
    return row


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"w": 1},
        {"w": {}},
        {"w": ROW[:2]},
        {"w": [*ROW, 1]},
        {"w": ("F32", *ROW[1:])},
        *(
            {"w": changed(place, value)}
            for place, value in (
                ((0,), "F33"),
                ((1,), 4),
                ((1, 0), -1),
                ((1, 0), True),
                ((1, 0), 4.0),
                ((2,), {}),
                ((2, 0), 1),
                ((2, 0), ["a", [0, 0]]),
                ((2, 0), ["a", [0, 0], [2, 3], 1]),
                ((2, 0, 0), 1),
                ((2, 0, 1), [-1, 0]),
                ((2, 0, 1), [0]),
                ((2, 0, 1), [3, 0]),
                ((2, 0, 2), [2, 4]),
                ((2, 0, 2), "23"),
            )
        ),
    ],
)
def test_any_other_form_of_a_table_is_refused(value: object) -> None:
    assert from_json({"w": changed((1, 0), 4)})["w"].shape == (4, 3)
    with pytest.raises(ValueError):  # noqa: PT011 - the kind is what callers tell apart
        from_json(value)


def cut(shape: tuple[int, ...], draw: random.Random) -> list[Box]:
    """A tensor cut at random places of some of its axes."""
    cuts = []
    for size in shape:
        ends = sorted({0, size, *draw.sample(range(size + 1), min(size + 1, draw.randint(0, 1)))})
        cuts.append(list(itertools.pairwise(ends)) or [(0, 0)])
    return [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*cuts)]


def test_blocks_are_accepted_where_every_element_is_in_exactly_one() -> None:
    draw = random.Random(5)
    kinds = set()
    for number in range(400):
        shape = draw.choice([(4, 3), (6,), (2, 3, 2), (), (1, 4)])
        boxes = cut(shape, draw)
        if number % 2 and shape:
            at = draw.randrange(len(boxes))
            start, extent = boxes[at]
            axis = draw.randrange(len(shape))
            size = draw.randint(0, shape[axis])
            begin = draw.randint(0, shape[axis] - size)
            boxes[at] = (
                (*start[:axis], begin, *start[axis + 1 :]),
                (*extent[:axis], size, *extent[axis + 1 :]),
            )
        draw.shuffle(boxes)
        counts = torch.zeros(shape, dtype=torch.int64)
        for start, extent in boxes:
            counts[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))] += 1
        parts = [{"w": stored(shape, [box])} for box in boxes]
        if bool((counts == 1).all()):
            found = merged("optimizer", parts)["w"]
            assert (found.dtype, found.shape) == ("F32", shape)
            assert found.blocks == tuple(entry for part in parts for entry in part["w"].blocks)
            kinds.add("whole")
        else:
            with pytest.raises(CheckpointError) as caught:
                merged("optimizer", parts)
            assert caught.value.problem.code == "checkpoint.blocks_do_not_fit"
            kinds.add("overlap" if int(counts.sum()) >= math.prod(shape) else "gap")
    assert kinds == {"whole", "overlap", "gap"}


def test_blocks_that_follow_one_another_are_compared_with_their_neighbours_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Block) -> None:
        raise AssertionError("a pair was compared")

    monkeypatch.setattr(resharding, "_overlap", refuse)
    for shape, boxes in (
        ((4, 3), [((row, 0), (1, 3)) for row in range(4)]),
        ((2, 3, 2), [((0, 0, 0), (1, 3, 2)), ((1, 0, 0), (1, 1, 2)), ((1, 1, 0), (1, 2, 2))]),
        ((1, 4), [((0, 0), (1, 1)), ((0, 1), (1, 3))]),
        ((5,), [((3,), (2,)), ((0,), (3,))]),
    ):
        assert len(merged("optimizer", [{"w": stored(shape, boxes)}])["w"].blocks) == len(boxes)


def test_ranks_agree_on_type_and_shape_and_each_may_give_other_tensors() -> None:
    first, second = stored((4,), [((0,), (2,))]), stored((4,), [((2,), (2,))])
    table = merged("optimizer", [{"w": first, "v": stored((), [((), ())])}, {"w": second}])
    assert list(table) == ["w", "v"]
    assert table["w"] == StoredTensor("F32", (4,), first.blocks + second.blocks)
    assert merged("optimizer", []) == {}
    for other in (stored((4,), [((2,), (2,))], "BF16"), stored((4, 1), [((2, 0), (2, 1))])):
        with pytest.raises(CheckpointError):
            merged("optimizer", [{"w": first}, {"w": other}])


def written(folder: Path, tensors: dict[str, Tensor], draw: random.Random) -> dict[str, StoredTensor]:
    """Tensors in the files of three ranks, cut at random."""
    files: dict[str, dict[str, Tensor]] = {f"{rank}.safetensors": {} for rank in range(3)}
    table: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        shape, blocks = tuple(tensor.shape), list[Block]()
        for start, extent in cut(shape, draw):
            file = draw.choice(sorted(files))
            made = block(start, extent, of=shape, file=file, name=name)
            piece = tensor[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))]
            files[file][made.key] = piece.clone(memory_format=torch.contiguous_format)
            blocks.append(made)
        table[name] = StoredTensor("F32" if tensor.dtype == torch.float32 else "I64", shape, tuple(blocks))
    for file, content in files.items():
        save_file(content, folder / file)
    return table


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    sizes = {"matrix": (5, 4), "cube": (3, 2, 3), "vector": (7,), "scalar": ()}
    values = {name: torch.arange(float(math.prod(shape))).view(shape) + 1.0 for name, shape in sizes.items()}
    return {**values, "whole": torch.arange(6).view(2, 3)}


def inner_boxes(shape: tuple[int, ...]) -> list[Box]:
    """Every block inside of a tensor."""
    axes = [[(a, n) for a in range(size) for n in range(1, size - a + 1)] for size in shape]
    return [(tuple(a for a, _ in box), tuple(n for _, n in box)) for box in itertools.product(*axes)]


def test_any_block_is_read_from_any_others(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    draw = random.Random(3)
    reader = BlockReader(tmp_path, written(tmp_path, tensors, draw))
    for name, tensor in tensors.items():
        assert torch.equal(reader.full_tensor(name), tensor)
        assert reader.full_tensor(name).dtype == tensor.dtype
        for start, extent in inner_boxes(tuple(tensor.shape)):
            found = reader.read(ShardRequest(name, tuple(tensor.shape), tensor.dtype, start, extent))
            want = tensor[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))]
            assert found.dtype == tensor.dtype
            assert torch.equal(found, want)


class Sink:
    """Asks for blocks and keeps what it is given, in order."""

    def __init__(self, *requests: ShardRequest) -> None:
        self.requests = requests
        self.got: list[tuple[str, tuple[int, ...], list[Any]]] = []

    def shard_requests(self) -> tuple[ShardRequest, ...]:
        return self.requests

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        self.got.append((name, start, tensor.tolist()))


def test_a_sink_gets_all_that_it_asks_for_or_nothing(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    reader = BlockReader(tmp_path, written(tmp_path, tensors, random.Random(4)))
    wanted = [
        ShardRequest("matrix", (5, 4), torch.float32, (1, 1), (2, 2)),
        ShardRequest("scalar", (), torch.float32, (), ()),
    ]
    sink = Sink(*wanted)
    assert reader.load(sink) == 2
    assert sink.got == [("matrix", (1, 1), [[6.0, 7.0], [10.0, 11.0]]), ("scalar", (), 1.0)]
    for name, shape, dtype in (
        ("absent", (), torch.float32),
        ("matrix", (4, 5), torch.float32),
        ("matrix", (5, 4), torch.float64),
    ):
        refused = Sink(*wanted, ShardRequest(name, shape, dtype, (0,) * len(shape), shape))
        with pytest.raises(CheckpointError) as caught:
            reader.load(refused)
        assert caught.value.problem.code == "checkpoint.tensor_differs"
        assert refused.got == []


def test_files_are_opened_once_and_only_those_that_hold_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.arange(12.0).view(4, 3)
    for number in range(2):
        save_file({f"w@{2 * number},0": tensor[2 * number : 2 * number + 2].clone()}, tmp_path / f"{number}")
    real, opened = resharding.safe_open, list[str]()

    def opening(path: Path, framework: str) -> Any:
        opened.append(path.name)
        return real(path, framework=framework)

    monkeypatch.setattr(resharding, "safe_open", opening)
    reader = BlockReader(tmp_path, {"w": stored((4, 3), [((0, 0), (2, 3)), ((2, 0), (2, 3))])})
    last = ShardRequest("w", (4, 3), torch.float32, (2, 0), (2, 3))
    for _ in range(2):
        assert torch.equal(reader.read(last), tensor[2:])
    assert opened == ["1"]
    assert torch.equal(reader.full_tensor("w"), tensor)
    assert opened == ["1", "0"]


def test_the_table_of_files_of_whole_tensors_is_that_of_their_headers(tmp_path: Path) -> None:
    save_file({"w": torch.arange(6.0).view(2, 3), "s": torch.tensor(2.0)}, tmp_path / "a")
    save_file({"v": torch.arange(3, dtype=torch.int8)}, tmp_path / "b")
    table = table_of_files(tmp_path, ["a", "b"])
    assert table == {
        "w": StoredTensor("F32", (2, 3), (Block("a", "w", (0, 0), (2, 3)),)),
        "s": StoredTensor("F32", (), (Block("a", "s", (), ()),)),
        "v": StoredTensor("I8", (3,), (Block("b", "v", (0,), (3,)),)),
    }
    assert BlockReader(tmp_path, table).full_tensor("v").tolist() == [0, 1, 2]
