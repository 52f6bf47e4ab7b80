"""Names, weights and places of rewards that are models, and where reward models stay."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.build import rewards
from rft.reward_names import NamedPlace, function_names, memory_notes, model_places, server_places, weights_of
from rft_cli.config.resolve import resolve
from rft_cli.main import main
from rft_core.errors import OptionsError
from rft_models.reward_model.loading import new_reward_model
from rft_models.reward_model.spec import RewardSpec
from rft_models.tiny_models.text import build_character_model
from rft_trainer.settings.rewards import JudgeSettings, RewardModelSettings, RewardSettings


def names(**given: str) -> Any:
    """Groups of settings with these values."""
    models: dict[str, Any] = {
        name: text for name, text in given.items() if name in ("reward_pretrain", "remote_rm_url")
    }
    judge: dict[str, Any] = {name: text for name, text in given.items() if name.startswith("judge")}
    reward = RewardSettings(reward=given.get("reward", ""))
    return SimpleNamespace(reward=reward, reward_models=RewardModelSettings(**models), judge=JudgeSettings(**judge))


@pytest.mark.parametrize(
    ("given", "function"),
    [
        ({}, "exact"),
        ({"reward": "math"}, "math"),
        ({"reward_pretrain": "rm"}, ""),
        ({"remote_rm_url": "http://h"}, ""),
        ({"judge_pretrain": "m"}, ""),
        ({"judge_url": "http://h"}, ""),
        ({"reward": "exact", "judge_url": "http://h"}, "exact"),
    ],
    ids=str,
)
def test_beside_a_model_there_is_no_function_unless_one_is_named(given: dict[str, str], function: str) -> None:
    assert function_names(names(**given)) == ([function] if function else [])


def test_places_are_named_by_themselves_or_by_the_person() -> None:
    chosen = RewardModelSettings(
        reward_pretrain="models/my rm, good=/data/a=b",
        remote_rm_url="http://scores.example:9/x?a=1,two=https://other/y",
    )
    assert model_places(chosen) == [NamedPlace("my_rm", "models/my rm"), NamedPlace("good", "/data/a=b")]
    assert server_places(chosen) == [
        NamedPlace("scores.example", "http://scores.example:9/x?a=1"),
        NamedPlace("two", "https://other/y"),
    ]
    with pytest.raises(OptionsError, match="reward_pretrain = ','") as caught:
        model_places(RewardModelSettings(reward_pretrain=","))
    assert caught.value.problem.code == "option.not_allowed"
    assert model_places(RewardModelSettings()) == []


def test_weights_are_numbers_by_name() -> None:
    assert weights_of(RewardSettings(reward_weights="rm/a=0.5, b=-1")) == {"rm/a": 0.5, "b": -1.0}
    assert weights_of(RewardSettings()) is None
    with pytest.raises(OptionsError, match="reward_weights = 'rm'") as caught:
        weights_of(RewardSettings(reward_weights="rm"))
    assert caught.value.problem.code == "option.not_allowed"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rewards")
    plain = build_character_model(root / "plain", hidden=16, layers=1, heads=2, ffn=16)
    new_reward_model(plain, RewardSpec(), seed=1).save_pretrained(root / "rm")
    return root / "rm"


@pytest.mark.parametrize(
    ("offload", "memory", "held"),
    [("auto", 1 << 40, True), ("auto", 1 << 10, False), ("held", 1 << 10, True), ("phase", 1 << 40, False)],
)
def test_models_stay_where_a_tenth_of_the_gpu_holds_them(
    offload: str, memory: int, held: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, memory))
    words = ["--pretrain", "m", "--reward_pretrain", str(model), "--reward_offload", offload]
    settings: Any = resolve("rl", words).settings
    places = model_places(settings.reward_models)
    ours = rewards._models_stay  # pyright: ignore[reportPrivateUsage]
    assert ours(settings, places, "cuda:0") == held
    assert ours(settings, places, "cpu"), "there is nowhere else to be"


def test_a_model_that_visits_leaves_also_after_an_error() -> None:
    moves: list[str] = []
    visitor: Any = SimpleNamespace(to=lambda device: moves.append(str(device)))
    visit = rewards._visit  # pyright: ignore[reportPrivateUsage]
    with visit(visitor, "meta"):
        moves.append("scores")
    with pytest.raises(ValueError, match="broken"), visit(visitor, "meta"):
        raise ValueError("broken")
    assert moves == ["meta", "scores", "cpu", "meta", "cpu"]


def test_the_plan_counts_what_they_hold(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = resolve("rl", ["--pretrain", "m", "--reward_pretrain", str(model), "--judge_pretrain", str(model)]).values
    notes = memory_notes(values)
    assert notes[0].startswith("reward model rm: 0.000 GiB more on every rank, where a tenth of the GPU")
    assert notes[1].startswith("the judge: 0.000 GiB more on every rank, all the time")
    given = ["rl", "--pretrain", str(model), "--reward_pretrain", str(model), "--reward_offload", "phase"]
    assert main(["plan", *given]) == 0
    assert "reward model rm: 0.000 GiB more on every rank, for its phase" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--reward_offload phase", "reward_offload = phase (command line) has no effect: reward_pretrain is empty"),
        ("--judge_range 0 1", "has no effect: there is no judge"),
        ("--remote_rm_retries 1", "has no effect: remote_rm_url and judge_url are empty"),
        ("--judge_pretrain m --reward_workers 2", "has no effect: no function scores responses"),
        ("--judge_pretrain m --judge_model x", "has no effect: judge_url is empty"),
    ],
)
def test_what_nothing_reads_is_told(words: str, told: str) -> None:
    assert any(told in note for note in resolve("rl", ["--pretrain", "m", *words.split()]).notes)
