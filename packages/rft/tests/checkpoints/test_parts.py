"""The model's part of a checkpoint where every rank has all weights: rank 0 writes the directory."""

from __future__ import annotations

from typing import Any

from rft.checkpoints.parts import FullWeights


def test_a_model_that_every_rank_has_in_full_is_written_by_one(calls: Any) -> None:
    model = calls.double("model")
    parts = FullWeights(model)
    assert parts.named_parameters() == "model.named_parameters()"
    assert parts.local_weights() is None
    assert parts.directory_writer() == "model.save_pretrained"
    copy = calls.double("copy")
    assert parts.snapshot(copy) == "model.snapshot()"
    assert calls.taken() == ["model.named_parameters()", "model.snapshot(copy)"]
