"""Problems of the words of a command line: their codes, and a remedy in the form in which the word was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.config.origins import GivenSetting
from rft.config.schema import Setting
from rft.resolved import Origin
from rft_cli.config import word_problems
from rft_core.secrets import HIDDEN

FLAG, FILE = Origin("command line"), Origin("file", "a.yaml", 3)
KEY = "0123456789abcdef" * 2


def given(name: str, *texts: str, origin: Origin = FLAG) -> GivenSetting:
    return GivenSetting(f"--{name}" if origin is FLAG else name, name, texts, origin)


def setting(kind: Any, default: Any = 4, **metadata: Any) -> Setting:
    return Setting("size", "group", kind, default, metadata)


@pytest.mark.parametrize(("text", "shown"), [("word", "word"), (KEY, HIDDEN)])
def test_a_stray_word_is_shown_unless_it_is_a_key(text: str, shown: str) -> None:
    told = word_problems.unexpected_argument(text, ["quickstart"])
    assert (told.code, told.what) == ("option.stray", f"unexpected argument {shown!r}")


@pytest.mark.parametrize(
    ("text", "do"), [("quikstart", "--config quickstart"), ("5", "remove it, or put its flag in front")]
)
def test_a_stray_word_may_be_a_recipe(text: str, do: str) -> None:
    assert word_problems.unexpected_argument(text, ["quickstart", "sums"]).do == do


@pytest.mark.parametrize(
    ("command", "text", "do"),
    [
        ("eval", "rows.jsonl", "--eval_data rows.jsonl"),
        ("sft", "rows.jsonl", "--prompt_data rows.jsonl"),
        ("build", "rows.jsonl", "--texts rows.jsonl"),
        ("generate", "1+1=", "--prompt 1+1="),
        ("generate", "two words", "--prompt 'two words'"),
        ("eval", "none.jsonl", "remove it, or put its flag in front"),
        ("generate", "folder", "remove it, or put its flag in front"),
    ],
)
def test_a_stray_file_or_text_gets_the_flag_that_it_belongs_to(
    command: str, text: str, do: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("{}\n")
    Path("folder").mkdir()
    assert word_problems.unexpected_argument(text, [], command).do == do


def test_every_other_problem_has_its_code_its_origin_and_a_remedy() -> None:
    size = setting(int, 4, minimum=1)
    told = [
        word_problems.missing_value(size, given("size")),
        word_problems.missing_value(size, given("size", origin=FILE)),
        word_problems.config_without_name(given("config")),
        word_problems.negated_with_value(given("no-size", "true")),
    ]
    assert [(one.code, one.where, one.do) for one in told] == [
        ("option.no_value", "command line", "--size 4"),
        ("option.no_value", "a.yaml:3", "size: 4"),
        ("option.no_value", "command line", "rft-train recipes"),
        ("option.value", "command line", "--no-size false"),
    ]
