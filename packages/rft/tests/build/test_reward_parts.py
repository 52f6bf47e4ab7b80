"""Rewards beside images: a model that does not see is refused, one that sees or says nothing of itself is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rft.build.reward_parts import columns_of, has_images, require_image_rewards, unit_test_notes
from rft.settings import RlSettings
from rft_core.errors import DataError, OptionsError
from rft_models.reward_model.spec import RECORD, RewardSpec, StepSpec
from rft_models.settings import ModelSettings
from rft_trainer.records.rollouts import Prompt
from rft_trainer.settings.images import ControlledImageSettings
from rft_trainer.settings.rewards import JudgeSettings, RewardModelSettings, RlRewardSettings

PLAIN = RlSettings(model=ModelSettings(pretrain="m", device="cpu"))
SEEING = replace(PLAIN, images=ControlledImageSettings(images_key="image"))


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """Three models: one of text, one that sees, one without a config.json."""
    for name, model_type in (("text", "llama"), ("seeing", "qwen2_vl"), ("silent", "")):
        (tmp_path / name).mkdir()
        if model_type:
            (tmp_path / name / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "nameless").mkdir()
    (tmp_path / "nameless" / "config.json").write_text("{}")
    return tmp_path


def models(*names: Path | str) -> RewardModelSettings:
    return RewardModelSettings(reward_pretrain=",".join(map(str, names)))


def test_images_are_there_where_a_column_is_named() -> None:
    assert has_images(SEEING)
    assert not has_images(PLAIN)


def test_models_that_see_and_those_that_say_nothing_are_taken(places: Path) -> None:
    chosen = models(places / "seeing", f"b={places / 'silent'}", f"c={places / 'nameless'}")
    require_image_rewards(replace(SEEING, reward_models=chosen))
    require_image_rewards(replace(SEEING, judge=JudgeSettings(judge_pretrain=str(places / "seeing"))))
    # without images nothing is read
    require_image_rewards(replace(PLAIN, reward_models=models(places / "none")))
    blind = models(places / "text")
    require_image_rewards(replace(PLAIN, reward_models=blind))
    with pytest.raises(OptionsError):
        require_image_rewards(replace(SEEING, reward_models=blind))


def test_a_model_of_text_alone_is_refused_by_its_flag(places: Path) -> None:
    text = places / "text"
    for settings, flag in (
        (replace(SEEING, reward_models=models(places / "seeing", f"b={text}")), "--reward_pretrain"),
        (replace(SEEING, judge=JudgeSettings(judge_pretrain=str(text))), "--judge_pretrain"),
    ):
        with pytest.raises(OptionsError) as caught:
            require_image_rewards(settings)
        problem = caught.value.problem
        assert (problem.code, problem.where) == ("reward.no_images", flag)
        assert str(text) in problem.what


def test_a_model_of_steps_is_refused_though_its_decoder_sees(places: Path) -> None:
    record = RewardSpec(steps=StepSpec()).as_record()
    config = {"model_type": "qwen2_vl", RECORD: record}
    (places / "seeing" / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptionsError, match="a reward model of steps") as caught:
        require_image_rewards(replace(SEEING, reward_models=models(places / "seeing")))
    assert caught.value.problem.code == "reward.no_images"


def test_a_directory_that_is_not_there_is_an_error(places: Path) -> None:
    with pytest.raises(DataError):
        require_image_rewards(replace(SEEING, reward_models=models(places / "none")))
    # the directories of a judge are not joined by commas
    with pytest.raises(DataError):
        require_image_rewards(
            replace(SEEING, judge=JudgeSettings(judge_pretrain=f"{places / 'seeing'},{places / 'seeing'}"))
        )


def test_columns_are_those_of_any_row_with_the_first_row_that_lacks_them() -> None:
    rows: list[dict[str, object]] = [{"a": 1, "b": 2}, {"a": 3}, {"a": None, "c": 1}]
    prompts = [Prompt(f"p:{n}", (1,), "?", None, "rows", columns=row) for n, row in enumerate(rows)]
    assert columns_of(prompts) == {"a": "", "b": "p:1", "c": "p:0"}
    assert columns_of([]) == {}


def coded(*labels: object) -> list[Prompt]:
    tests = ["assert f(1) == 2"]
    columns = {"answer": "x = f(1)", "tests": tests}
    return [Prompt(f"p:{i}", (1,), "?", label, "rows", columns=columns) for i, label in enumerate(labels)]


def test_rows_without_unit_tests_are_counted_and_a_wrong_column_is_refused_with_the_right_one() -> None:
    settings = replace(PLAIN, reward=RlRewardSettings(reward="code"))
    right, wrong = ["assert f(1) == 2"], "x = f(1)"
    assert unit_test_notes(PLAIN, coded(wrong)) == ()
    assert unit_test_notes(settings, coded(right, right)) == ()
    [note] = unit_test_notes(settings, coded(right, wrong))
    assert note.startswith("1 of 2 rows have no tests that can be read; p:1: 'x = f(1)' is not of a form")
    with pytest.raises(DataError, match="no row has unit tests that can be read; p:0") as caught:
        unit_test_notes(settings, coded(wrong, wrong))
    assert caught.value.problem.do == "--label_key tests"
    untested = [replace(prompt, columns={}) for prompt in coded(wrong, wrong)]
    with pytest.raises(DataError) as caught:
        unit_test_notes(settings, untested)
    assert caught.value.problem.do == "--label_key with a column of such tests"
