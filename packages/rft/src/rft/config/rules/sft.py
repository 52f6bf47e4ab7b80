"""Settings of `sft` that contradict one another."""

from __future__ import annotations

from collections.abc import Iterator

from rft.config.rules.sourced_values import MakeProblem, SourcedValues, Values
from rft.config.rules.training import idle_evaluation, idle_store, training_problems
from rft_core.errors import Problem


def problems(given: SourcedValues) -> Iterator[Problem]:
    """Yield the contradictions of supervised training."""
    yield from _nothing_to_wait_for(given.values, given.make_problem)
    yield from _vocabulary_terms(given.values, given.make_problem)
    yield from _noise(given.values, given.make_problem)
    yield from training_problems(given)


def _nothing_to_wait_for(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    for name in ("patience", "target_loss"):
        if values[name] and not values["eval_data"] and not values["held_out_rows"]:
            why = f"{name} depends on the held-out loss, and no rows are held out"
            yield make_problem("sft.no_held_out", [name, "held_out_rows"], why, "--held_out_rows 200")


def _vocabulary_terms(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    for name in ("label_smoothing", "z_loss_coef"):
        if values[name] and values["tp_size"] > 1:
            why = f"{name} needs the whole output matrix, and with tp_size {values['tp_size']} no rank has it"
            yield make_problem("sft.vocabulary_terms_tp", [name, "tp_size"], why, "--tp_size 1")
        for of_routers in ("aux_loss_coef", "router_z_loss_coef", "balance_bias_rate"):
            if values[name] and values[of_routers]:
                why = f"{name} has a forward of its own, without the routers"
                yield make_problem("sft.vocabulary_terms_moe", [name, of_routers], why, f"--{of_routers} 0")


def _noise(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if values["neftune_noise_alpha"] and values["lora_rank"] and values["lora_dropout"]:
        why = "the masks of dropout are drawn from token ids, and noisy embeddings take their place"
        yield make_problem("sft.noise_and_dropout", ["neftune_noise_alpha", "lora_dropout"], why, "--lora_dropout 0")


def idle_settings(given: SourcedValues, defaults: Values) -> list[str]:
    """Return a note for each given setting of a part that the run does not have."""
    return [*idle_evaluation(given), *idle_store(given)]
