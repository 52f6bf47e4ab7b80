"""Every public loss, found by introspection, under `torch.func.grad`, `vmap` and `torch.compile(fullgraph=True)`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_algos import losses, surrogates
from rft_algos.losses.preference_variants import Pairs
from rft_algos.objectives import named_losses

D = torch.float64
AT = torch.tensor([-0.7, -2.2, -0.6, -1.4, -1.1, -2.5, -0.85, -0.3], dtype=D)
OLD = torch.tensor([-1.0, -2.0, -0.5, -1.5, -0.7, -2.4, -1.1, -0.2], dtype=D)
ADVANTAGES = torch.tensor([1.0, 1.0, 0.4, -0.5, -0.5, -0.5, 0.3, 0.2], dtype=D)
MASK = torch.tensor([True, True, False, True, True, True, True, False])
IDS = torch.tensor([0, 0, 0, 1, 1, 1, 2, -1])
LENGTHS = torch.tensor([3.0, 5.0, 2.0, 4.0, 3.0, 7.0, 1.0, 2.0], dtype=D)

OF_POLICY: dict[str, Callable[[Tensor], Any]] = {
    **dict.fromkeys(
        ("logprobs_T", "value_T", "chosen_B", "policy_B", "policy_chosen_B", "logits_N", "log_normaliser_N"),
        lambda x: x,
    ),
    **dict.fromkeys(
        ("mean_logprobs_B", "mean_logprobs_T", "logprobs_B", "values_T", "log_normaliser_T", "values_T"), lambda x: x
    ),
    **dict.fromkeys(("log_ratio_T", "log_ratio_prox_T", "log_ratio_old_T"), lambda x: x - OLD),
    "log_ratio_reference_T": lambda x: x - OLD - 0.2,
    "gradient_T": lambda x: x.square(),
    **dict.fromkeys(("policy_rejected_B", "rejected_B"), lambda x: x.flip(0) / 2 - 0.1),
    "pairs": lambda x: Pairs(x, x.flip(0) / 2 - 0.1, OLD, OLD - 0.3),
    **dict.fromkeys(("logits_TV", "student_logits_TV", "logprobs_BL"), lambda x: x.reshape(2, 4)),
}
"""Arguments that the gradient flows through."""
GIVEN: dict[str, Any] = {
    **dict.fromkeys(("old_logprobs_T", "reference_B", "reference_chosen_B", "old_values_T"), OLD),
    **dict.fromkeys(("advantages_T", "returns_T"), ADVANTAGES),
    "reference_rejected_B": OLD - 0.3,
    "loss_mask_T": MASK,
    "segment_ids_T": IDS,
    "selected_T": torch.tensor([False, True, False, False, True, False, False, False]),
    "desirable_B": MASK,
    "labels_N": torch.linspace(0, 1, 8, dtype=D),
    "correct_N": torch.tensor([True, False, True]),
    "behaviour_weights_T": LENGTHS / 4,
    "divergences_T": LENGTHS / 10,
    **dict.fromkeys(("lengths_B", "chosen_lengths_B", "rejected_lengths_B"), LENGTHS),
    "weights_T": LENGTHS,
    "teacher_logits_TV": OLD.reshape(2, 4),
    "teacher_logprobs_TK": torch.log_softmax(OLD.reshape(2, 4), 1)[:, :2],
    "teacher_ids_TK": torch.tensor([[0, 1], [0, 1]]),
    **dict.fromkeys(("targets_T", "token_ids_T"), torch.tensor([1, 3])),
    "old_logprobs_BL": OLD.reshape(2, 4),
    "reference_logprobs_BL": OLD.reshape(2, 4) - 0.2,
    "advantages": torch.tensor([1.0, -0.5], dtype=D),
    **dict.fromkeys(("loss_mask_BL", "mask_BL"), MASK.reshape(2, 4)),
    "partner_lengths_B": torch.tensor([2, 3]),
    **{"clip_low": 0.2, "clip_high": 0.3, "limit_low": 0.2, "limit_high": 0.25, "clip": 0.2, "tau": 0.3, "delta": 2.0},
    **{"beta": 0.1, "gamma": 0.5, "coefficient": 0.3, "alpha": 0.5, "shift": 0.1, "reference_point": 0.1},
    **{"max_tokens": 4, "estimator": "unbiased_k3", "threshold": 0.5, "label_smoothing": 0.1},
}
"""The others, by their names."""
AS_LOGITS_OF_TOKENS = {"loss_mask_T": MASK.reshape(2, 4)[:, 0]}
"""Where a row is a token, there are two."""
WEIGHTS = {
    *("aggregation", "off_policy", "sequence_corrections"),
    # what they give has no gradient: weights of tokens
}
NO_LOSSES = {
    *("is_clamped", "select_clip_cov", "select_kl_cov", "token_covariances", "top_k_divergence"),
    *("value_clipped", "wpo_weights", "kto_reference_point", "reverse_kl_reward"),
    *("balanced_bias", "max_violation", "load_entropy", "dead_experts"),
}
"""Masks, rewards and what is counted over a batch: nothing of them is differentiated."""


def modules() -> list[Any]:
    names = [info.name for info in pkgutil.iter_modules(losses.__path__) if info.name not in WEIGHTS]
    return [*(importlib.import_module(f"{losses.__name__}.{name}") for name in names), named_losses]


def functions() -> dict[str, Callable[..., Tensor]]:
    found = {name: getattr(surrogates, name) for name in surrogates.__all__}
    for module in modules():
        found |= {name: one for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__}
    return {
        name: one
        for name, one in found.items()
        if inspect.isfunction(one)
        and not name.startswith("_")
        and not name.endswith(("_clipped", "_kept"))
        and name not in NO_LOSSES
        and inspect.signature(one).return_annotation == "Tensor"
    }


def called(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """The sum of a loss as a function of the policy's numbers alone."""
    parameters = inspect.signature(function).parameters
    given = GIVEN | (AS_LOGITS_OF_TOKENS if "logits_TV" in parameters else {})
    needed = {name for name, one in parameters.items() if one.default is inspect.Parameter.empty}
    needed |= {"reference_logprobs_BL"} & parameters.keys()
    unknown = needed - OF_POLICY.keys() - given.keys()
    assert not unknown, f"give {function.__name__} a value of {sorted(unknown)} above"

    def total(x: Tensor) -> Tensor:
        return function(**{name: OF_POLICY[name](x) if name in OF_POLICY else given[name] for name in needed}).sum()

    return total


FUNCTIONS = functions()


def test_the_losses_are_found() -> None:
    assert {"ppo_clip", "vespo", "dpo", "hinge", "grpo_loss", "k3", "importance_weighted_k1", "cross_entropy"} <= set(
        FUNCTIONS
    )
    assert {*FUNCTIONS} >= {name for name in surrogates.__all__ if name in ("topr", "dro_sequence", "dppo_top_k")}
    assert len(FUNCTIONS) > 60


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_loss_has_its_gradient_under_func_grad_and_vmap(name: str) -> None:
    loss = called(FUNCTIONS[name])
    at = torch.stack([AT, AT + 0.05, AT - 0.3])
    leaf = at.clone().requires_grad_()
    values = torch.stack([loss(row) for row in leaf])
    (expected,) = torch.autograd.grad(values.sum(), leaf)
    assert bool((expected != 0).any())
    gradient, value = torch.func.grad_and_value(loss)(AT)
    torch.testing.assert_close(value, values[0].detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, expected[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.func.vmap(loss)(at), values.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(at), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.full
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_loss_is_one_graph(name: str) -> None:
    torch.compiler.reset()
    loss = called(FUNCTIONS[name])
    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf = AT.clone().requires_grad_()
        value = function(leaf)
        results.append((value.detach(), *torch.autograd.grad(value, leaf)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-14)
