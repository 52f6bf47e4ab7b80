"""Evaluation of moving averages: where there are any, held-out prompts and a way to load them."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.checkpoints import ema_weights
from rft_models.lora import files


@pytest.mark.parametrize(
    ("evaluator", "averages", "refresh", "evaluates"),
    [
        ("evaluator", "averages", "refresh", True),
        (None, "averages", "refresh", False),
        ("evaluator", None, "refresh", False),
        ("evaluator", "averages", None, False),
    ],
)
def test_averages_are_evaluated_where_prompts_are_held_out_and_weights_can_be_exchanged(
    calls: Any, caplog: pytest.LogCaptureFixture, evaluator: Any, averages: Any, refresh: Any, evaluates: bool
) -> None:
    calls.put(ema_weights, "EmaEvaluator")
    with caplog.at_level(logging.INFO):
        found = [ema_weights.averaged_evaluator(evaluator, averages, refresh, tells=tells) for tells in (False, True)]
    assert found == (["EmaEvaluator()"] * 2 if evaluates else [None, None])
    assert calls.taken() == (["EmaEvaluator('evaluator', 'averages', 'refresh')"] * 2 if evaluates else [])
    # one of the two ranks says why
    assert len(caplog.records) == (1 if refresh is None else 0)


def test_a_run_with_adapters_is_known_by_their_folder(tmp_path: Path) -> None:
    checkpoint: Any = SimpleNamespace(model_directory=tmp_path)
    assert not ema_weights.has_adapters(checkpoint)
    (tmp_path / files.FOLDER).mkdir()
    assert ema_weights.has_adapters(checkpoint)


class Tensors:
    """Tensors by name."""

    def __init__(self, **tensors: float) -> None:
        self.table = tensors

    def full_tensor(self, name: str) -> torch.Tensor:
        return torch.tensor(self.table[name])


def test_a_tensor_is_its_average_under_the_name_that_files_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(model: str, named: Any) -> Any:
        """Each tensor of the model is two in its files."""
        return lambda: [(f"{model}.{name}.{part}", tensor + part) for name, tensor in named() for part in (0, 1)]

    monkeypatch.setattr(ema_weights, "to_checkpoint_names", renamed)
    stored: Any = Tensors(**{"m.a.0": 1.0, "m.a.1": 2.0, "b": 3.0})
    averages: Any = Tensors(**{"ema/a": 10.0, "ema/other": 20.0})
    own = {"m.a.0": "a", "m.a.1": "a"}
    found = ema_weights.TensorsWithEma(stored, averages, {"a": "ema/a"}, own, "m")
    assert found.table == stored.table
    assert [float(found.full_tensor(name)) for name in ("m.a.0", "m.a.1", "b")] == [10.0, 11.0, 3.0]
