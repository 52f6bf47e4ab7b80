"""What a worker of SGLang does with a request: it loads, says what it read and what it holds, or says the error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_engine.sglang.weight_loader import exchange
from rft_engine.weight_sync.fingerprints import fingerprint_of
from rft_engine.weight_sync.weight_file import write_weight_file

NAMES = [f"layers.0.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "norm")]


def tensors(seed: int = 0) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(2, 3, generator=chance) for name in NAMES}


class Model:
    """Holds q, k, v and gate, up in one matrix each, as SGLang's models do without declaring it."""

    def __init__(self, given: dict[str, Tensor], error: Exception | None = None) -> None:
        self.loads, self.given, self.error = 0, given, error

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if self.error is not None:
            raise self.error
        self.given, self.loads = {name: tensor.clone() for name, tensor in weights}, self.loads + 1

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        rows = list(self.given.values())
        yield "layers.0.qkv_proj.weight", torch.cat(rows[:3])
        yield "layers.0.gate_up_proj.weight", torch.cat(rows[3:5])
        yield NAMES[5], rows[5]


@pytest.fixture
def ask(tmp_path: Path) -> Any:
    """Sends one request and returns the answer, the only file that the worker leaves."""

    def send(model: Any, weights: Path | None = None, dtype: str = "float32", **changes: Any) -> dict[str, Any]:
        path, answers = tmp_path / "request.json", tmp_path / "answers"
        answers.mkdir(exist_ok=True)
        request = {
            "weights": None if weights is None else str(weights),
            "dtype": dtype,
            "shapes": {name: [2, 3] for name in NAMES},
            "answer": str(answers / "answer"),
        }
        path.write_text(json.dumps(request | changes))
        exchange(model, [(str(path), torch.empty(0))])
        [file] = answers.iterdir()
        assert file.name.startswith("answer."), "a hidden file would not be found"
        answer = json.loads(file.read_text())
        file.unlink()
        return answer

    return send


def as_json(given: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Any:
    return json.loads(json.dumps(fingerprint_of(given.items(), dtype)))


def test_a_file_is_loaded_and_both_what_was_read_and_what_is_held_come_back(ask: Any, tmp_path: Path) -> None:
    model, sent = Model(tensors(0)), tensors(1)
    write_weight_file(tmp_path / "weights.safetensors", list(sent.items()))
    answer = ask(model, tmp_path / "weights.safetensors")
    assert answer == {"read": as_json(sent), "held": as_json(sent)}
    assert model.loads == 1


def test_a_request_without_a_file_only_looks(ask: Any) -> None:
    model = Model(tensors(0))
    assert ask(model) == {"read": {}, "held": as_json(tensors(0))}
    assert model.loads == 0


def test_digests_are_of_the_engine_s_dtype(ask: Any) -> None:
    halves = as_json(tensors(0), torch.bfloat16)
    assert ask(Model(tensors(0)), dtype="bfloat16")["held"] == halves != as_json(tensors(0))


def test_a_model_that_declares_its_fused_matrices_is_believed(ask: Any) -> None:
    model = Model(tensors(0))
    vars(model)["packed_modules_mapping"] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    assert set(ask(model)["held"]) == {*NAMES[:3], NAMES[5]}
    vars(model)["packed_modules_mapping"] = {}
    assert set(ask(model)["held"]) == set(NAMES)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("a tensor \n has   another shape"), "a tensor has another shape"),
        (ValueError("x" * 700), "x" * 600),
        (AssertionError(), "AssertionError"),
        (OSError("gone"), "gone"),
        (KeyError("q"), "'q'"),
    ],
    ids=["lines", "long", "without_words", "file", "name"],
)
def test_an_error_is_the_answer_in_one_short_line(ask: Any, tmp_path: Path, error: Exception, words: str) -> None:
    write_weight_file(tmp_path / "weights.safetensors", list(tensors(1).items()))
    assert ask(Model(tensors(0), error), tmp_path / "weights.safetensors") == {"error": words}


def test_a_file_that_is_absent_is_an_answer_too(ask: Any, tmp_path: Path) -> None:
    model = Model(tensors(0))
    assert list(ask(model, tmp_path / "absent.safetensors")) == ["error"]
    assert model.loads == 0


def test_models_of_one_process_answer_in_files_of_their_own(tmp_path: Path) -> None:
    request = {"weights": None, "dtype": "float32", "shapes": {}, "answer": str(tmp_path / "answer")}
    (tmp_path / "request.json").write_text(json.dumps(request))
    models = [SimpleNamespace(named_parameters=lambda: iter(())) for _ in range(2)]
    for model in models:
        exchange(model, [(str(tmp_path / "request.json"), torch.empty(0))])
    assert len(list(tmp_path.glob("answer.*"))) == 2
