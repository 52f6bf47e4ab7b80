"""Settings of every command that trains which contradict one another."""

from __future__ import annotations

from collections.abc import Iterator

from rft.config.rules.lora import adapter_problems
from rft.config.rules.sourced_values import MakeProblem, SourcedValues, Values
from rft.config.rules.strategy import strategy_problems
from rft_core.errors import Problem
from rft_trainer.settings.run import PROFILED_STEPS
from rft_trainer.sinks.profile.steps import parse_steps


def training_problems(given: SourcedValues) -> Iterator[Problem]:
    """Yield the contradictions of checkpoints, strategies and adapters."""
    yield from _weights_of_a_checkpoint(given.values, given.make_problem)
    if given.values["save_model_only"] and given.values["enable_ema"]:
        names = ["save_model_only", "enable_ema"]
        why = "the average of the weights is part of the state that save_model_only leaves out"
        yield given.make_problem("checkpoint.no_average", names, why, "--no_save_model_only")
    yield from _profile(given.values, given.make_problem)
    yield from strategy_problems(given.values, given.make_problem)
    if "lora_rank" in given.values:
        yield from adapter_problems(given.values, given.make_problem)


def _weights_of_a_checkpoint(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    ways = [name for name in ("load_checkpoint", "ckpt_weights_only", "ckpt_partial") if values[name]]
    if len(ways) > 1:
        why = "a run continues a checkpoint, or starts from all of its weights, or from some of them"
        yield make_problem("checkpoint.two_ways", ways, why, f"--{ways[0]} alone")
    elif ways and ways != ["load_checkpoint"] and not values["ckpt_path"]:
        why = "weights are taken from a named checkpoint, and none is named"
        yield make_problem("checkpoint.no_path", [ways[0], "ckpt_path"], why, "--ckpt_path RUN")


def _profile(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if values["profile"]:
        try:
            parse_steps(values["profile"])
        except ValueError as error:
            yield make_problem("profile.steps", ["profile"], str(error), f"--profile {PROFILED_STEPS}")


def idle_evaluation(given: SourcedValues) -> list[str]:
    """Return a note where an interval of evaluations was given and no row is held out, or none that waits could use."""
    values, origin = given.values, given.origins["eval_steps"]
    waiting = [name for name in ("patience", "target_loss") if values.get(name)]
    if waiting and not values["eval_steps"]:
        found = f"{waiting[0]} = {values[waiting[0]]} ({given.origins[waiting[0]]}) has no effect"
        return [f"{found}: with eval_steps = 0 ({origin}) no evaluation is made while the run goes on"]
    if origin.kind == "default" or values["eval_steps"] <= 0 or values["eval_data"] or values.get("held_out_rows"):
        return []
    return [f"eval_steps = {values['eval_steps']} ({origin}) has no effect: no rows are held out (--eval_data)"]


def idle_store(given: SourcedValues) -> list[str]:
    """Return a note for each given setting of a data store that the run does not have."""
    names = [
        name
        for name in ("data_store_path", "data_store_workers", "data_store_max_gb")
        if given.origins[name].kind != "default"
    ]
    if given.values["data_store"] != "off":
        return []
    return [f"{name} = {given.values[name]} ({given.origins[name]}) has no effect: data_store is off" for name in names]
