"""Contradictions of `genrec run`."""

from __future__ import annotations

import pytest

from rft.config.errors import SettingsError
from rft_cli.config.resolve import resolve
from rft_genrec.settings.run import chosen_stages


def codes(*words: str) -> set[str]:
    try:
        resolve("genrec-run", ["--save_path", "out", *words])
    except SettingsError as error:
        return {problem.code for problem in error.problems}
    return set()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--stages data,fly", "genrec.stages"),
        ("--stages data,data", "genrec.stages"),
        ("--catalogue tools", "genrec.two_catalogues"),
        ("--stages sft", "genrec.no_catalogue"),
        ("--stages data,rl", "genrec.no_model"),
        ("--rl_options=--max_steps=3", "genrec.idle_options"),
    ],
)
def test_a_contradiction_is_refused(words: str, code: str) -> None:
    assert codes(*words.split()) == {code}


def test_stages_run_in_their_own_order() -> None:
    assert codes() == set()
    assert codes("--catalogue", "tools", "--stages", "rl,sft") == set()
    assert chosen_stages("rl, sft,embed") == ["embed", "sft", "rl"]
