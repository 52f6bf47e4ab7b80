"""Settings of `dpo` that contradict one another, or have no effect beside the others."""

from __future__ import annotations

from collections.abc import Iterator

from rft.config.rules.sourced_values import MakeProblem, SourcedValues, Values
from rft.config.rules.strategy import whole_experts
from rft.config.rules.training import idle_evaluation, idle_store, training_problems
from rft_algos.algorithms.preference import (
    SMOOTHED,
    SORTED,
    WITHOUT_REFERENCE,
    PreferenceLoss,
    PreferenceLossType,
    weighted_losses,
)
from rft_algos.input_checks import InputError
from rft_core.errors import Problem
from rft_trainer.settings.preference_training import PreferenceDataSettings, PreferenceLossSettings

_OF_LOSS = {
    "label_smoothing": SMOOTHED,
    "f_divergence": ("sigmoid",),
    "f_alpha": ("sigmoid",),
    "simpo_gamma": ("simpo",),
    "cpo_alpha": ("cpo",),
    "discopop_tau": ("discopop",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "completion_key": ("kto",),
    "label_key": ("kto",),
    "margin_key": ("sigmoid",),
}
"""Settings that only some losses have."""

_MIXED = "--loss_weights sigmoid=0.8,bco_pair=0.2"


class _Defaults(PreferenceLossSettings, PreferenceDataSettings):
    """Defaults of both groups, by name."""


_OF_PAIRS = {"ld_alpha": 1.0, "use_weighting": False, "rpo_alpha": 0.0}
"""Settings of pairs with the value that turns them off."""


def problems(given: SourcedValues) -> Iterator[Problem]:
    """Yield the contradictions of preference training."""
    values, make_problem = given.values, given.make_problem
    yield from _nothing_to_wait_for(values, make_problem)
    yield from whole_experts(values, make_problem)
    yield from _of_other_losses(given)
    yield from _of_no_pair(values, make_problem)
    yield from _of_sorted_pairs(values, make_problem)
    yield from _of_a_reference(values, make_problem)
    if values["margin_key"] and values["f_divergence"] != "reverse_kl":
        why = "the margin is of the loss whose divergence is reverse_kl"
        yield make_problem("dpo.margin_divergence", ["margin_key", "f_divergence"], why, "leave f_divergence out")
    if values["label_smoothing"] and values["f_divergence"] != "reverse_kl":
        why = "smoothed labels are of the loss whose divergence is reverse_kl"
        yield make_problem("dpo.smoothed_divergence", ["label_smoothing", "f_divergence"], why, "--label_smoothing 0")
    yield from training_problems(given)


def _nothing_to_wait_for(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    for name in ("patience", "target_loss"):
        if values[name] and not values["eval_data"] and not values["held_out_rows"]:
            why = f"{name} depends on the held-out loss, and no rows are held out"
            yield make_problem("dpo.no_held_out", [name, "held_out_rows"], why, "--held_out_rows 200")


def _of_other_losses(given: SourcedValues) -> Iterator[Problem]:
    """Refuse a number of another loss: whoever gives it takes the run for one of that loss."""
    try:
        chosen = {*_losses(given.values)}
    except InputError as error:
        yield given.make_problem("dpo.loss_weights", ["loss_weights"], error.problem.what, error.problem.do or _MIXED)
        return
    for name, losses in _OF_LOSS.items():
        # by the value: the file of a run that is continued gives every setting
        if given.values[name] == _default(name) or chosen & {*losses}:
            continue
        why = f"{name} stands in the loss of {', '.join(losses)} alone"
        yield given.make_problem("dpo.other_loss", [name, "loss_type"], why, f"--loss_type {losses[0]}")


def _losses(values: Values) -> tuple[PreferenceLossType, ...]:
    """Return the losses of the run; raise `InputError` for weights that are none."""
    return PreferenceLoss(
        loss_type=values["loss_type"], loss_weights=weighted_losses(values["loss_weights"])
    ).loss_types


def _of_sorted_pairs(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    """Refuse weights of single pairs in losses of quantiles, in which no pair has a loss of its own."""
    sorts = [name for name in SORTED if name == values["loss_type"] or f"{name}=" in values["loss_weights"]]
    for name in ("weight_key", "use_weighting"):
        if sorts and values[name]:
            why = f"{sorts[0]} sorts the pairs of a micro-batch, so that no loss is that of a single pair"
            yield make_problem("dpo.sorted_pairs", [name, "loss_type"], why, f"leave {name} out")


def _of_a_reference(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if not values["reference_pretrain"]:
        return
    if values["reference_free"]:
        why = "the log-probs of the reference are taken to be 0, and no model gives them"
        yield make_problem("dpo.no_reference", ["reference_pretrain", "reference_free"], why, "--no_reference_free")
    if values["loss_type"] in WITHOUT_REFERENCE and not values["loss_weights"]:
        why = f"{values['loss_type']} has no reference"
        yield make_problem("dpo.no_reference", ["reference_pretrain", "loss_type"], why, "leave reference_pretrain out")


def _default(name: str) -> object:
    return getattr(_Defaults, name)


def _of_no_pair(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if values["loss_type"] != "kto":
        return
    for name, off in _OF_PAIRS.items():
        if values[name] != off:
            why = f"kto has responses that are not compared, and {name} is of pairs"
            yield make_problem("dpo.no_pairs", [name, "loss_type"], why, "--loss_type sigmoid")
    if values["reference_free"]:
        why = "the reference point of kto is a divergence from the reference"
        yield make_problem("dpo.kto_reference", ["reference_free", "loss_type"], why, "--no_reference_free")


def idle_settings(given: SourcedValues, defaults: Values) -> list[str]:
    """Return a note for each given setting that has no effect beside the others."""
    notes = [*idle_evaluation(given), *idle_store(given)]
    values, origins = given.values, given.origins
    if values["reference_free"] and values["loss_type"] in WITHOUT_REFERENCE:
        notes.append(f"reference_free ({origins['reference_free']}) has no effect: {values['loss_type']} has none")
    if values["f_alpha"] != defaults["f_alpha"] and values["f_divergence"] != "alpha":
        notes.append(f"f_alpha = {values['f_alpha']:g} ({origins['f_alpha']}) has no effect without f_divergence alpha")
    return notes
