"""Contradictions between the settings of `genrec data`, and idle ones."""

from typing import Any

import pytest

from rft.config.origins import DEFAULT
from rft.config.rules.sourced_values import SourcedValues
from rft.resolved import flat
from rft_genrec.settings.data import GenrecDataSettings, SourceSettings
from rft_genrec.settings.data_rules import idle_settings, problems, seconds_of

DEFAULTS: dict[str, Any] = flat(GenrecDataSettings(sources=SourceSettings(source="synthetic")))


def given(**values: Any) -> SourcedValues:
    return SourcedValues(DEFAULTS | values, dict.fromkeys(DEFAULTS, DEFAULT))


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        ({}, []),
        ({"source": "movielens"}, ["genrec.no_input"]),
        ({"source": "amazon", "input": "r"}, ["genrec.no_items"]),
        ({"start_date": "2016", "end_date": "2018-13"}, ["genrec.date", "genrec.date"]),
        ({"start_date": "2018-11", "end_date": "2018-10-31"}, ["genrec.window"]),
        ({"min_items": 3}, ["genrec.no_start"]),
        ({"valid_share": 0.5, "test_share": 0.5}, ["genrec.shares"]),
        ({"write_reviews": True}, ["genrec.no_output"]),
        ({"dataset_name": "../x"}, ["genrec.name"]),
        ({"dataset_name": ".."}, ["genrec.name"]),
    ],
)
def test_contradictions_are_found(values: dict[str, Any], codes: list[str]) -> None:
    assert [problem.code for problem in problems(given(**values))] == codes


def test_a_setting_without_effect_is_named() -> None:
    assert idle_settings(given(user_k=3, users=9), DEFAULTS) == ["user_k = 3 has no effect with --source synthetic"]
    (line,) = idle_settings(given(source="table", split="leave_last_out", valid_share=0.2), DEFAULTS)
    assert line == "valid_share = 0.2 has no effect with --split leave_last_out"
    assert idle_settings(given(source="minionerec", max_history=3), DEFAULTS) == [
        "max_history = 3 has no effect with --source minionerec"
    ]


def test_dates_are_of_utc() -> None:
    assert seconds_of("2016-10") == seconds_of("2016-10-01") == 1475280000
    assert seconds_of("October") is None
