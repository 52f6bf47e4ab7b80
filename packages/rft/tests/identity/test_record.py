"""The record of a run: what its hash is of, its form on disk, and what is not believed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rft.identity.record import (
    Change,
    Content,
    Identity,
    RecordedSetting,
    RecordFault,
    checked,
    identity_from_json,
    plain,
    shown,
    with_checksum,
)

SETTINGS = {"seed": RecordedSetting(3, "command line"), "log_interval": RecordedSetting(1, "default")}
RUN = Identity(
    command="rl",
    settings=SETTINGS,
    contents={"reward": Content("ab", "reward.py", "here/reward.py:f")},
    versions={"torch": "2"},
    machine={"device": "cpu"},
    changes=(Change(4, "seed", 2, 3, "command line"),),
)


def test_a_record_read_back_is_the_record() -> None:
    assert identity_from_json(json.loads(json.dumps(RUN.as_json()))) == RUN


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"settings": SETTINGS | {"seed": RecordedSetting(4, "command line")}}, False),
        ({"settings": SETTINGS | {"seed": RecordedSetting(3, "a file")}}, True),
        ({"settings": SETTINGS | {"log_interval": RecordedSetting(9, "default")}}, True),
        ({"contents": {"reward": Content("cd", "reward.py", "here/reward.py:f")}}, False),
        ({"contents": {"reward": Content("ab", "reward.py", "elsewhere/reward.py:f")}}, True),
        ({"contents": {}}, False),
        ({"versions": {"torch": "3"}}, False),
        ({"command": "sft"}, False),
        ({"machine": {"device": "cuda:0"}}, True),
        ({"changes": ()}, True),
    ],
)
def test_the_hash_is_of_what_decides_the_result(changed: dict[str, Any], same: bool) -> None:
    assert (replace(RUN, **changed).sha256 == RUN.sha256) is same


@pytest.mark.parametrize(
    "value",
    [None, [], {}, RUN.as_json() | {"form": 2}, RUN.as_json() | {"changes": {}}, RUN.as_json() | {"settings": 3}]
    + [{key: part for key, part in RUN.as_json().items() if key != left} for left in ("versions", "settings")]
    + [RUN.as_json() | {"settings": {"seed": {"value": 3}}}, RUN.as_json() | {"contents": {"a": {"other": 1}}}],
)
def test_another_form_is_not_believed(value: object) -> None:
    with pytest.raises(RecordFault):
        identity_from_json(value)


def test_any_changed_part_is_noticed_by_the_checksum() -> None:
    record = with_checksum(RUN.as_json())
    assert identity_from_json(checked(json.loads(json.dumps(record)))) == RUN
    for key in record:
        with pytest.raises(RecordFault):
            checked({name: part for name, part in record.items() if name != key})
        with pytest.raises(RecordFault):
            checked(record | {key: "other"})
    with pytest.raises(RecordFault):
        checked([])


def test_values_are_recorded_as_json_and_without_secrets() -> None:
    assert plain((0.9, 0.95)) == [0.9, 0.95]
    assert plain(None) is None
    assert "abc" not in str(plain("http://user:abcabcabc@host/v1"))
    assert [shown(value) for value in (True, None, [0.9, 1], "", "text", 1e-6)] == [
        "true",
        "none",
        "0.9 1",
        "empty",
        "text",
        "1e-06",
    ]
