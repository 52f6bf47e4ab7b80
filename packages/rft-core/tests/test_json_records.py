"""Records as JSON: the bytes of `dataclasses.asdict`, and what is neither is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import pytest

from rft_core.json_records import fields_of, json_bytes


@dataclass(frozen=True, slots=True)
class Turn:
    """What a record may hold."""

    tokens: tuple[int, ...]
    values: list[float]


@dataclass(frozen=True, slots=True)
class Talk:
    """A record of records."""

    name: str
    turns: tuple[Turn, ...]
    parts: dict[str, float]


TALK = Talk("é", (Turn((1, 2), [0.1, -2e-9]), Turn((), [])), {"a": 1.5})


def test_records_are_written_as_their_copies_would_be() -> None:
    assert json_bytes({"item": TALK}) == json.dumps({"item": asdict(TALK)}).encode()


def test_what_a_record_holds_is_not_copied() -> None:
    assert fields_of(TALK)["turns"] is TALK.turns


def test_what_is_neither_json_nor_a_record_is_refused() -> None:
    with pytest.raises(TypeError, match="set is neither JSON nor a dataclass"):
        json_bytes({"x": {1}})
