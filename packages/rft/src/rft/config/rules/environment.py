"""Settings that contradict an environment, and conversation settings that have no effect without one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rft.config.rules.sourced_values import MakeProblem
from rft.config.values import as_text
from rft.resolved import Origin
from rft.reward_kinds import reward_flags
from rft_core.errors import Problem
from rft_trainer.environments.registry import has_processes, is_known, unknown_environment

Values = Mapping[str, Any]
Origins = Mapping[str, Origin]

_JUDGES = ("reward", "reward_routes", *reward_flags())
_OF_CONVERSATIONS = (
    *(
        "environment_workers",
        "environment_memory",
        "environment_variables",
        "max_turns",
        "turn_max_len",
        "tool_timeout",
        "rollout_timeout",
        "tool_call_pattern",
    ),
    "turn_gamma",
)
_OF_FILES = ("environment_workers", "environment_memory", "environment_variables", "tool_timeout", "rollout_timeout")


def environment_problems(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    """Contradictions between an environment and the rest."""
    if not values.get("environment"):
        return
    if not is_known(values["environment"]):
        refusal = unknown_environment(values["environment"])
        yield make_problem(refusal.code, list(refusal.names), refusal.why, refusal.do)
        return
    if not values["apply_chat_template"]:
        why = "turns and observations are put together by the tokenizer's chat template"
        yield make_problem("environment.no_chat", ["environment", "apply_chat_template"], why, "--apply_chat_template")
    for name in _JUDGES:
        if values.get(name):
            why = "the environment of a conversation gives its rewards, turn by turn"
            yield make_problem("environment.two_judges", ["environment", name], why, f"leave {name} out")
    if values["turn_max_len"] is not None and values["turn_max_len"] > values["generate_max_len"]:
        why = "a turn is part of the conversation, whose tokens after the prompt are bounded by generate_max_len"
        names = ["turn_max_len", "generate_max_len"]
        yield make_problem("environment.turn_longer", names, why, f"--turn_max_len {values['generate_max_len']}")


def idle_environment_settings(values: Values, origins: Origins, defaults: Values) -> list[str]:
    """Return one line for each setting that was asked for and has no effect here."""
    if "environment" not in values:
        return []
    environment = values["environment"]
    names = () if has_processes(environment) else _OF_FILES if environment else _OF_CONVERSATIONS
    state = f"{environment} runs in this process and cannot hang" if environment else "environment is empty"
    return [
        f"{name} = {as_text(values[name])} ({origins[name]}) has no effect: {state} ({origins['environment']})"
        for name in names
        if name in values and origins[name].kind != "default" and values[name] != defaults[name]
    ]
