"""A surrogate is added with one file and one row: its component, its equation, and its word among the flag's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from additions.overlay import Overlay
from support.trainer_task import TrainerTask

import rft_algos.objectives as objectives  # joins every equation to its component
from rft_algos.algorithms.components import Correction, Surrogate
from rft_algos.algorithms.registry import component_of, components_by_flag, equation_of
from rft_trainer.settings.algorithm import OffPolicyCorrection, PolicyLoss

FILE = '''"""A surrogate without a clip: the ratio's logarithm in place of the ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rft_algos.algorithms.components import Flags, Surrogate
from rft_algos.algorithms.registry import register_equation
from rft_algos.packed.loss_tokens import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRatio(Surrogate):
    """-A log r, times `factor`."""

    flags: ClassVar[Flags] = {"log_ratio": {}, "twice_log_ratio": {"factor": 2.0}}
    factor: float = 1.0


@register_equation(LogRatio)
def log_ratio(choice: LogRatio, tokens: Tokens) -> Tensor:
    """[T] loss -A log r of each token, times `factor`."""
    return -choice.factor * tokens.advantages * tokens.log_ratio
'''


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Overlay:
    """The packages with the file and the row."""
    overlay = Overlay.of(tmp_path_factory.mktemp("overlay"), ["rft_algos", "rft_trainer"])
    overlay.add_file("rft_algos/surrogates/log_ratio.py", FILE)
    overlay.add_row("rft_trainer/settings/algorithm.py", '"kimi",', '    "log_ratio", "twice_log_ratio",')
    return overlay


def test_a_step_is_trained_with_it_by_its_word(added: Overlay, trainer_task: TrainerTask, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*trainer_task.words(), "--max_steps", "1", "--policy_loss", "twice_log_ratio", "--save_path", run]
    ended = added.run(["rl", *words])
    assert ended.returncode == 0, ended.stderr
    assert "surrogate LogRatio(factor 2.0)" in ended.stdout
    [row] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert row["policy/updates"] == 1
    assert row["policy/gradient_norm"] > 0


def test_the_words_of_the_flags_are_those_of_the_components() -> None:
    assert get_args(PolicyLoss) == tuple(components_by_flag(Surrogate))
    assert get_args(OffPolicyCorrection) == tuple(components_by_flag(Correction))


@pytest.mark.parametrize("word", components_by_flag(Surrogate))
def test_every_word_means_a_surrogate_with_an_equation(word: str) -> None:
    assert objectives
    assert callable(equation_of(component_of(Surrogate, word)))


@pytest.mark.parametrize(("word", "divergence"), [("dppo_tv", "tv"), ("dppo_kl", "kl")])
def test_a_word_sets_the_parameters_that_it_names(word: str, divergence: str) -> None:
    assert getattr(component_of(Surrogate, word), "divergence") == divergence  # noqa: B009


def test_a_subclass_has_no_word_of_its_parent() -> None:
    class Own(components_by_flag(Surrogate)["ppo"]):  # type: ignore[misc]
        """PPO's clip with another equation."""

    assert components_by_flag(Surrogate)["ppo"] is not Own
