"""Which tensors an engine is sent, and the digests by which both sides compare them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rft_core.errors import OptionsError, ServiceError
from rft_engine.weight_sync.fingerprints import (
    WeightSource,
    compare,
    element_digest,
    fingerprint_of,
    is_tied,
    required_names,
)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TENSORS = {EMBEDDING: torch.randn(5, 3), "norm.weight": torch.ones(3), HEAD: torch.randn(5, 3)}


def directory(path: Path, config: dict[str, Any], names: list[str] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    chosen = {name: TENSORS[name] for name in names or list(TENSORS)}
    first, *others = chosen
    save_file({first: chosen[first]}, path / "model-1.safetensors")
    if others:
        save_file({name: chosen[name] for name in others}, path / "model-2.safetensors")
    return path


def source(path: Path, given: dict[str, Tensor] | list[tuple[str, Tensor]]) -> WeightSource:
    def provider() -> Iterator[tuple[str, Tensor]]:
        yield from (given.items() if isinstance(given, dict) else given)

    return WeightSource(provider, path)


def sent(made: WeightSource, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return dict(made.tensors(dtype))


def test_a_digest_is_of_the_shape_and_of_elements_in_the_type_of_the_engine() -> None:
    tensor = torch.arange(1000.0).view(10, 100)
    digest = element_digest(tensor, (10, 100), torch.float32)
    assert len(digest) == 16
    assert element_digest(tensor.clone().requires_grad_(), (10, 100), torch.float32) == digest
    assert element_digest(tensor, (100, 10), torch.float32) != digest
    assert element_digest(tensor, (10, 100), torch.bfloat16) != digest
    for place in (0, 999):
        other = tensor.clone()
        other.view(-1)[place] += 1.0
        assert element_digest(other, (10, 100), torch.float32) != digest, "the first and the last are among them"
    moved = tensor + 1.0
    assert element_digest(moved, (10, 100), torch.float32) != digest
    small = torch.arange(64.0)
    for place in range(64):
        other = small.clone()
        other[place] += 0.5
        assert element_digest(other, (64,), torch.float32) != element_digest(small, (64,), torch.float32)
    assert element_digest(torch.zeros(0), (0,), torch.float32)
    assert fingerprint_of([("a", tensor)], torch.float32) == {"a": digest}


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({}, False),
        ({"tie_word_embeddings": True}, True),
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, False),
    ],
)
def test_whether_a_model_is_tied(tmp_path: Path, config: dict[str, Any], tied: bool) -> None:
    path = directory(tmp_path / "m", config)
    assert is_tied(path) is tied
    assert required_names(path) == ({EMBEDDING, "norm.weight"} if tied else set(TENSORS))


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionsError) as caught:
        is_tied(tmp_path)
    assert caught.value.problem.code == "engine.model_dir"


def test_every_tensor_is_sent_once_in_the_type_of_the_engine(tmp_path: Path) -> None:
    given = TENSORS | {"count": torch.tensor([3])}
    made = source(directory(tmp_path / "m", {}), given)
    found = sent(made, torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(TENSORS, torch.bfloat16) | {
        "count": torch.int64
    }
    assert made.shapes == {name: list(tensor.shape) for name, tensor in given.items()}
    assert made.sent["norm.weight"] == element_digest(TENSORS["norm.weight"], (3,), torch.bfloat16)
    assert made.num_tensors == 3
    assert made.num_bytes == sum(file.stat().st_size for file in (tmp_path / "m").glob("*.safetensors"))
    assert set(sent(made)) == set(given), "again from the beginning"


@pytest.mark.parametrize("names", [[EMBEDDING], [HEAD], [EMBEDDING, HEAD], [HEAD, EMBEDDING]])
def test_a_tied_tensor_goes_once_under_the_name_of_the_embedding(tmp_path: Path, names: list[str]) -> None:
    path = directory(tmp_path / "m", {"tie_word_embeddings": True}, [EMBEDDING, "norm.weight"])
    found = sent(source(path, {name: TENSORS[name] for name in ("norm.weight", *names)}))
    assert list(found) == ["norm.weight", EMBEDDING]
    assert torch.equal(found[EMBEDDING], TENSORS[names[0]])


def test_a_tensor_that_is_missing_or_comes_twice_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path / "m", {})
    with pytest.raises(ServiceError) as caught:
        sent(source(path, {"norm.weight": TENSORS["norm.weight"]}))
    assert caught.value.problem.code == "engine.weights.incomplete"
    assert EMBEDDING in caught.value.problem.what
    assert HEAD in caught.value.problem.what
    with pytest.raises(ServiceError) as caught:
        sent(source(path, [*TENSORS.items(), ("norm.weight", torch.ones(3))]))
    assert "norm.weight twice" in caught.value.problem.what


def test_digests_that_differ_are_an_error_with_the_first_names() -> None:
    mine = {f"t{number}": "a" for number in range(8)}
    compare(mine, dict(mine), 4, 3, "held")
    compare(mine, {"t0": "a"}, 4, 3, "held")
    for found, count, named in (
        ({"t1": "b", "t0": "a"}, 1, "t1"),
        ({"other": "a"}, 1, "other"),
        (dict.fromkeys(mine, "b"), 8, "t0, t1, t2, t3, t4 and 3 more"),
        (dict.fromkeys([f"t{number}" for number in range(5)], "b"), 5, "t0, t1, t2, t3, t4"),
    ):
        with pytest.raises(ServiceError) as caught:
            compare(mine, found, 4, 3, "held")
        assert caught.value.problem.code == "engine.logprob_parity"
        assert caught.value.problem.what.startswith(f"{count} of {len(found)} tensors")
        assert caught.value.problem.what.endswith(named)


@pytest.mark.parametrize("num", [0, 1, 2, 63, 64, 65, 1000, 4097])
def test_a_digest_is_over_at_most_64_elements_evenly_spaced(num: int) -> None:
    values = [0.5 * place for place in range(num)]
    few = min(num, 64)
    places = [round(number * (num - 1) / max(few - 1, 1)) for number in range(few)]
    content = repr((num,)).encode() + struct.pack(f"<{few}f", *(values[place] for place in places))
    wanted = hashlib.blake2b(content, digest_size=8).hexdigest()
    assert element_digest(torch.tensor(values), [num], torch.float32) == wanted


def test_the_last_element_of_a_tensor_beyond_the_integers_of_float32_is_digested() -> None:
    tensor = torch.zeros(2**24 + 2, dtype=torch.int8)
    before = element_digest(tensor, tensor.shape, torch.float32)
    tensor[-1] = 1
    assert element_digest(tensor, tensor.shape, torch.float32) != before


def test_what_is_sent_has_no_gradient(tmp_path: Path) -> None:
    given = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in TENSORS.items()}
    made = source(directory(tmp_path / "m", {}), dict(given))
    for dtype in (torch.float32, torch.float16):
        assert not any(tensor.requires_grad for tensor in sent(made, dtype).values())
