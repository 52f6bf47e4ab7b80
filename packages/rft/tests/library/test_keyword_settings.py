"""Keyword arguments: values as flags write them, files below them, and the same errors as on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.config.errors import SettingsError
from rft.library.keyword_settings import as_texts, command_words, givens, resolved
from rft_core.errors import OptionsError

MODEL: dict[str, Any] = {"pretrain": "m", "prompt_data": "d.jsonl"}


def test_keywords_win_over_files_and_keep_their_origin(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("seed: 3\ntemperature: 0.5\n")
    found = resolved("rl", {**MODEL, "seed": 7, "filter_groups": True}, config=file)
    assert (found.values["seed"], found.values["temperature"]) == (7, 0.5)
    assert (found.origins["seed"].kind, found.origins["temperature"].kind) == ("keyword argument", "file")
    assert found.sources == (file,)
    assert found.recipe_name == "mine"


def test_the_directory_of_a_run_is_a_file_of_settings(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 11\n")
    assert resolved("rl", MODEL, config=[str(tmp_path)]).values["seed"] == 11
    with pytest.raises(OptionsError, match="no file of settings and no run"):
        resolved("rl", MODEL, config=tmp_path / "absent")


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"learning_rate": 1e-6}, "actor_learning_rate=1e-06"),
        ({"num_generations": 4}, "n_samples_per_prompt=4"),
        ({"temperatur": 0.5}, "temperature=0.5"),
        ({"temperature": "warm"}, "temperature=1"),
        ({"zero_stage": 1, "fsdp": True}, "zero_stage"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_names_and_values_are_refused_as_on_the_command_line(keywords: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolved("rl", {**MODEL, **keywords})
    assert told in caught.value.problem.as_text()


def test_the_words_of_the_command_mean_the_same() -> None:
    keywords: dict[str, Any] = {**MODEL, "seed": 7, "no_filter_groups": True, "patience": None, "use_wandb": True}
    rows = givens("rl", {key: value for key, value in keywords.items() if key != "patience"})
    words = command_words("rl", rows, config=["a.yaml"])
    assert words[:4] == ["rft-train", "rl", "--config", "a.yaml"]
    assert " ".join(words[4:]).startswith(
        "--pretrain m --prompt_data d.jsonl --seed 7 --filter_groups false --use_wandb"
    )


def test_a_mapping_is_written_as_a_flag_has_it() -> None:
    assert as_texts({"correctness": 1.0, "good": 0.5}) == ("correctness=1.0,good=0.5",)


def test_a_setting_that_was_given_under_another_name_is_not_told_as_missing() -> None:
    with pytest.raises(SettingsError) as caught:
        resolved("rl", {"model_name_or_path": "m", "prompt_data": "d"})
    assert [problem.do for problem in caught.value.problems] == ["pretrain='m'"]
    with pytest.raises(SettingsError) as caught:
        resolved("rl", {"num_generations": 4})
    assert len(caught.value.problems) == 2, "the model is missing beside it"
