"""Settings of `rl` that contradict one another, and those that its algorithm has no use for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from rft.config.rules.rewards import reward_problems
from rft.config.rules.sourced_values import MakeProblem, SourcedValues, Values
from rft.config.rules.strategy import whole_experts
from rft.config.rules.training import idle_evaluation, idle_store, training_problems
from rft.config.schema import build
from rft.config.values import as_text
from rft.reward_kinds import reward_flags
from rft.settings import RlSettings
from rft_core.errors import OptionsError, Problem


def problems(given: SourcedValues) -> Iterator[Problem]:
    """Yield the contradictions of reinforcement learning."""
    values, make_problem = given.values, given.make_problem
    yield from _dropout(values, make_problem)
    yield from whole_experts(values, make_problem)
    yield from training_problems(given)
    yield from reward_problems(values, make_problem)
    yield from _sampling_for_training(values, make_problem)
    yield from _divergence(given)
    yield from _pretraining(given)
    yield from _algorithm(given)
    yield from _teacher(given)


def _dropout(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if values["lora_rank"] and values["lora_dropout"]:
        why = "rollouts are drawn without dropout: with it the trainer would score them under another policy"
        yield make_problem("adapters.dropout_rl", ["lora_dropout"], why, "--lora_dropout 0")


def _sampling_for_training(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    if values["temperature"] == 0.0:
        why = "greedy responses of one prompt are all the same, so that no advantage differs from 0"
        yield make_problem("sampling.greedy", ["temperature"], why, "--temperature 1.0")


def _divergence(given: SourcedValues) -> Iterator[Problem]:
    values, origins = given.values, given.origins
    if values["use_kl_loss"] and values["init_kl_coef"] == 0.0 and origins["use_kl_loss"].kind != "default":
        yield given.make_problem(
            "kl.no_weight",
            ["use_kl_loss", "init_kl_coef"],
            "the divergence would enter the loss with weight 0",
            "--init_kl_coef 0.001",
        )


def _pretraining(given: SourcedValues) -> Iterator[Problem]:
    values = given.values
    if values["pretrain_data"] and not values["ptx_coef"]:
        why = "the rows would enter the loss with weight 0"
        yield given.make_problem("ptx.no_weight", ["pretrain_data", "ptx_coef"], why, "--ptx_coef 0.05")
    keys = [name for name in ("pretrain_input_key", "pretrain_output_key") if given.origins[name].kind != "default"]
    if values["pretrain_text_key"] and keys:
        why = "rows are texts, or demonstrations of prompt and response"
        yield given.make_problem("ptx.two_forms", ["pretrain_text_key", *keys], why, "--pretrain_text_key ''")


def _teacher(given: SourcedValues) -> Iterator[Problem]:
    values = given.values
    if not values["teacher_pretrain"]:
        if given.origins["teacher_kl_coef"].kind != "default" and values["teacher_kl_coef"] != 1.0:
            why = "there is no teacher to be near to"
            names = ["teacher_kl_coef", "teacher_pretrain"]
            yield given.make_problem("teacher.none", names, why, "--teacher_pretrain DIR")
        return
    if values["filter_groups"] or _samples_dynamically(values):
        name = "filter_groups" if values["filter_groups"] else "dynamic_sampling"
        why = "groups of equal rewards would be left out, and they learn from the teacher too"
        yield given.make_problem("teacher.equal_groups", [name, "teacher_pretrain"], why, f"--no-{name}")
    named = values["reward"] or values["reward_routes"] or any(values.get(flag) for flag in reward_flags())
    if values["eval_data"] and not named and not values["environment"]:
        why = "responses to held-out prompts are evaluated by a reward, and beside a teacher none is taken for granted"
        yield given.make_problem("teacher.no_reward", ["eval_data", "reward"], why, "--reward exact")


def _samples_dynamically(values: Values) -> bool:
    from rft.build.algorithm import algorithm_record

    try:
        return algorithm_record(build(RlSettings, values)).dynamic_sampling
    except OptionsError:
        return False  # `_algorithm` reports it


def _algorithm(given: SourcedValues) -> Iterator[Problem]:
    """Yield the problem that `algorithm_record` reports of flags that do not go together."""
    from rft.build.algorithm import algorithm_record  # here, so that pages do not wait for it

    values, origins = given.values, given.origins
    try:
        algorithm_record(build(RlSettings, values))
    except OptionsError as error:
        problem = error.problem
        # the error names settings in its text, and knows nothing of their origins
        named = [name for name in origins if re.search(rf"\b{re.escape(name)}\b", problem.what)]
        # defaults were not chosen by anybody: what chose the algorithm is named too
        if all(origins[name].kind == "default" for name in named):
            chosen = ("advantage_estimator", "policy_loss", "use_gspo", "use_gmpo")
            named += [name for name in chosen if origins[name].kind != "default"]
        where = ", ".join(f"{name}: {origins[name]}" for name in named or ["advantage_estimator"])
        yield replace(problem, where=where)


def idle_settings(given: SourcedValues, defaults: Values) -> list[str]:
    """Return a note for each given setting of a part that the run or the chosen algorithm does not have."""
    from rft.build.algorithm import algorithm_record

    values, origins = given.values, given.origins
    record = algorithm_record(build(RlSettings, values))
    scores_again = record.needs_reference or record.needs_old_logprobs or record.needs_old_entropy
    needs_values = record.advantage.needs_values
    parts = (
        (("kl_estimator",), record.needs_reference, "there is no divergence from a reference"),
        (("micro_rollout_batch_size",), scores_again or needs_values, "nothing scores the rollouts again"),
        (
            (
                "critic_pretrain",
                "critic_learning_rate",
                "value_clip",
                "value_head_prefix",
                "save_value_network",
                "freezing_actor_steps",
            ),
            needs_values,
            "there is no critic",
        ),
    )
    return (
        idle_evaluation(given)
        + idle_store(given)
        + [
            f"{name} = {as_text(values[name])} ({origins[name]}) has no effect: "
            f"{why} with advantage_estimator {values['advantage_estimator']}"
            for names, acts, why in parts
            for name in names
            if not acts and origins[name].kind != "default" and values[name] != defaults[name]
        ]
    )
