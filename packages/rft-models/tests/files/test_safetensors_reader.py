"""Tensors of a directory's files, read a block at a time, under the model's names or those of the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rft_core.errors import DataError, OptionsError
from rft_models.files.safetensors_reader import WeightFiles, shapes_of

MATRIX = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3)
SCALAR, VECTOR = torch.tensor(5.0), torch.arange(4.0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_file({"matrix": MATRIX, "scalar": SCALAR}, tmp_path / "1.safetensors")
    save_file({"vector": VECTOR}, tmp_path / "2.safetensors")
    (tmp_path / "notes.txt").write_text("no weights")
    return tmp_path


def test_a_block_is_read_from_where_it_starts(directory: Path) -> None:
    files = WeightFiles(directory)
    assert sorted(files.names()) == ["matrix", "scalar", "vector"]
    block = files.block("matrix", start=(1, 2), shape=(3, 1))
    assert block.dtype == torch.bfloat16
    assert torch.equal(block, MATRIX[1:4, 2:3])
    assert torch.equal(files.block("matrix", (0, 0), (4, 3)), MATRIX)
    assert torch.equal(files.block("vector", (2,), (1,)), VECTOR[2:3])
    assert torch.equal(files.block("scalar", (), ()), SCALAR)
    files.close()
    with pytest.raises(KeyError):
        files.block("scalar", (), ())


def test_a_model_s_own_names_are_those_of_the_files_that_it_was_given(directory: Path) -> None:
    files = WeightFiles(directory)
    files.rename({"model.matrix": "matrix"})
    assert torch.equal(files.block("model.matrix", (0, 0), (1, 3)), MATRIX[:1])
    assert torch.equal(files.block("vector", (0,), (4,)), VECTOR)
    files.refuse_others({"model.matrix": (4, 3), "vector": (4,), "scalar": ()})


@pytest.mark.parametrize(
    ("shapes", "what"),
    [
        ({"matrix": (4, 3), "other": (2,)}, "1 of 2 .* other .2. .not in the files."),
        ({"matrix": (3, 4), "vector": (4,)}, "1 of 2 .* matrix .3, 4. ..4, 3.."),
        ({"vector": (5,), "matrix": (3, 4)}, "2 of 2 .* matrix"),
        ({"model.matrix": (4, 3)}, "1 of 1 .* model.matrix"),
    ],
)
def test_a_tensor_that_the_files_do_not_hold_in_its_shape_is_refused(
    shapes: dict[str, tuple[int, ...]], what: str, directory: Path
) -> None:
    files = WeightFiles(directory)
    with pytest.raises(OptionsError, match=what) as caught:
        files.refuse_others(shapes)
    assert caught.value.problem.code == "models.meta_names"
    files.refuse_others({"matrix": (4, 3)})


def test_a_damaged_file_is_named_when_it_is_opened(directory: Path) -> None:
    file = directory / "2.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError) as caught:
        WeightFiles(directory)
    assert (caught.value.problem.code, caught.value.problem.where) == ("models.damaged_weights", str(file))


def test_shapes_are_those_of_the_parameters_tied_ones_once() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "b": torch.nn.Linear(2, 3, bias=False)})
    model["b"].weight = model["a"].weight
    model["a"].register_buffer("buffer", torch.zeros(7))
    assert shapes_of(model) == {"a.weight": (3, 2), "a.bias": (3,)}
