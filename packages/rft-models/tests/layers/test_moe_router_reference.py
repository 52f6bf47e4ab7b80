"""The load-balancing loss against its equations, and models whose own loss is compared with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.errors import OptionsError, PreflightError
from rft_models.layers.moe_router import Router, count_experts, load_balancing_loss, router_of, verify_router

ROUTER = Router(num_experts=5, num_choices=2)


def logits(num_rows: int = 8, num_layers: int = 3) -> list[Tensor]:
    """Layers whose last expert is never chosen."""
    generator = torch.Generator().manual_seed(1)
    found = torch.randn(num_layers, num_rows, 5, generator=generator)
    found[..., 4] -= 50
    return list(found)


def written_out(layers: list[Tensor], rows: list[int]) -> tuple[float, float, list[float]]:
    """(E sum f P, busiest expert over the mean, counts), row after row."""
    counts, masses = [0.0] * 5, [0.0] * 5
    for layer in layers:
        for row in rows:
            values = layer[row].double()
            for expert in values.argsort(descending=True)[:2].tolist():
                counts[expert] += 1
            for expert, share in enumerate(values.softmax(0).tolist()):
                masses[expert] += share
    num_rows = len(rows) * len(layers)
    loss = 5 * sum(count / num_rows * mass / num_rows for count, mass in zip(counts, masses, strict=True))
    return loss, max(counts) * 5 / sum(counts), counts


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5, 6, 7], [2, 2, 5], [7]])
def test_the_loss_is_that_of_the_equations(rows: list[int]) -> None:
    layers = [layer.requires_grad_() for layer in logits()]
    loss, busiest, counts = written_out(layers, rows)
    rows_R = torch.tensor(rows)
    counted = count_experts(layers, rows_R, ROUTER)
    assert (counted.dtype, counted.tolist(), counted.requires_grad) == (torch.float64, counts, False)
    for given in (None, counted.float()):
        found = load_balancing_loss(layers, rows_R, ROUTER, given)
        assert float(found.share.detach()) == pytest.approx(loss, rel=1e-6)
        assert float(found.max_load) == pytest.approx(busiest)
        assert found.share.requires_grad


def test_rows_of_a_part_weigh_by_the_counts_of_the_whole_step() -> None:
    layers = logits()
    counts = count_experts(layers, torch.arange(8), ROUTER)
    parts = [load_balancing_loss(layers, torch.tensor(rows), ROUTER, counts) for rows in ([0, 1, 2], [3, 4, 5, 6], [7])]
    loss, busiest, _ = written_out(layers, list(range(8)))
    assert sum(float(part.share) for part in parts) == pytest.approx(loss, rel=1e-6)
    assert {float(part.max_load) for part in parts} == {busiest}


def test_a_step_without_rows_has_no_loss() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    found = load_balancing_loss(logits(), nothing, ROUTER)
    assert (float(found.share), float(found.max_load)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("model_type", "config", "expected"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, Router(4, 2)),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3}, Router(8, 3)),
        ("qwen3_moe", {"num_experts": 8}, None),
        ("qwen3_moe", {"num_experts_per_tok": 3}, None),
        ("qwen2", {"num_experts": 8, "num_experts_per_tok": 3}, None),
        ("no_such_type", {"num_experts": 8, "num_experts_per_tok": 3}, None),
    ],
)
def test_a_router_is_read_where_the_architecture_has_this_loss(
    model_type: str, config: dict[str, Any], expected: Router | None
) -> None:
    if expected is not None:
        assert router_of(model_type, config, "here") == expected
        return
    with pytest.raises(OptionsError) as caught:
        router_of(model_type, config, "here")
    assert caught.value.problem.code == "router.none"


class Model:
    """A mixture in training mode whose own loss is `factor` times the right one."""

    device = torch.device("cpu")

    def __init__(self, factor: float, *, gives_logits: bool = True) -> None:
        self.factor, self.gives_logits, self.training = factor, gives_logits, True

    def eval(self) -> None:
        """Note the mode."""
        self.training = False

    def train(self, mode: bool) -> None:
        """Note the mode."""
        self.training = mode

    def __call__(self, *, input_ids: Tensor, use_cache: bool, output_router_logits: bool) -> Any:
        """One sequence, which fills all rows."""
        assert (self.training, use_cache, output_router_logits) == (False, False, True)
        layers = logits(input_ids.numel())
        loss, _, _ = written_out(layers, list(range(input_ids.numel())))
        given = tuple(layer.view(*input_ids.shape, 5) for layer in layers) if self.gives_logits else None
        return SimpleNamespace(router_logits=given, aux_loss=torch.tensor(self.factor * loss))


@pytest.mark.parametrize("factor", [1.0, 1 / 1.019, 1 / 0.981])
def test_a_model_with_this_loss_within_a_fiftieth_passes(factor: float) -> None:
    model = Model(factor)
    verify_router(model, ROUTER, "here")
    assert model.training


@pytest.mark.parametrize(
    "model", [Model(1 / 1.021), Model(1 / 0.979), Model(0.5), Model(3.0), Model(1.0, gives_logits=False)]
)
def test_a_model_with_another_loss_or_without_logits_is_refused(model: Model) -> None:
    with pytest.raises(PreflightError) as caught:
        verify_router(model, ROUTER, "here")
    assert caught.value.problem.code == "router.differs"
    assert model.training
