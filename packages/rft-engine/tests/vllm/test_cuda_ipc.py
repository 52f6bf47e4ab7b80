"""Values of CUDA handles as JSON and back: each kind is told from the others, and nothing else passes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from rft_engine.vllm.cuda_ipc import decode, decode_update, encode, encode_update

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -3,
    2.5,
    "text",
    b"",
    b"\x00\xff",
    [1, [b"x"], (2,)],
    (),
    (1, (None, [3]), "x"),
    {},
    {"a": 1, 2: b"y", (3, "b"): torch.bfloat16, "map": {"tuple": 1}},
    torch.float32,
    torch.bool,
    torch.Tensor,
    torch.nn.Parameter,
    torch.UntypedStorage,
    torch.TypedStorage,
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode(value))))
    assert found == value
    assert type(found) is type(value)


def test_a_size_comes_back_as_a_tuple_of_its_numbers() -> None:
    assert encode(torch.Size([2, 3])) == {"tuple": [2, 3]}
    assert encode({"a": [torch.Tensor]}) == {"map": [["a", [{"class": "torch.Tensor"}]]]}
    assert encode((b"a", torch.float16)) == {"tuple": [{"bytes": "YQ=="}, {"dtype": "float16"}]}


@pytest.mark.parametrize("value", [object(), torch.zeros(1), int, {1, 2}, print])
def test_other_values_are_not_written(value: Any) -> None:
    with pytest.raises((AssertionError, TypeError)):
        encode(value)


@pytest.mark.parametrize("value", [{"dtype": "Tensor"}, {"dtype": "nn"}, {"class": "os.system"}, {"tuple": [], "x": 1}])
def test_other_values_are_not_read(value: Any) -> None:
    with pytest.raises((AssertionError, KeyError, ValueError)):
        decode(value)


def test_of_an_update_the_handles_alone_are_rewritten() -> None:
    handles = [{"GPU-0": (torch.Tensor, (2, 3), torch.float32, b"abc")}]
    update = {"names": ["a"], "ipc_handles": handles, "shapes": [[2, 3]]}
    written = encode_update(update)
    assert written == {"names": ["a"], "ipc_handles": encode(handles), "shapes": [[2, 3]]}
    assert decode_update(json.loads(json.dumps(written))) == update
    plain = {"names": ["a"], "dtype_names": ["float32"]}
    assert encode_update(plain) == decode_update(plain) == plain
