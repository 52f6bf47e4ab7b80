"""A kind of reward is added with one file and one row: its settings, its reward, its builder, and its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from additions.overlay import Overlay
from support.trainer_task import TrainerTask

from rft.config.commands import load
from rft.config.schema import schema
from rft.reward_kinds import REWARD_KINDS, build_order, reward_flags
from rft.settings import EvalSettings, RlSettings
from rft_cli.records.discovery import find_command

FILE = '''"""Reward from a list of words: the share of them that a response holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rft_trainer.records.scores import RewardItem, Score


@dataclass(frozen=True, kw_only=True)
class LexiconSettings:
    """A list of words that responses are to hold."""

    lexicon: str = ""
    """File with one word a line; empty = none."""

    lexicon_weight: float = 1.0
    """Reward of a response that holds them all."""


class LexiconReward:
    """Share of the words that a response holds, times a weight."""

    def __init__(self, words: Sequence[str], weight: float) -> None:
        self._words, self._weight = words, weight

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        """Score the responses."""
        return [self._score(item.response_text) for item in items]

    def close(self) -> None:
        """Do nothing: nothing is held open."""

    def _score(self, response: str) -> Score:
        return Score(self._weight * sum(word in response for word in self._words) / len(self._words))


def components(settings: Any, machine: Any) -> list[Any]:
    """Return the one part of the reward."""
    from rft_trainer.rewards.combined import RewardComponent

    with open(settings.lexicon.lexicon) as file:
        words = file.read().split()
    return [RewardComponent("lexicon", LexiconReward(words, settings.lexicon.lexicon_weight))]
'''
ROW = (
    '    RewardKind("lexicon", "lexicon", "rft_trainer.rewards.lexicon:components", other_flags=("lexicon",), '
    'settings_type="rft_trainer.rewards.lexicon:LexiconSettings"),'
)


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Overlay:
    """The packages with the file and the row."""
    overlay = Overlay.of(tmp_path_factory.mktemp("overlay"), ["rft_trainer", "rft"])
    overlay.add_file("rft_trainer/rewards/lexicon.py", FILE)
    overlay.add_row("rft/reward_kinds.py", "REWARD_KINDS: tuple[RewardKind, ...] = (", ROW)
    return overlay


@pytest.fixture
def lexicon(tmp_path: Path) -> Path:
    path = tmp_path / "lexicon.txt"
    path.write_text("".join(f"{digit}\n" for digit in range(10)))
    return path


def words_without_reward(task: TrainerTask) -> list[str]:
    words = task.words()
    return words[: words.index("--reward")]


def test_a_step_is_trained_with_it_by_its_flags(
    added: Overlay, trainer_task: TrainerTask, lexicon: Path, tmp_path: Path
) -> None:
    run, words = tmp_path / "run", words_without_reward(trainer_task)
    more = ["--max_steps", "1", "--lexicon", lexicon, "--lexicon_weight", "3", "--save_path", run]
    ended = added.run(["rl", *words, *more])
    assert ended.returncode == 0, ended.stderr
    assert f"lexicon: lexicon = {lexicon}" in ended.stdout
    [row] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 0 < row["reward/max"] <= 3  # no exact reward beside it: that gives 0 or 1, and 0 here
    assert row["reward/max"] * 10 / 3 == pytest.approx(round(row["reward/max"] * 10 / 3))


def test_it_is_refused_beside_an_environment(added: Overlay, trainer_task: TrainerTask, lexicon: Path) -> None:
    refused = added.run(
        ["check", "rl", *words_without_reward(trainer_task), "--lexicon", lexicon, "--environment", "calculator"]
    )
    assert refused.returncode != 0
    assert f"environment = calculator, lexicon = {lexicon}" in refused.stdout + refused.stderr


def test_every_flag_of_a_kind_is_a_setting_of_the_commands_that_score() -> None:
    for command in ("rl", "eval"):
        assert set(reward_flags()) <= set(schema(command))
    assert load(find_command("rl").settings) is RlSettings
    assert load(find_command("eval").settings) is EvalSettings


def test_servers_are_tried_before_models_are_loaded() -> None:
    order = [kind.name for kind in build_order()]
    assert sorted(order) == sorted(kind.name for kind in REWARD_KINDS)
    assert order.index("reward_server") < order.index("reward_model") < order.index("judge")
