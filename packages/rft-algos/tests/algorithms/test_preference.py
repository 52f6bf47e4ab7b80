"""The record of a loss of preferences: published numbers, what needs a reference, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rft_algos.algorithms.preference import PreferenceLoss
from rft_algos.input_checks import InputError


@pytest.mark.parametrize(("loss_type", "beta"), [("sigmoid", 0.1), ("simpo", 2.0), ("discopop", 0.05), ("kto", 0.1)])
def test_beta_is_the_published_number_unless_it_is_given(loss_type: Any, beta: float) -> None:
    assert PreferenceLoss(loss_type=loss_type).strength == beta
    assert PreferenceLoss(loss_type=loss_type, beta=0.7).strength == 0.7


def test_exo_has_a_label_that_is_not_infinitely_far() -> None:
    assert PreferenceLoss(loss_type="exo_pair").smoothing == 1e-3
    assert PreferenceLoss(loss_type="exo_pair", label_smoothing=0.2).smoothing == 0.2
    assert PreferenceLoss().smoothing == 0.0


@pytest.mark.parametrize(
    ("options", "needed"),
    [({}, True), ({"reference_free": True}, False), ({"loss_type": "orpo"}, False), ({"loss_type": "kto"}, True)],
)
def test_only_losses_of_log_ratios_need_a_reference(options: dict[str, Any], needed: bool) -> None:
    assert PreferenceLoss(**options).needs_reference is needed


@pytest.mark.parametrize(
    "options", [{"loss_type": "dpo"}, {"beta": 0.0}, {"rpo_alpha": -1.0}, {"label_smoothing": 2.0}, {"discopop_tau": 0}]
)
def test_numbers_without_meaning_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        PreferenceLoss(**options)
