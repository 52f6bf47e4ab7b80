"""The conventions in which preference data come."""

from __future__ import annotations

from typing import Any

import pytest

from rft_core.errors import DataError
from rft_trainer.data.preference_rows.preference_columns import PreferenceKeys
from rft_trainer.data.preference_rows.preferences import pairs_from_rows
from rft_trainer.data.readers.rows import Row

USER = {"role": "user", "content": "1+1?"}
GOOD, BAD = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}
MORE = [USER, GOOD, {"role": "user", "content": "2+2?"}]
HUMAN = "\n\nHuman: 1+1?\n\nAssistant: 2\n\nHuman: 2+2?\n\nAssistant:"


def divided(fields: dict[str, Any], *, chat: bool = False, keys: PreferenceKeys | None = None) -> tuple[Any, str, str]:
    """(prompt, chosen, rejected) of a row."""
    found = (keys or PreferenceKeys()).found_in(list(fields))
    (pair,) = pairs_from_rows([Row(fields, "f.jsonl", 1)], source="f", keys=found, chat=chat)
    prompt = pair.prompt
    asked = prompt.text if prompt.messages is None else [message.as_dict() for message in prompt.messages]
    return asked, pair.chosen, pair.rejected


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "1+1?", "chosen": "2", "rejected": "3"}, "1+1?"),
        ({"input": "1+1?", "chosen": "2", "rejected": "3"}, "1+1?"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, [USER]),
        ({"prompt": [USER], "chosen": "2", "rejected": "3"}, [USER]),
        ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
        ({"chosen": [*MORE, GOOD], "rejected": [*MORE, BAD]}, MORE),
        # UltraFeedback: a text, and conversations that begin with it
        ({"prompt": "1+1?", "chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 8.0}, [USER]),
        ({"question": "1+1?", "response_chosen": "2", "response_rejected": "3"}, "1+1?"),
        ({"question": "1+1?", "response_j": "2", "response_k": "3"}, "1+1?"),
        ({"prompt": "1+1?", "chosen_response": "2", "rejected_response": "3"}, "1+1?"),
        ({"instruction": "Add", "input": "1, 1", "chosen": "2", "rejected": "3"}, "Add\n\n1, 1"),
        ({"instruction": "Add", "input": "", "chosen": "2", "rejected": "3"}, "Add"),
        (
            {
                "conversations": [{"from": "human", "value": "1+1?"}],
                "chosen": {"from": "gpt", "value": "2"},
                "rejected": {"from": "gpt", "value": "3"},
            },
            [USER],
        ),
        ({"input": {"messages": [USER]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}, [USER]),
    ],
)
def test_each_convention_is_read(row: dict[str, Any], prompt: object) -> None:
    assert divided(row) == (prompt, "2", "3")


def test_texts_without_a_prompt_part_between_two_words() -> None:
    row = {"chosen": "The sky is blue.", "rejected": "The sky is blurry."}
    assert divided(row) == ("The sky is", " blue.", " blurry.")
    assert divided({"chosen": "Say:\nyes", "rejected": "Say:\nno"}) == ("Say:\n", "yes", "no")


def test_turns_of_hh_rlhf_stay_text_or_become_messages() -> None:
    row = {"chosen": f"{HUMAN} 4, of course", "rejected": f"{HUMAN} 4 or 5"}
    assert divided(row) == (HUMAN, " 4, of course", " 4 or 5")
    assert divided(row, chat=True) == (MORE, "4, of course", "4 or 5")


def test_the_parts_of_a_response_are_joined() -> None:
    parts = {"role": "assistant", "content": [{"type": "text", "text": "2"}]}
    assert divided({"prompt": [USER], "chosen": [parts], "rejected": [BAD]}) == ([USER], "2", "3")


def test_a_column_that_is_named_is_read() -> None:
    keys = PreferenceKeys(prompt="q", chosen="a", rejected="b")
    assert divided({"prompt": "no", "q": "yes", "a": "2", "b": "3"}, keys=keys) == ("yes", "2", "3")


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"chosen": "blue", "rejected": "blurry"}, "do not begin alike"),
        ({"chosen": [USER, GOOD], "rejected": [GOOD, USER, BAD]}, "differ before the last"),
        ({"prompt": [USER], "chosen": [*MORE, GOOD], "rejected": [*MORE, BAD]}, "not those of the prompt's column"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "one turn, and no column of the prompt"),
        ({"prompt": "a", "chosen": [USER], "rejected": [BAD]}, "turns that end with user"),
        ({"prompt": "a", "chosen": ["x"], "rejected": ["y"]}, "'x'"),
    ],
)
def test_rows_that_cannot_be_divided_are_refused(row: dict[str, Any], what: str) -> None:
    with pytest.raises(DataError) as raised:
        divided(row)
    assert what in raised.value.problem.what
    assert raised.value.problem.where.startswith("f.jsonl:1:")
