"""Problems of settings: which codes and remedies they have, in the form in which the setting was written."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from rft.config import errors
from rft.config.errors import SettingsError
from rft.config.origins import GivenSetting
from rft.config.refused_flags import Refusal
from rft.config.schema import REQUIRED, Setting
from rft.resolved import Origin
from rft_core.errors import Problem
from rft_core.secrets import HIDDEN

FLAG, FILE, KEYWORD = Origin("command line"), Origin("file", "a.yaml", 3), Origin("keyword argument")
KEY = "0123456789abcdef" * 2


def given(name: str, *texts: str, origin: Origin = FLAG) -> GivenSetting:
    return GivenSetting(f"--{name}" if origin is FLAG else name, name, texts, origin)


def setting(kind: Any, default: Any = 4, **metadata: Any) -> Setting:
    return Setting("size", "group", kind, default, metadata)


def problem(code: str, where: str = "here") -> Problem:
    return Problem(code=code, what=f"ö {code}", where=where, why="a rule", do=f"mend {code}")


def test_one_problem_is_the_error_itself() -> None:
    error = SettingsError(problems=[problem("a")])
    assert error.problem == problem("a")
    assert error.problems == (problem("a"),)
    assert json.loads(error.as_json()).keys() == {"problem", "exit_code"}
    assert SettingsError(code="b", what="", where="", why="").problems[0].code == "b"


@pytest.mark.parametrize("count", [2, 3])
def test_several_problems_are_summed_up_and_all_are_kept(count: int) -> None:
    several = [problem(f"a{number}", "here" if number < 2 else "there") for number in range(count)]
    error = SettingsError(problems=several)
    summary = error.problem
    assert (summary.code, summary.do) == ("option.several", "mend a0")
    assert summary.where == ("here" if count == 2 else "here; there")
    assert error.problems == tuple(several)
    line = error.as_json()
    record = json.loads(line)
    assert record["exit_code"] == int(error.exit_code)
    assert record["problem"]["code"] == "option.several"
    assert [one["code"] for one in record["problems"]] == [one.code for one in several]
    assert "ö" in line, "letters are written as they are"


def test_a_bundle_is_named_beside_all_problems() -> None:
    error = SettingsError(problems=[problem("a"), problem("b")]).with_bundle("bundle.json")
    assert error.problem.bundle == "bundle.json"
    assert [one.code for one in error.problems] == ["a", "b"]


@pytest.mark.parametrize(
    ("option", "do"),
    [
        (given("rolout_batch_size", "32"), "--rollout_batch_size 32"),
        (given("rolout_batch_size", "32", origin=FILE), "rollout_batch_size: 32"),
        (given("rolout_batch_size", "32", origin=KEYWORD), "rollout_batch_size=32"),
        (given("actor_learning_rat", "1e-4", origin=KEYWORD), "actor_learning_rate=1e-4"),
        (given("bf61", "True", origin=KEYWORD), "bf16=True"),
        (given("bf61", "false", origin=KEYWORD), "bf16=False"),
        (given("eps_clip_hihg", "none", origin=KEYWORD), "eps_clip_high=None"),
        (given("advantage_estimatr", "rloo", origin=KEYWORD), "advantage_estimator='rloo'"),
        (given("adm_betas", "0.9", "0.95"), "--adam_betas 0.9 0.95"),
        (given("rolout_batch_size"), "--rollout_batch_size VALUE"),
        (given("run_nam", KEY), "--run_name VALUE"),
        (given("packing_sample"), "--packing_samples"),
        (given("packing_sample", "no"), "--packing_samples no"),
        (given("qqqqqqqqqq", "1"), "rft-train rl --help"),
        (given("learning_rate", "1e-4"), "--actor_learning_rate 1e-4"),
        (given("texts", "a"), "rft-train rl --help"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_and_the_value_given(option: GivenSetting, do: str) -> None:
    told = errors.unknown_option("rl", option)
    assert (told.code, told.what, told.where, told.do) == (
        *("option.unknown", f"unknown option {option.written}", str(option.origin)),
        do,
    )


@pytest.mark.parametrize(
    ("option", "named", "not_named"),
    [
        (given("learning_rate", "1"), ["rft-train sft", "nearest here: --actor_learning_rate"], []),
        (given("texts", "a"), ["rft-train build"], ["nearest"]),
        (given("rolout_batch_size", "1"), ["nearest: --rollout_batch_size"], ["rft-train"]),
        (given("rolout_batch_size", "1", origin=FILE), ["nearest: rollout_batch_size"], ["--"]),
        (given("grad_acum_dtipe", "1"), ["nearest: --grad_accum_dtype (known"], []),
        (given("qqqqqqqqqq", "1"), ["rft-train rl"], ["nearest"]),
    ],
)
def test_an_unknown_name_is_looked_for_here_in_other_commands_and_among_the_refused(
    option: GivenSetting, named: list[str], not_named: list[str]
) -> None:
    why = errors.unknown_option("rl", option).why
    assert all(part in why for part in named)
    assert not any(part in why for part in not_named)


@pytest.mark.parametrize(
    ("kind", "texts", "do", "default"),
    [
        (int, ["0"], "--size 1", 4),
        (int, ["x"], "--size 4", 4),
        (int, [], "--size 4", 4),
        (bool, ["maybe"], "--size true", False),
        (Literal["cosine", "linear"], ["lineer"], "--size linear", "cosine"),
        (Literal["cosine", "linear"], ["qqqq"], "--size cosine", "cosine"),
        (Literal["cosine", "linear"], [], "--size cosine", "cosine"),
        (tuple[float, float], ["1"], "--size 0.5 1", (0.5, 1.0)),
    ],
)
def test_a_bad_value_is_answered_with_a_legal_one(kind: Any, texts: list[str], do: str, default: Any) -> None:
    told = errors.bad_value(setting(kind, default, **({"minimum": 1} if kind is int else {})), given("size", *texts))
    assert (told.code, told.where, told.do) == ("option.value", "command line", do)
    shown = " ".join(texts) or "nothing"
    assert told.what.startswith(f"--size = {shown} is not allowed")


@pytest.mark.parametrize(
    ("default", "why"), [(4, "the default is 4"), ("", "the default is empty"), (REQUIRED, "the default is required")]
)
def test_a_bad_value_is_told_with_the_default(default: Any, why: str) -> None:
    assert errors.bad_value(setting(int, default), given("size", "x")).why == why


def test_a_bad_choice_is_told_with_the_nearest_ones() -> None:
    why = errors.bad_value(setting(Literal["cosine", "linear"], "cosine"), given("size", "lineer")).why
    assert why == "nearest: linear"


@pytest.mark.parametrize(
    ("text", "shown"), [("x" * 80, "x" * 80), ("x" * 81, "x" * 77 + "..."), (KEY, HIDDEN), ("", "nothing")]
)
def test_a_value_is_shown_shortened_and_never_a_key(text: str, shown: str) -> None:
    assert f" = {shown} is not allowed" in errors.bad_value(setting(int), given("size", text)).what


def test_every_other_problem_has_its_code_its_origin_and_a_remedy() -> None:
    size = setting(int, 4, minimum=1)
    told = [
        errors.refused_option(given("use_vllm", origin=FILE), Refusal("a reason", "--engine_type vllm")),
        errors.key_as_project(given("use_wandb", KEY, origin=FILE)),
        errors.missing_setting("rl", size),
        errors.unreadable("file.large", "what", FILE, "why", "check"),
    ]
    assert [(one.code, one.where) for one in told] == [
        ("option.refused", "a.yaml:3"),
        ("option.secret", "a.yaml:3"),
        ("option.missing", told[2].where),
        ("file.large", "a.yaml:3"),
    ]
    assert told[0].what.startswith("use_vllm cannot be used")
    assert told[1].do.endswith("use_wandb: PROJECT")
    assert KEY not in told[1].as_text()
    assert [told[index].do for index in (0, 2, 3)] == ["--engine_type vllm", "rft-train rl --size PATH", "check"]
