"""Rewards by name: functions, directories, servers, the weights of heads, and the memory of models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft import reward_names
from rft.reward_names import NamedPlace
from rft_core.errors import OptionsError
from rft_dist.planning.memory_estimate import GIB
from rft_models.files import directories
from rft_models.reward_model import loading
from rft_trainer.settings.rewards import JudgeSettings, RewardModelSettings, RewardSettings


def settings(reward: str = "", judge: str = "", **models: str) -> Any:
    return SimpleNamespace(
        reward=RewardSettings(reward=reward),
        reward_models=RewardModelSettings(**models),  # type: ignore[arg-type]
        judge=JudgeSettings(judge_pretrain=judge),
    )


@pytest.mark.parametrize(
    ("given", "whole"),
    [({}, False), ({"reward": "math"}, False), ({"reward": "code"}, True), ({"reward": "a:b"}, True)],
)
def test_unit_tests_and_code_of_a_user_read_whole_rows(given: dict[str, str], whole: bool) -> None:
    assert reward_names.reads_columns(settings(**given)) is whole


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "exact"),
        ({"reward": "math"}, "math"),
        ({"reward_pretrain": "rm"}, ""),
        ({"remote_rm_url": "http://h"}, ""),
        ({"judge": "m"}, ""),
        ({"reward": "math", "judge": "m"}, "math"),
    ],
)
def test_there_is_an_exact_reward_where_no_other_is_named(given: dict[str, str], name: str) -> None:
    assert reward_names.function_names(settings(**given)) == ([name] if name else [])


def test_several_functions_are_joined_by_commas_and_a_file_may_have_one_in_its_name(tmp_path: Path) -> None:
    assert reward_names.function_names(settings(reward=" math, own.py:f ,m.n:g")) == ["math", "own.py:f", "m.n:g"]
    assert reward_names.function_names(settings(reward="in-process:a,b")) == ["in-process:a,b"]
    file = tmp_path / "a,b.py"
    file.touch()
    assert reward_names.function_names(settings(reward=f"{file}:f")) == [f"{file}:f"]
    assert reward_names.function_names(settings(reward="," + ",".join(["own.py:f"] * 50))) == ["own.py:f"] * 50
    assert [reward_names.part_of(name) for name in ("math", "own.py:f", "m.n:g")] == ["math", "f", "g"]


def test_labels_are_needed_where_a_function_compares_with_them() -> None:
    assert reward_names.needs_labels(settings())
    assert reward_names.needs_labels(settings(reward="format,own.py:f"))
    assert reward_names.needs_labels(settings(reward="format,math"))
    assert not reward_names.needs_labels(settings(reward="format"))
    assert not reward_names.needs_labels(settings(judge="m"))


@pytest.mark.parametrize(
    ("reward", "weights", "unknown"),
    [
        ("math", {"math": 1.0}, "math"),
        ("gsm8k,format", {"gsm8k": 1.0, "format": 0.1, "gsm8k/correctness": 1.0, "gsm8k/format": 0.0}, ""),
        ("gsm8k,format", {"gsm8k": 1.0, "correctness": 0.1}, "correctness"),
        ("math,own.py:f", {"math": 1.0, "f": 0.1, "f/any": 1.0}, ""),
        ("math,own.py:f", {"g": 0.1}, "g"),
    ],
)
def test_weights_name_parts_under_the_names_of_several_rewards(
    reward: str, weights: dict[str, float], unknown: str
) -> None:
    if not unknown:
        reward_names.refuse_unknown_weights(settings(reward=reward), weights)
        return
    with pytest.raises(OptionsError) as caught:
        reward_names.refuse_unknown_weights(settings(reward=reward), weights)
    assert caught.value.problem.what.startswith(f"reward_weights names {unknown};")


def test_places_have_the_name_that_is_given_or_their_own() -> None:
    given = settings(
        reward_pretrain="models/my rm/, good=/data/a=b,/a/..x..",
        remote_rm_url="http://s.example:9/x?a=1,two=https://o/y",
    )
    assert reward_names.model_places(given.reward_models) == [
        NamedPlace("my_rm", "models/my rm/"),
        NamedPlace("good", "/data/a=b"),
        NamedPlace("x", "/a/..x.."),
    ]
    assert reward_names.server_places(given.reward_models) == [
        NamedPlace("s.example", "http://s.example:9/x?a=1"),
        NamedPlace("two", "https://o/y"),
    ]
    assert reward_names.model_names(given) == ["my_rm", "good", "x"]
    assert reward_names.server_names(given) == ["s.example", "two"]
    assert reward_names.named_models("/a/--")[0].name == "model"
    for flag in ("reward_pretrain", "remote_rm_url"):
        with pytest.raises(OptionsError) as caught:
            (reward_names.model_names if flag == "reward_pretrain" else reward_names.server_names)(
                settings(**{flag: " , "})
            )
        assert (caught.value.problem.code, caught.value.problem.where) == ("option.not_allowed", f"--{flag}")
    assert reward_names.model_names(settings()) == []


def test_weights_are_numbers_by_name() -> None:
    assert reward_names.weights_of(RewardSettings(reward_weights="rm/a=0.5, b=-1")) == {"rm/a": 0.5, "b": -1.0}
    assert reward_names.weights_of(RewardSettings()) is None
    with pytest.raises(OptionsError) as caught:
        reward_names.weights_of(RewardSettings(reward_weights="rm"))
    assert (caught.value.problem.code, caught.value.problem.where) == ("option.not_allowed", "--reward_weights")


@pytest.mark.parametrize(
    ("stated", "given", "heads"),
    [
        ((2.0, 3.0), None, {"a": 2.0, "b": 3.0}),
        ((2.0, 3.0), {"rm/a": 9.0}, {"a": 2.0, "b": 3.0}),
        (None, {"rm/b": 4.0, "a": 1.0}, {"a": 0.0, "b": 4.0}),
    ],
)
def test_the_weight_of_a_head_is_that_of_its_files_or_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, stated: Any, given: Any, heads: dict[str, float]
) -> None:
    spec = SimpleNamespace(weights=stated, heads=("a", "b"))
    monkeypatch.setattr(directories, "checked_model_directory", lambda place: (place, "config"))
    monkeypatch.setattr(
        loading, "spec_in_files", lambda place, config: spec if (place, config) == ("d", "config") else 0
    )
    assert reward_names.heads_of(NamedPlace("rm", "d"), given) == heads
    if stated is None:
        with pytest.raises(OptionsError) as caught:
            reward_names.heads_of(NamedPlace("rm", "d"), None)
        assert caught.value.problem.code == "reward.heads_without_weights"
        assert caught.value.problem.do == "--reward_weights rm/a=1,rm/b=1"


@pytest.mark.parametrize(
    ("given", "weights", "remedy"),
    [
        ({}, "correctness=2", ""),
        ({}, "exact=1", "correctness=1"),
        ({"reward": "gsm8k"}, "correctness=2,format=0.5", ""),
        ({"reward": "gsm8k"}, "correctness=2,foo=3", "correctness=2"),
        ({"reward": "math", "judge": "m"}, "judge=1,correctness=2", ""),
        ({"reward": "math", "judge": "m"}, "judg=1", "correctness=1,judge=1"),
        ({"reward_pretrain": "rm=d"}, "rm/a=1,rm/b=2", ""),
        ({"reward_pretrain": "rm=d"}, "rm=1,rm/b=2", "rm/b=2"),
        ({"remote_rm_url": "s=http://h"}, "s=1,s/style=2", ""),
        ({"remote_rm_url": "s=http://h"}, "s=1,style=2", "s=1"),
        ({"reward": "own.py:score"}, "whatever=1", ""),
    ],
    ids=str,
)
def test_a_weight_of_a_part_that_the_reward_cannot_have_is_refused_before_anything_is_scored(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], weights: str, remedy: str
) -> None:
    monkeypatch.setattr(reward_names, "heads_of", lambda model, weights: {"a": 1.0, "b": 1.0})
    chosen, by_name = settings(**given), reward_names.weights_of(RewardSettings(reward_weights=weights))
    assert by_name is not None
    if not remedy:
        reward_names.refuse_unknown_weights(chosen, by_name)
        return
    with pytest.raises(OptionsError) as caught:
        reward_names.refuse_unknown_weights(chosen, by_name)
    problem = caught.value.problem
    assert (problem.code, problem.do) == ("reward.unknown_part", f"--reward_weights {remedy}")
    assert problem.state == "nothing was started"


@pytest.mark.parametrize(
    ("bf16", "offload", "gib", "when"),
    [(False, "auto", 4, "where a tenth"), (True, "held", 2, "all the time"), (False, "phase", 4, "for its phase")],
)
def test_models_of_this_process_are_noted_with_their_memory(
    monkeypatch: pytest.MonkeyPatch, bf16: bool, offload: str, gib: int, when: str
) -> None:
    monkeypatch.setattr(reward_names, "model_sizes", lambda place: (SimpleNamespace(parameters=GIB), []))
    values = {"bf16": bf16, "reward_offload": offload, "reward_pretrain": "a,b=c", "judge_pretrain": ""}
    notes = reward_names.memory_notes(values)
    assert [note.partition(",")[0] for note in notes] == [
        f"reward model {name}: {gib:.3f} GiB more on every rank" for name in "ab"
    ]
    assert all(when in note for note in notes)
    [judge] = reward_names.memory_notes(values | {"reward_pretrain": "", "judge_pretrain": "j"})
    assert judge.startswith(f"the judge: {gib:.3f} GiB more")
    assert reward_names.memory_notes(values | {"reward_pretrain": ""}) == []
