"""Keyword arguments of Python code as settings of `rft-train rl`: the same names, the same checks, the same errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from rft.config.merged_sources import validated
from rft.config.names import CONFIG
from rft.config.origins import KEYWORD, GivenSetting
from rft.library.keyword_settings import givens
from rft.resolved import Resolved
from rft.settings import RlSettings
from rft_cli.config.resolve import merge
from rft_core.errors import OptionsError

COMMAND = "rl"
"""The command whose settings the keywords are."""
BUILT = (
    "strategy",
    "actor",
    "critic",
    "reward_model",
    "initial_model",
    "ema_model",
    "actor_optim",
    "critic_optim",
    "actor_scheduler",
    "critic_scheduler",
    "tokenizer",
)
"""Objects that LightRFT's trainer is handed, and that are built from settings here."""


def resolved(keywords: Mapping[str, object], reward: str | None = None) -> Resolved[RlSettings]:
    """The settings that the keywords give; `reward` is the name of a reward that is a function in process.

    Raises:
        SettingsError: with every problem, as on the command line.
        OptionsError: an object instead of settings, or two rewards.
    """
    refuse_objects([name for name in keywords if name in BUILT])
    options = givens(COMMAND, keywords)
    if reward is not None:
        if "reward" in keywords:
            raise _two_rewards(keywords["reward"], reward)
        options.append(GivenSetting("reward_fn", "reward", (reward,), KEYWORD))
    return cast("Resolved[RlSettings]", validated(merge(COMMAND, _config_words(keywords), options)))


def command_words(keywords: Mapping[str, object]) -> list[str]:
    """Return the flags of `rft-train rl` that mean the same as the keywords."""
    words = [[f"--{option.name}", *option.texts] for option in givens(COMMAND, keywords)]
    return [*_config_words(keywords), *(word for flag in words for word in flag)]


def refuse_objects(names: Sequence[str]) -> None:
    """Refuse built objects: the trainer builds its own parts from settings.

    Raises:
        OptionsError: unless there is nothing to refuse.
    """
    if not names:
        return
    raise OptionsError(
        code="lightrft.object",
        what=f"SPMDPPOTrainer was given {', '.join(names)}",
        where="SPMDPPOTrainer(...)",
        why="model, engine, optimizer and ranks are built from settings, so that a run can be planned and continued",
        state="nothing was started",
        do='SPMDPPOTrainer(pretrain="MODEL", prompt_data="train.jsonl")',
    )


def _config_words(keywords: Mapping[str, object]) -> list[str]:
    value = keywords.get(CONFIG, ())
    references = [value] if isinstance(value, str | Path) else cast("Sequence[object]", value)
    return [word for reference in references for word in (f"--{CONFIG}", str(reference))]


def _two_rewards(named: object, function: str) -> OptionsError:
    return OptionsError(
        code="lightrft.two_rewards",
        what=f"reward = {named!r} and reward_fn = {function.partition(':')[2]}",
        where="SPMDPPOTrainer(...)",
        why="a response has one reward: a named one, or a function",
        state="nothing was started",
        do="leave reward out",
    )
