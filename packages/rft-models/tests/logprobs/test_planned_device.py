"""The head by the limits of a planned device: pieces that are alike run twice, and never more memory than a run's."""

from __future__ import annotations

import pytest
import torch

from rft_models.logprobs.backend import KernelEpilogue, choose_epilogue
from rft_models.logprobs.epilogue import EagerEpilogue, Shape
from rft_models.logprobs.fused_loss import chunk_for
from rft_models.logprobs.linear_logprobs import linear_logprobs, slab_for
from rft_models.logprobs.planned_device import ShapesOfKernels, device_type, held_slab, is_planned, planned_for, traced

HIDDEN = torch.zeros(4, 8)


def test_a_run_goes_by_the_device_of_its_tensors_and_forms_every_piece() -> None:
    assert not is_planned()
    assert device_type(HIDDEN) == "cpu"
    assert list(traced(range(5))) == [0, 1, 2, 3, 4]
    assert held_slab(3, 100) == 3


def test_a_plan_goes_by_its_own_device_until_it_is_left() -> None:
    weight = torch.zeros(1000, 8)
    on_cpu = slab_for(HIDDEN, 4096), chunk_for(HIDDEN, weight)
    with planned_for("cuda"):
        assert is_planned()
        assert device_type(HIDDEN) == "cuda"
        assert list(traced(range(5))) == [0, 1]
        assert (held_slab(3, 100), held_slab(50, 100)) == (13, 50)
        assert (slab_for(HIDDEN, 4096), chunk_for(HIDDEN, weight)) == (16384, 1_342_177)
        epilogue = choose_epilogue(HIDDEN, 10, Shape(1.0, None))
        assert isinstance(epilogue, KernelEpilogue)
        assert epilogue.module is ShapesOfKernels
        assert isinstance(choose_epilogue(HIDDEN.double(), 10, Shape(1.0, None)), EagerEpilogue)
    assert (slab_for(HIDDEN, 4096), chunk_for(HIDDEN, weight)) == on_cpu
    with planned_for("cpu"):
        assert isinstance(choose_epilogue(HIDDEN, 1 << 40, Shape(1.0, None)), EagerEpilogue)
    with pytest.raises(ValueError, match="left"), planned_for("cpu"):
        raise ValueError("left")
    assert not is_planned()


def test_kernels_without_arithmetic_give_what_the_head_takes() -> None:
    hidden = torch.randn(6, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(40, 8, dtype=torch.bfloat16, requires_grad=True)
    with planned_for("cuda"):
        logprobs_R, entropy_R = linear_logprobs(
            hidden, weight, torch.arange(6), with_entropy=True, entropy_gradient=True
        )
        assert entropy_R is not None
        (logprobs_R + entropy_R).sum().backward()
    assert (logprobs_R.shape, logprobs_R.dtype) == ((6,), torch.float32)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
