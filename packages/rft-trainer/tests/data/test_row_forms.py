"""Rows of published data sets, read in their own columns."""

from __future__ import annotations

from typing import Any

import pytest

from rft_core.errors import DataError
from rft_trainer.data.prompts import prompts_from_rows
from rft_trainer.data.readers.rows import Row, SkipLog
from rft_trainer.data.row_forms import Keys, as_read

RL, SFT = Keys("input", "label"), Keys("input", None, "output")
TURNS = [("human", "1+1?"), ("gpt", "2"), ("human", "2+2?"), ("gpt", "4"), ("human", "bye")]
SHARE_GPT = {"id": "x", "conversations": [{"from": speaker, "value": said} for speaker, said in TURNS]}
ASKED = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
]
CHAT = {"messages": [*ASKED, {"role": "assistant", "content": "4"}]}
MATH = {"problem": "1+1?", "solution": r"It is \boxed{2}", "level": 1}
CHATS = {"prompt": "2+2?", "chosen": CHAT["messages"], "rejected": CHAT["messages"]}


def read(keys: Keys, *fields: dict[str, Any]) -> tuple[Any, str | None, str | None, str]:
    """(input, label, output) of the first row, and the note."""
    rows = [Row(dict(row), "f.jsonl", number) for number, row in enumerate(fields, start=1)]
    found = as_read(rows, keys)
    prompts = prompts_from_rows(
        found.rows, source="f", input_key=found.keys.input, label_key=found.keys.label, output_key=found.keys.output
    )
    first = prompts[0]
    asked = first.text if first.messages is None else [message.as_dict() for message in first.messages]
    return asked, first.label, first.output, found.note


@pytest.mark.parametrize(
    ("keys", "row", "expected"),
    [
        (RL, {"question": "1+1?", "answer": "#### 2"}, ("1+1?", "#### 2", None)),
        (SFT, {"question": "1+1?", "answer": "#### 2"}, ("1+1?", None, "#### 2")),
        (RL, MATH, ("1+1?", MATH["solution"], None)),
        (RL, {**MATH, "answer": "2"}, ("1+1?", "2", None)),
        (SFT, {**MATH, "answer": "2"}, ("1+1?", None, MATH["solution"])),
        (SFT, {"instruction": "Add", "input": "1, 1", "output": "2"}, ("Add\n\n1, 1", None, "2")),
        (SFT, {"instruction": "Say hi", "input": "", "output": "hi"}, ("Say hi", None, "hi")),
        (RL, {"instruction": "Say hi", "output": "hi"}, ("Say hi", "hi", None)),
        (SFT, SHARE_GPT, (ASKED, None, "4")),
        (SFT, CHAT, (ASKED, None, "4")),
        (RL, CHAT, (ASKED, "4", None)),
        (RL, {"prompt": "hi", "chosen": "ho", "rejected": "no"}, ("hi", None, None)),
        (SFT, {"prompt": "hi", "chosen": "ho", "rejected": "no"}, ("hi", None, "ho")),
        (SFT, CHATS, (ASKED, None, "4")),
        (RL, {"prompt": "ab", "answer": "ba"}, ("ab", "ba", None)),
        (SFT, {"prompt": "ab", "answer": "ba"}, ("ab", None, "ba")),
        (SFT, {"prompt": "ab", "response": "ba"}, ("ab", None, "ba")),
    ],
)
def test_a_form_gives_prompt_label_and_response(keys: Keys, row: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert read(keys, row)[:3] == expected


PUBLISHED = {
    "openai/gsm8k": {"question": "1+1?", "answer": "1+1 = <<1+1=2>>2\n#### 2"},
    "MATH-lighteval": {**MATH, "level": "Level 1", "type": "Algebra"},
    "MATH-500": {**MATH, "answer": "2", "subject": "Algebra", "unique_id": "test/algebra/1.json"},
    "AIME_2024": {"ID": "2024-I-1", "Problem": "1+1?", "Solution": r"\boxed{002}", "Answer": 2},
    "aimo-validation-aime": {"id": 0, "problem": "1+1?", "solution": "2", "answer": "002", "url": "https://a"},
    "AIME2025": {"question": "1+1?", "answer": "2"},
    "AIME_1983_2024": {"ID": "1983-1", "Year": 1983, "Problem Number": 1, "Question": "1+1?", "Answer": "002"},
    "geometry3k": {"images": ["a.png"], "problem": "<image>1+1?", "answer": "2"},
    "tatsu-lab/alpaca": {"instruction": "Add", "input": "1, 1", "output": "2", "text": "Below is ..."},
    "ultrafeedback_binarized": {
        **{"prompt": "2+2?", "prompt_id": "ab", "score_chosen": 8.0, "score_rejected": 2.0},
        **{"chosen": CHAT["messages"], "rejected": CHAT["messages"], "messages": CHAT["messages"]},
    },
    "ShareGPT": SHARE_GPT,
    "DAPO-Math-17k": {
        **{"data_source": "math_dapo", "prompt": [{"role": "user", "content": "1+1?"}], "ability": "MATH"},
        **{"reward_model": {"ground_truth": "2", "style": "rule"}, "extra_info": {"index": "a"}},
    },
}
"""A generated row of each, with all columns as they are published."""


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("openai/gsm8k", RL, ("1+1?", PUBLISHED["openai/gsm8k"]["answer"], None)),
        ("MATH-lighteval", RL, ("1+1?", MATH["solution"], None)),
        ("MATH-500", RL, ("1+1?", "2", None)),
        ("AIME_2024", RL, ("1+1?", "2", None)),
        ("AIME_2024", SFT, ("1+1?", None, r"\boxed{002}")),
        ("aimo-validation-aime", RL, ("1+1?", "002", None)),
        ("AIME2025", RL, ("1+1?", "2", None)),
        ("AIME_1983_2024", RL, ("1+1?", "002", None)),
        ("tatsu-lab/alpaca", SFT, ("Add\n\n1, 1", None, "2")),
        ("ultrafeedback_binarized", SFT, (ASKED, None, "4")),
        ("ShareGPT", SFT, (ASKED, None, "4")),
        ("DAPO-Math-17k", Keys("prompt", "reward_model.ground_truth"), ([ASKED[0]], "2", None)),
    ],
)
def test_rows_of_published_data_sets_are_read_with_all_their_columns(
    name: str, keys: Keys, expected: tuple[Any, ...]
) -> None:
    assert read(keys, PUBLISHED[name])[:3] == expected


def test_columns_that_are_not_used_are_named_once() -> None:
    assert read(RL, MATH)[3] == "problem is the prompt, solution is the label; not used: level"
    assert read(SFT, {"question": "q", "answer": "a"})[3] == "question is the prompt, answer is the response"
    note = read(SFT, {"prompt": "hi", "chosen": "ho", "rejected": "no"})[3]
    assert note == "prompt is the prompt, chosen is the response; not used: rejected"
    note = read(RL, {"prompt": "hi", "chosen": "ho", "rejected": "no"})[3]
    assert "none is the label" in note
    note = read(SFT, SHARE_GPT)[3]
    expected = "conversations up to the last reply is the prompt, the last reply of conversations is the response"
    assert note == f"{expected}; not used: id"
    note = read(SFT, {"instruction": "Add", "input": "1", "output": "2"})[3]
    assert note == "instruction with input is the prompt, output is the response"


@pytest.mark.parametrize(
    ("keys", "row"),
    [
        (RL, {"input": "1+1=", "label": "2", "question": "no", "answer": "no"}),
        (Keys("answer", "question"), {"question": "q", "answer": "a"}),
        (Keys("input", "label"), {"input": "a", "label": "b"}),
    ],
)
def test_columns_that_are_there_or_named_are_read_as_they_are(keys: Keys, row: dict[str, Any]) -> None:
    asked, label, _, note = read(keys, row)
    assert (asked, label, note) == (row[keys.input], row[str(keys.label)], "")


def test_a_named_column_replaces_the_one_of_the_form() -> None:
    row = {"question": "1+1?", "answer": "#### 2", "final": "2"}
    assert read(Keys("input", "final"), row)[:2] == ("1+1?", "2")
    assert read(RL, {"question": "1+1?", "answer": "long", "label": "2"})[:2] == ("1+1?", "2")


def test_rows_of_no_known_form_are_left_to_the_error_of_the_missing_column() -> None:
    with pytest.raises(DataError) as caught:
        read(RL, {"text": "a"})
    assert caught.value.problem.code == "data.missing_field"


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ({"conversations": [{"from": "human", "value": "hi"}]}, "f.jsonl:2:conversations"),
        ({"conversations": [{"from": "gpt", "value": "hi"}]}, "f.jsonl:2:conversations"),
        ({"conversations": [{"from": "dog", "value": "hi"}]}, "f.jsonl:2:conversations[0].from"),
        ({"conversations": [{"value": "hi"}]}, "f.jsonl:2:conversations[0]"),
        ({"conversations": "hi"}, "f.jsonl:2:conversations"),
    ],
)
def test_a_row_that_breaks_its_form_is_named_by_line_and_column(row: dict[str, Any], where: str) -> None:
    with pytest.raises(DataError) as caught:
        read(SFT, SHARE_GPT, row)
    assert (caught.value.problem.code, caught.value.problem.where) == ("data.wrong_type", where)


def test_rows_that_break_their_form_may_be_skipped_and_the_rest_is_read() -> None:
    rows = [Row(dict(SHARE_GPT), "f", 1), Row({"conversations": []}, "f", 2)]
    skips = SkipLog(limit=1)
    assert len(as_read(rows, SFT, skips).rows) == 1
    assert len(skips.problems) == 1


@pytest.mark.parametrize(
    ("fields", "column"),
    [
        (SHARE_GPT, "conversations"),
        (CHAT, "messages"),
        ({"input": CHAT["messages"]}, "input"),
    ],
)
def test_chats_stay_whole_where_turns_are_learned(fields: dict[str, Any], column: str) -> None:
    rows = [Row(dict(fields), "f.jsonl", 1)]
    found = as_read(rows, SFT, conversations=True)
    assert (found.conversations, found.keys) == (True, Keys(column))
    (prompt,) = prompts_from_rows(found.rows, source="f", input_key=column, conversations=True)
    assert prompt.messages is not None
    assert [turn.as_dict() for turn in prompt.messages[:4]] == CHAT["messages"]
    assert prompt.is_conversation


def test_a_column_of_responses_keeps_the_chat_a_prompt() -> None:
    rows = [Row({"messages": ASKED, "input": ASKED, "output": "4"}, "f.jsonl", 1)]
    assert not as_read(rows, SFT, conversations=True).conversations
    named = as_read([Row({**CHAT, "reply": "4"}, "f.jsonl", 1)], Keys("input", None, "reply"), conversations=True)
    assert not named.conversations
