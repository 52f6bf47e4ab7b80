"""Contradictions of the settings of `genrec recommend`."""

from __future__ import annotations

import pytest

from rft.config.errors import SettingsError
from rft_cli.config.resolve import resolve


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--serve --histories a", "genrec.serve_files"),
        ("", "genrec.no_histories"),
        ("--histories a", "genrec.no_histories"),
        ("--serve --top_k 51", "genrec.top_k"),
    ],
)
def test_what_contradicts_is_refused(words: str, code: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve("genrec-recommend", ["--catalogue", "c", "--pretrain", "m", *words.split()])
    assert [problem.code for problem in caught.value.problems] == [code]


def test_a_setting_of_a_server_without_one_is_noted() -> None:
    words = "--catalogue c --pretrain m --histories a --recommendations b --port 9000"
    assert resolve("genrec-recommend", words.split()).notes == ("port has no effect without --serve",)
