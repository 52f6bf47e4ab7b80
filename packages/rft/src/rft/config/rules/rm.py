"""Settings of `rm` that contradict one another."""

from __future__ import annotations

from collections.abc import Iterator

from rft.config.rules.sourced_values import MakeProblem, SourcedValues, Values
from rft.config.rules.training import idle_evaluation, idle_store, training_problems
from rft_core.errors import Problem
from rft_models.settings import RewardHeadSettings
from rft_trainer.settings.reward_model import PairDataSettings, RewardTrainingSettings


def problems(given: SourcedValues) -> Iterator[Problem]:
    """Yield the contradictions of a reward model's training."""
    values, make_problem = given.values, given.make_problem
    yield from _nothing_to_wait_for(values, make_problem)
    yield from _losses(values, make_problem)
    yield from _steps(values, make_problem)
    yield from _heads(values, make_problem)
    yield from _checkpoints(values, make_problem)
    yield from _strategies(values, make_problem)
    yield from _adapters(values, make_problem)
    yield from training_problems(given)


def _nothing_to_wait_for(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if values["patience"] and not values["eval_data"] and not values["held_out_rows"]:
        why = "patience depends on the held-out loss, and no pairs are held out"
        yield make_problem("rm.no_held_out", ["patience", "held_out_rows"], why, "--held_out_rows 200")


_OF_STEPS = ("completions_key", "labels_key", "step_separator", "step_reduction", "train_on_last_step_only")
"""Settings that only a step reward model has."""
_OF_PAIRS = (
    "chosen_key",
    "rejected_key",
    "outcome_key",
    "margin",
    "margin_key",
    "tie_margin",
    "center_rewards_coefficient",
)
"""Settings that only a reward model of pairs has."""
_OF_WHOLE_TEXTS = {
    "heads_types": "one head",
    "pooling_method": "the state that ends a step",
    "scale_for_train": "logits",
}
"""Settings of heads on whole texts, and what a step is scored by in their place."""


class _Defaults(RewardTrainingSettings, PairDataSettings, RewardHeadSettings):
    """Defaults of the groups, by name."""


def _steps(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    """Yield the settings of pairs beside the loss of steps, and the other way round."""
    # by the value: the file of a run that is continued gives every setting
    changed = [name for name in (*_OF_STEPS, *_OF_PAIRS, *_OF_WHOLE_TEXTS) if values[name] != getattr(_Defaults, name)]
    is_steps = values["loss_type"] == "steps"
    for name in changed:
        if name in _OF_STEPS and not is_steps:
            why = f"{name} is of step reward models, and {values['loss_type']} is a loss of pairs"
            yield make_problem("rm.no_steps", [name, "loss_type"], why, "--loss_type steps")
        elif name in _OF_PAIRS and is_steps:
            why = f"{name} is of pairs of responses; steps are labelled one by one"
            yield make_problem("rm.no_pairs", [name, "loss_type"], why, f"leave {name} out")
        elif name in _OF_WHOLE_TEXTS and is_steps:
            why = f"a step is scored by {_OF_WHOLE_TEXTS[name]}"
            yield make_problem("rm.steps_head", [name, "loss_type"], why, f"leave {name} out")


def _losses(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    """Yield the settings of Bradley-Terry beside a loss that has no place for them."""
    if values["loss_type"] in ("sigmoid", "steps"):
        return
    for name in ("margin", "margin_key", "tie_margin"):
        if values[name]:
            why = f"{values['loss_type']} has no margin; sigmoid is the same function with one"
            yield make_problem("rm.no_margin", [name, "loss_type"], why, "--loss_type sigmoid")


def _heads(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if "," in values["heads_types"] and values["outcome_key"]:
        why = "with several heads the column of each head's name says which response is the better"
        yield make_problem("rm.two_outcomes", ["heads_types", "outcome_key"], why, "leave outcome_key out")


def _checkpoints(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    for name in ("ckpt_weights_only", "ckpt_partial"):
        if values[name]:
            why = "a reward model begins from a directory, its own head with it"
            do = f"--pretrain {values['ckpt_path'] or 'RUN'}/checkpoints/step_N/model (and leave {name} out)"
            yield make_problem("rm.checkpoint_weights", [name], why, do)


def _strategies(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    """Yield what divides a sample or a matrix among ranks: a score is read from whole sequences by a whole head."""
    for name in ("sp_size", "tp_size", "ep_size"):
        if values[name] > 1:
            why = "every rank computes whole texts of a reward model with whole matrices"
            yield make_problem("rm.strategy", [name], why, f"--{name} 1")
    if values["meta_init"]:
        why = "a new head is in no file, so a reward model is loaded with its weights"
        yield make_problem("rm.meta_init", ["meta_init"], why, "leave meta_init out")


def _adapters(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if values["lora_rank"] and values["enable_ema"]:
        why = "averages of a reward model are written out as whole weights, and adapters have none of their own"
        yield make_problem("rm.averaged_adapters", ["lora_rank", "enable_ema"], why, "--no_enable_ema")


def idle_settings(given: SourcedValues, defaults: Values) -> list[str]:
    """Return a note for each given setting of a part that the run does not have."""
    return [*idle_evaluation(given), *idle_store(given)]
