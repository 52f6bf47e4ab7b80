"""Which field becomes what, and what is said when it cannot."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from rft_core.errors import DataError
from rft_trainer.data.preference_rows.labelled_steps import LabelledSteps, steps_hash
from rft_trainer.data.preference_rows.preferences import PreferencePair, pairs_hash
from rft_trainer.data.prompts import HASH_SCHEME, Message, PromptRow, content_hash, prompts_from_rows
from rft_trainer.data.readers.rows import Row, SkipLog


def prompts(*records: dict[str, Any], **options: Any) -> list[PromptRow]:
    rows = [Row(record, "train.jsonl", number) for number, record in enumerate(records, start=1)]
    return prompts_from_rows(rows, **{"source": "train", "input_key": "question", **options})


def test_a_row_becomes_a_prompt_with_the_id_of_its_source_and_index() -> None:
    rows = prompts(
        {"question": "1+1?", "answer": "It is 2.\n#### 2", "note": 0},
        {"question": "2+2?", "answer": "#### 4"},
        label_key="answer",
        output_key="answer",
    )
    assert rows[1] == PromptRow("train:1", "2+2?", None, "#### 4", "#### 4", "train", 1)
    assert (rows[0].prompt_id, rows[0].label) == ("train:0", "It is 2.\n#### 2")


def test_messages_stay_messages() -> None:
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi", "name": "x"}]
    for form in (list, tuple):
        (row,) = prompts({"question": form(turns)})
        assert row.text is None
        assert row.messages == (Message("system", "Be short."), Message("user", "Hi"))


@pytest.mark.parametrize(("value", "text"), [(72, "72"), (-1.5, "-1.5"), (Decimal("0.10"), "0.10"), ("", "")])
def test_numbers_become_text(value: object, text: str) -> None:
    (row,) = prompts({"question": "?", "label": value}, label_key="label")
    assert row.label == text


def test_a_dotted_key_reaches_into_nested_objects_unless_the_plain_key_exists() -> None:
    record = {"question": "?", "reward_model": {"ground_truth": "7"}, "a.b": "plain", "a": {"b": "nested"}}
    assert prompts(record, label_key="reward_model.ground_truth")[0].label == "7"
    assert prompts(record, label_key="a.b")[0].label == "plain"


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"answer": "1"}, "data.missing_field", "train.jsonl:1:question"),
    ({"question": "?"}, "data.missing_field", "train.jsonl:1:answer"),
    ({"question": None, "answer": "1"}, "data.wrong_type", "train.jsonl:1:question"),
    ({"question": "?", "answer": None}, "data.wrong_type", "train.jsonl:1:answer"),
    ({"question": "?", "answer": True}, "data.wrong_type", "train.jsonl:1:answer"),
    ({"question": "?", "answer": ["1"]}, "data.wrong_type", "train.jsonl:1:answer"),
    ({"question": {"text": "?"}, "answer": "1"}, "data.wrong_type", "train.jsonl:1:question"),
    ({"question": " \n", "answer": "1"}, "data.wrong_type", "train.jsonl:1:question"),
    ({"question": [], "answer": "1"}, "data.wrong_type", "train.jsonl:1:question"),
    ({"question": ["?"], "answer": "1"}, "data.wrong_type", "train.jsonl:1:question[0]"),
    ({"question": [{"role": "user"}], "answer": "1"}, "data.wrong_type", "train.jsonl:1:question[0]"),
    ({"question": [{"role": "human", "content": "?"}], "answer": "1"}, "data.wrong_type", "question[0].role"),
    ({"question": [{"role": "user", "content": 1}], "answer": "1"}, "data.wrong_type", "question[0].content"),
    ({"question": [{"role": "assistant", "content": "x"}], "answer": "1"}, "data.wrong_type", "train.jsonl:1:question"),
]


@pytest.mark.parametrize(("record", "code", "where"), WRONG)
def test_a_field_that_cannot_be_used_is_named(record: dict[str, Any], code: str, where: str) -> None:
    with pytest.raises(DataError) as caught:
        prompts(record, label_key="answer")
    assert caught.value.problem.code == code
    assert caught.value.problem.where.endswith(where)


def test_a_missing_key_lists_the_keys_that_exist_and_the_nearest() -> None:
    with pytest.raises(DataError) as caught:
        prompts({"questions": "?", "answer": "1"})
    assert "questions, answer" in caught.value.problem.what
    assert caught.value.problem.do == "--input_key questions"


def test_skipped_rows_keep_the_indices_of_the_others() -> None:
    skips = SkipLog(limit=1)
    rows = prompts({"question": "a"}, {"other": "b"}, {"question": "c"}, skips=skips)
    assert [row.prompt_id for row in rows] == ["train:0", "train:2"]
    assert len(skips.problems) == 1


def test_the_content_hash_follows_ids_inputs_labels_outputs_and_order() -> None:
    base = prompts({"question": "a", "l": "1"}, {"question": "b", "l": "2"}, label_key="l")
    same = prompts({"question": "a", "l": "1"}, {"question": "b", "l": "2", "other": "x"}, label_key="l")
    assert content_hash(base) == content_hash(same)
    changed = [
        prompts({"question": "a", "l": "1"}, {"question": "b", "l": "3"}, label_key="l"),
        prompts({"question": "a", "l": "1"}, {"question": "B", "l": "2"}, label_key="l"),
        prompts({"question": "a", "l": "1"}, {"question": "b", "l": "2"}),
        prompts({"question": "a", "l": "1"}, {"question": "b", "l": "2"}, label_key="l", output_key="l"),
        prompts({"question": "a", "l": "1"}, {"question": "b", "l": "2"}, label_key="l", source="other"),
        prompts({"question": [{"role": "user", "content": "a"}], "l": "1"}, {"question": "b", "l": "2"}, label_key="l"),
        base[::-1],
        base[:1],
    ]
    assert len({content_hash(rows) for rows in (base, *changed)}) == len(changed) + 1


def test_rows_have_the_hashes_of_the_recorded_scheme() -> None:
    """A change of one of these hashes needs the next number of `HASH_SCHEME`, and new hashes here."""
    rows = prompts({"question": "a", "l": "1"}, {"question": [{"role": "user", "content": "b"}], "l": 2}, label_key="l")
    pair = PreferencePair(rows[0], "yes", "no")
    steps = LabelledSteps(rows[1], ("one", "two"), (1.0, 0.0))
    found = [content_hash(rows), pairs_hash([pair]), steps_hash([steps])]
    assert (HASH_SCHEME, [digest[:12] for digest in found]) == (1, ["a1999b1fa2f8", "0062698c0203", "869ec7aecb7a"])


def test_a_prompt_is_a_text_or_messages() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        PromptRow("a:0", None, None, None, None, "a", 0)
    with pytest.raises(ValueError, match="exactly one"):
        PromptRow("a:0", "x", (Message("user", "x"),), None, None, "a", 0)


def test_whole_rows_keep_their_columns_and_any_label() -> None:
    row = {"q": "1+1=", "a": {"x": [1, None]}, "day": date(2026, 11, 23), "price": Decimal("1.5"), "raw": b"x", "n": 3}
    [prompt] = prompts_from_rows([Row(row, "t.jsonl", 1)], source="t", input_key="q", label_key="a", whole_rows=True)
    assert prompt.label == {"x": [1, None]}
    assert prompt.columns == {"q": "1+1=", "a": {"x": [1, None]}, "day": "2026-11-23", "price": 1.5, "n": 3}
    json.dumps(prompt.columns)
    for label in (7, None, True, ["x"], 0.5):
        [prompt] = prompts_from_rows(
            [Row({"q": "?", "a": label}, "t.jsonl", 1)], source="t", input_key="q", label_key="a", whole_rows=True
        )
        assert prompt.label == label
    with pytest.raises(DataError, match="bytes"):
        prompts_from_rows(
            [Row({"q": "?", "a": b"x"}, "t.jsonl", 1)], source="t", input_key="q", label_key="a", whole_rows=True
        )


def test_the_content_hash_follows_columns_only_where_they_are_kept() -> None:
    def hashed(*, whole_rows: bool, **more: Any) -> str:
        row = Row({"q": "1+1=", "a": "2", **more}, "t.jsonl", 1)
        return content_hash(prompts_from_rows([row], source="t", input_key="q", label_key="a", whole_rows=whole_rows))

    assert hashed(whole_rows=False) == hashed(whole_rows=False, level=1)
    assert hashed(whole_rows=True, level=1) != hashed(whole_rows=True, level=2)
    assert hashed(whole_rows=True, level=1, x=2) == hashed(whole_rows=True, x=2, level=1)


def _whole(*messages: dict[str, Any]) -> tuple[Message, ...]:
    rows = [Row({"messages": list(messages)}, "f.jsonl", 1)]
    (prompt,) = prompts_from_rows(rows, source="f", input_key="messages", conversations=True)
    assert prompt.messages is not None
    return prompt.messages


def test_messages_of_a_conversation_keep_what_templates_and_training_read() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    asked, called, answer, reply = _whole(
        {"role": "user", "content": "1+1?", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "train": False},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
        {"role": "assistant", "content": "2", "weight": 1},
    )
    assert asked == Message("user", "1+1?")
    assert called.as_dict() == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert answer.as_dict() == {"role": "tool", "content": "2", "tool_call_id": "x"}
    assert (asked.learned, called.learned, reply.learned) == (None, False, True)


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "assistant", "content": "2", "train": "no"}, "messages[0].train"),
        ({"role": "assistant", "content": "2", "weight": 0.5}, "messages[0].weight"),
        ({"role": "assistant", "content": "2", "weight": True}, "messages[0].weight"),
        ({"role": "assistant", "content": "2", "weight": 0, "train": True}, "messages[0]"),
        ({"role": "robot", "content": "2"}, "messages[0].role"),
        ({"role": "assistant"}, "messages[0]"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
    ],
)
def test_a_message_that_says_something_else_is_refused_at_its_place(message: dict[str, Any], where: str) -> None:
    with pytest.raises(DataError) as caught:
        _whole(message)
    assert caught.value.problem.where == f"f.jsonl:1:{where}"


def test_what_is_learned_is_in_the_hash_of_the_data() -> None:
    def digest(**others: Any) -> str:
        rows = [Row({"messages": [{"role": "assistant", "content": "2", **others}]}, "f.jsonl", 1)]
        return content_hash(prompts_from_rows(rows, source="f", input_key="messages", conversations=True))

    assert len({digest(), digest(train=False), digest(train=True), digest(name="x")}) == 4
    assert digest(weight=0) == digest(train=False)


def test_rows_have_the_weight_of_their_column() -> None:
    rows = [Row({"q": "a", "w": weight}, "f.jsonl", n) for n, weight in enumerate([1, 0.5, Decimal("2"), 0], start=1)]
    prompts = prompts_from_rows(rows, source="f", input_key="q", weight_key="w")
    assert [prompt.weight for prompt in prompts] == [1.0, 0.5, 2.0, 0.0]
    plain = prompts_from_rows(rows[:1], source="f", input_key="q")
    assert content_hash(plain) == content_hash(prompts[:1]) != content_hash(prompts[1:2])


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), True, "2", None])
def test_a_weight_that_is_none_is_refused_at_its_place(weight: object) -> None:
    rows = [Row({"q": "a", "w": weight}, "f.jsonl", 3)]
    with pytest.raises(DataError) as caught:
        prompts_from_rows(rows, source="f", input_key="q", weight_key="w")
    assert caught.value.problem.where == "f.jsonl:3:w"
