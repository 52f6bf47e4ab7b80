"""Checksums are of the bits; comparisons of ranks and steps by them: `test_guarded_steps.py`."""

from __future__ import annotations

import torch

from rft_trainer.update.weight_check import checksums


def test_sums_are_of_the_bits() -> None:
    values = torch.tensor([0.0, -0.0, 1.0])
    same = checksums([("a", values), ("b", values.clone()), ("none", torch.empty(0))])
    assert same["a"] == same["b"]
    assert same["none"] == 0
    assert checksums([("a", torch.tensor([0.0, 0.0, 1.0]))])["a"] != same["a"], "0 and -0 are other bits"
