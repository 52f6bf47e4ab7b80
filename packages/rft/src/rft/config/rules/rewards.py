"""Contradictions between reward-model settings, and those that have no effect beside the others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rft.config.rules.sourced_values import MakeProblem, SourcedValues
from rft.reward_kinds import reward_flags
from rft.reward_names import split_names
from rft_core.errors import Problem
from rft_trainer.rewards.rules.table import RULES
from rft_trainer.settings.rewards import RewardSettings

_OF_THE_JUDGE = (
    "judge_template",
    "task_instruction",
    "judge_pattern",
    "judge_range",
    "judge_max_new_tokens",
)
_OF_FUNCTIONS = ("reward_workers", "reward_timeout", "reward_memory", "reward_variables")
_OF_SERVERS = ("remote_rm_timeout", "remote_rm_concurrency", "remote_rm_retries", "reward_wait", "on_reward_outage")

_DEFAULTS = RewardSettings()
_EXAMPLES = {"response_pattern": "boxed", "length_range": "10 200", "response_language": "en"}
"""A value of each setting that a rule needs, to be replaced by one's own."""


def problems(given: SourcedValues) -> Iterator[Problem]:
    """Yield the contradictions of rewards alone, for commands that train nothing."""
    yield from reward_problems(given.values, given.make_problem)


def reward_problems(values: Mapping[str, Any], make_problem: MakeProblem) -> Iterator[Problem]:
    """Contradictions between the settings of reward models, servers and the judge."""
    files = [url.strip() for url in values["remote_rm_url"].split(",") if _is_python(url.strip())]
    if files:
        why = "a reward of your own in a file is a function, and has a setting of its own"
        yield make_problem("reward.url_is_file", ["remote_rm_url"], why, f"--reward {_named_function(files[0])}")
    if values["judge_pretrain"] and values["judge_url"]:
        why = "one judge answers: a model of this process, or one behind a URL"
        yield make_problem("reward.two_judges", ["judge_pretrain", "judge_url"], why, "--judge_url alone")
    if values["judge_url"] and not values["judge_model"]:
        why = "a server of this kind is told which model to use, by name"
        yield make_problem("reward.judge_model", ["judge_url", "judge_model"], why, "--judge_model NAME")
    yield from _rules(values, make_problem)
    limit = values.get("watchdog_seconds", 0.0)
    if limit and values["reward_wait"] >= limit and (values["remote_rm_url"] or values["judge_url"]):
        why = "a run without progress for watchdog_seconds is ended, also while it waits for a server"
        do = f"--watchdog_seconds {2 * values['reward_wait']:g}"
        yield make_problem("reward.wait_too_long", ["reward_wait", "watchdog_seconds"], why, do)


def _rules(values: Mapping[str, Any], make_problem: MakeProblem) -> Iterator[Problem]:
    """Yield what a rule lacks, and settings of rules that are not chosen."""
    chosen = chosen_rewards(values)
    for rule in RULES:
        for name in rule.needed if rule.name in chosen else ():
            if values[name] == getattr(_DEFAULTS, name):
                why = f"the rule {rule.name} says nothing without {name}"
                yield make_problem("reward.rule_needs", ["reward", name], why, f"--{name} {_EXAMPLES[name]}")
    names = split_names(str(values["reward"]))
    once = [name for number, name in enumerate(names) if name not in [*names[:number], *routed_rewards(values)]]
    if len(once) < len(names):
        why = "a reward that is named twice would count twice; a route names it for some rows, reward for all"
        do = f"--reward {','.join(once)}" if once else "leave reward out"
        yield make_problem("reward.twice", ["reward", "reward_routes"], why, do)
    if not values["reward_routes"] and values["reward_source_key"] != _DEFAULTS.reward_source_key:
        why = "a column of sources chooses among routes, and reward_routes is empty"
        yield make_problem("reward.no_rule", ["reward_source_key"], why, "leave reward_source_key out")
    for name, rules in _readers().items():
        if values[name] != getattr(_DEFAULTS, name) and not chosen & set(rules):
            why = f"nothing reads {name} without the rule {' or '.join(rules)}"
            do = "--reward " + ",".join([*split_names(str(values["reward"])), rules[0]])
            yield make_problem("reward.no_rule", [name, "reward"], why, do)


def chosen_rewards(values: Mapping[str, Any]) -> set[str]:
    """Return the names of the rewards in use, those of routes too."""
    return {*split_names(str(values["reward"])), *routed_rewards(values)}


def routed_rewards(values: Mapping[str, Any]) -> list[str]:
    """Return the rewards that routes name; what is no route is refused where routes are read."""
    entries = [entry.partition("=")[2] for entry in str(values["reward_routes"]).split(",")]
    return [name for entry in entries for name in map(str.strip, entry.split("+")) if name]


def _readers() -> dict[str, list[str]]:
    """Return the rules that read each setting of rules."""
    readers: dict[str, list[str]] = {}
    for rule in RULES:
        for name in rule.settings:
            readers.setdefault(name, []).append(rule.name)
    return readers


def idle_reward_settings(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, why) of settings that nothing reads; names that a command has not are passed over."""
    if "reward_pretrain" not in values:
        return
    if not values["reward_pretrain"]:
        yield from ((name, "reward_pretrain is empty") for name in ("reward_offload", "reward_batch_tokens"))
    if not values["remote_rm_url"]:
        yield "remote_rm_batch_size", "remote_rm_url is empty"
        if not values["judge_url"]:
            yield from ((name, "remote_rm_url and judge_url are empty") for name in _OF_SERVERS)
    if not values["judge_url"]:
        yield "judge_model", "judge_url is empty"
    if not (values["judge_pretrain"] or values["judge_url"]):
        yield from ((name, "there is no judge") for name in _OF_THE_JUDGE)
    if not (values["reward"] or values["reward_routes"]) and any(values[name] for name in reward_flags()):
        yield from ((name, "no function scores responses") for name in _OF_FUNCTIONS)
    only_rules = chosen_rewards(values) <= {rule.name for rule in RULES}
    if "reward_random" in values and only_rules and not values["remote_rm_url"]:
        yield "reward_random", "no function of your own and no server scores responses"


def _is_python(url: str) -> bool:
    return "://" not in url and url.partition(":")[0].endswith(".py")


def _named_function(reference: str) -> str:
    """Return file.py:function, with the function of the file that is most like a reward where none is named."""
    path, _, function = reference.partition(":")
    if function:
        return reference
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8") if Path(path).expanduser().is_file() else ""
    except (OSError, UnicodeDecodeError):
        text = ""
    functions = re.findall(r"^def ([A-Za-z]\w*)\(", text, re.MULTILINE) or ["reward_func"]
    return f"{path}:{next((name for name in functions if 'reward' in name), functions[0])}"
