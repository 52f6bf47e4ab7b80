"""The record of a loss of preferences: published numbers, what needs a reference, what is refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from rft_algos.algorithms.preference import PreferenceLoss, weighted_losses
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


def test_what_is_not_given_is_as_published() -> None:
    assert asdict(PreferenceLoss()) == {
        "loss_type": "sigmoid",
        "beta": None,
        "label_smoothing": 0.0,
        "f_divergence": "reverse_kl",
        "f_alpha": 0.5,
        "simpo_gamma": 0.5,
        "cpo_alpha": 1.0,
        "discopop_tau": 0.05,
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
        "reference_free": False,
        "use_weighting": False,
        "rpo_alpha": 0.0,
        "loss_weights": (),
    }


def test_several_losses_are_read_with_their_weights() -> None:
    assert weighted_losses(" sigmoid=0.8, bco_pair=0.2,") == (("sigmoid", 0.8), ("bco_pair", 0.2))
    assert weighted_losses("") == ()


@pytest.mark.parametrize("text", ["sigmoid=0", "sigmoid=-1", "sigmoid=nan", "sigmoid", "sigmoid=much", "dpo=1"])
def test_a_loss_without_a_name_or_weight_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="loss_weights has"):
        weighted_losses(text)
