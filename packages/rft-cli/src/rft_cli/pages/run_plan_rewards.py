"""Reward's part of the plan page: functions, reward models, servers, judge, and environments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rft.build.environment import runs_in_processes
from rft.build.judge import JudgeFacts
from rft.build.rewards import RewardFacts, RewardFunctionFacts, reward_facts
from rft.config.values import as_text
from rft.settings import RlSettings
from rft_trainer.settings.environment import EvalEnvironmentSettings
from rft_trainer.settings.rewards import RewardSettings

_GIB = 1 << 30


def reward_lines(settings: RlSettings) -> list[str]:
    """Return what scores the responses: the environment's turns where there is one, else the parts of the reward.

    Raises:
        OptionsError: a reward that cannot be built; no weight is read and no server is asked.
        DataError: a directory that is no reward model or judge.
    """
    if settings.conversation.environment:
        return [_environment_line(settings.conversation)]
    facts, chosen, models = reward_facts(settings), settings.reward, settings.reward_models
    lines: list[str] = []
    for function in facts.functions:
        more = f" (a task of {function.package})" if function.package else _settings(function.settings)
        rows = f", for rows of {', '.join(function.sources)}" if function.sources else ""
        lines.append(f"{function.name}{more}{rows}, {_where_called(function, chosen)}")
    lines += _model_lines(facts, models.reward_offload)
    lines += [
        f"{server.name}: {server.location}, {models.remote_rm_batch_size} responses a request, "
        f"{models.remote_rm_concurrency} requests at once, {models.remote_rm_timeout:g} s each"
        for server in facts.servers
    ]
    lines += [_judge_line(facts.judge)] if facts.judge else []
    lines += facts.others
    if facts.weights is not None:
        lines.append("the sum of " + _sum(facts.weights.items()))
    elif facts.num_parts > 1:
        lines.append("the sum of these")
    if not lines:
        return ["none: it learns from its teacher alone"]
    if chosen.shuffle_rewards:
        lines[-1] += ", shuffled within each group (control)"
    return lines


def _settings(settings: Mapping[str, Any]) -> str:
    """Return the settings of a rule; those that are empty are left out."""
    known = [f"{name} = {as_text(value)}" for name, value in settings.items() if as_text(value)]
    return f" ({', '.join(known)})" if known else ""


def _where_called(function: RewardFunctionFacts, chosen: RewardSettings) -> str:
    """Return where a function runs, and for how long it may."""
    processes = f"{chosen.reward_workers} process{'es' if chosen.reward_workers > 1 else ''}"
    if function.runs == "here":
        return "called in this process, without a limit of time"
    if function.runs == "sandboxes":
        return f"{chosen.reward_workers} sandbox{'es' if chosen.reward_workers > 1 else ''} at once"
    if function.runs == "algebra in processes":
        return f"called in this process, algebra in {processes}, {chosen.reward_timeout:g} s a comparison"
    return f"{processes}, {chosen.reward_timeout:g} s a response"


def _model_lines(facts: RewardFacts, offload: str) -> list[str]:
    if not facts.models:
        return []
    lines = [
        f"{model.name}: reward model {model.directory}, {model.num_bytes / _GIB:.3f} GiB, {_sum(model.heads.items())}"
        for model in facts.models
    ]
    if facts.models_stay and facts.device == "cpu":
        where = "reward models stay in memory"
    elif facts.models_stay:
        where = "reward models stay on the GPU"
    else:
        where = "reward models come to the GPU for their phase, one after another"
    return [*lines, where + (f" (reward_offload = {offload})" if offload != "auto" else "")]


def _sum(weights: Iterable[tuple[str, float]]) -> str:
    return " + ".join(f"{weight:g} x {name}" for name, weight in weights)


def _judge_line(judge: JudgeFacts) -> str:
    model = f"{judge.model} at {judge.url}" if judge.url else f"{judge.model}, held here"
    question = judge.template_name or "the short question"
    return f"judge: {model}, greedy, {question}, {judge.low:g} to {judge.high:g} become 0 to 1"


def _environment_line(settings: EvalEnvironmentSettings) -> str:
    turn = "" if settings.turn_max_len is None else f" of at most {settings.turn_max_len:,} tokens"
    where = "in this process"
    if runs_in_processes(settings):
        where = f"in {settings.environment_workers} process(es) that can be killed"
    return f"{settings.environment} {where}: at most {settings.max_turns} turns{turn}; it says what each turn earns"
