"""A response that is JSON and meets a schema; nothing is fetched."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import DataError, OptionsError
from rft_trainer.records.scores import RewardItem, RewardStatus
from rft_trainer.rewards.registry import reward_by_name
from rft_trainer.rewards.rules.json_schema import json_text, judge, read_schema

MakeItem = Callable[..., RewardItem]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"$ref": "#/$defs/count"}},
    "required": ["answer"],
    "$defs": {"count": {"type": "integer"}},
}


@pytest.mark.parametrize(
    ("response", "parsed", "fits"),
    [
        ('{"answer": 5}', 1.0, 1.0),
        ('{"answer": "5"}', 1.0, 0.0),
        ("[]", 1.0, 0.0),
        ("{answer: 5}", 0.0, 0.0),
        ("NaN", 0.0, 0.0),
        ("[" * 100_000, 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_a_response_is_json_and_meets_the_schema(response: str, parsed: float, fits: float) -> None:
    found = judge({"response": response, "schema": json.dumps(SCHEMA)})
    assert found == {"reward": fits, "json": parsed, "schema": fits}
    assert judge({"response": response, "schema": ""}) == {"reward": parsed, "json": parsed, "schema": parsed}


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("[1]", "[1]"),
        ("so\n```json\n[1]\n```\nand\n```\n[2]\n```", "[2]\n"),
        ("```\n[1]", "```\n[1]"),
        ("<think>[0]</think><answer>[1]</answer>", "[1]"),
    ],
)
def test_the_last_block_the_answer_or_everything_is_read(response: str, text: str) -> None:
    assert json_text(response) == text


def write(path: Path, schema: Any) -> str:
    path.write_text(json.dumps(schema))
    return str(path)


def test_a_schema_whose_pattern_never_ends_gives_that_response_a_status(make_item: MakeItem, tmp_path: Path) -> None:
    path = write(tmp_path / "schema.json", {"type": "string", "pattern": "^(a+)+$"})
    reward = reward_by_name("json_schema", timeout=5.0, options={"json_schema": path})
    try:
        right, endless = reward([make_item('"aaa"'), make_item(json.dumps("a" * 64 + "!"))])
    finally:
        reward.close()
    assert (right.value, right.breakdown) == (1.0, {"json": 1.0, "schema": 1.0})
    assert endless.status is RewardStatus.TIMEOUT


@pytest.mark.parametrize("reference", ["http://127.0.0.1:9/a.json", "other.json", "file:///etc/passwd"])
def test_a_reference_to_another_document_is_refused(tmp_path: Path, reference: str) -> None:
    path = write(tmp_path / "schema.json", {"items": [{"$ref": reference}]})
    with pytest.raises(OptionsError) as caught:
        read_schema(Path(path))
    assert caught.value.problem.code == "reward.schema_reference"
    assert reference in caught.value.problem.what


def test_texts_of_the_data_and_names_of_fields_are_no_references(tmp_path: Path) -> None:
    schema = {"properties": {"$ref": {"type": "string"}}, "const": {"$ref": "http://a"}}
    assert json.loads(read_schema(Path(write(tmp_path / "schema.json", schema)))) == schema


@pytest.mark.parametrize("schema", [{"type": "nothing"}, [], {"properties": 3}])
def test_what_is_no_schema_is_refused(tmp_path: Path, schema: Any) -> None:
    with pytest.raises(DataError) as caught:
        read_schema(Path(write(tmp_path / "schema.json", schema)))
    assert caught.value.problem.code == "reward.schema"
    with pytest.raises(DataError):
        read_schema(tmp_path / "absent.json")


def test_the_missing_package_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.partition(".")[0] == "jsonschema":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(OptionsError) as caught:
        read_schema(Path(write(tmp_path / "schema.json", SCHEMA)))
    assert caught.value.problem.do.endswith("--extra json-schema")
