"""Questions with choices, in generated rows of the columns in which GPQA, MMLU, MMLU-Pro and ARC are published."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from rft_core.errors import DataError
from rft_trainer.data.prompts import prompts_from_rows
from rft_trainer.data.readers.rows import Row
from rft_trainer.data.row_forms import Keys, as_read


def gpqa(number: int) -> dict[str, Any]:
    return {
        "Question": f"What is {number} + {number}?\n",
        "Correct Answer": f"{2 * number}",
        **{f"Incorrect Answer {n}": f"{2 * number + n}\n" for n in (1, 2, 3)},
        "Explanation": "It is doubled.",
        "High-level domain": "Arithmetic",
        "Record ID": f"rec{number}",
    }


MMLU = {"question": "2+2?", "subject": "elementary_mathematics", "choices": ["3", "4", "5", "6"], "answer": 1}
MMLU_PRO = {
    **{"question_id": 7, "question": "2+2?", "options": [str(n) for n in range(10)], "answer": "E", "answer_index": 4},
    **{"cot_content": "", "category": "math", "src": "x"},
}
ARC = {
    **{"id": "a", "question": "2+2?", "answerKey": "2"},
    "choices": {"text": ["3", "4", "5"], "label": ["1", "2", "3"]},
}


def read(*fields: dict[str, Any]) -> list[tuple[str | None, str]]:
    rows = [Row(dict(row), "f.jsonl", number) for number, row in enumerate(fields, start=1)]
    found = as_read(rows, Keys("input", "label"))
    keys = {"input_key": found.keys.input, "label_key": found.keys.label}
    return [(one.text, one.label) for one in prompts_from_rows(found.rows, source="f", **keys)]


@pytest.mark.parametrize(
    ("row", "text", "letter"),
    [
        (MMLU, "2+2?\n\nA. 3\nB. 4\nC. 5\nD. 6", "B"),
        (MMLU_PRO, "2+2?\n\n" + "\n".join(f"{'ABCDEFGHIJ'[n]}. {n}" for n in range(10)), "E"),
        ({**MMLU_PRO, "answer_index": 9}, "2+2?\n\n" + "\n".join(f"{'ABCDEFGHIJ'[n]}. {n}" for n in range(10)), "J"),
        (ARC, "2+2?\n\nA. 3\nB. 4\nC. 5", "B"),
        ({"question": "2+2?", "options": ["4", "5"], "answer": "a"}, "2+2?\n\nA. 4\nB. 5", "A"),
    ],
)
def test_choices_keep_their_order_and_the_right_one_is_its_letter(row: dict[str, Any], text: str, letter: str) -> None:
    assert read(row) == [(text, letter)]


def test_the_answers_of_gpqa_are_in_a_drawn_order_which_the_other_rows_do_not_change() -> None:
    rows = read(*(gpqa(n) for n in range(200)))
    for number, (text, letter) in enumerate(rows):
        assert text is not None
        question, lines = text.split("\n\n")
        assert question == f"What is {number} + {number}?"
        assert dict(line.split(". ") for line in lines.split("\n"))[letter] == str(2 * number)
        assert sorted(line[3:] for line in lines.split("\n")) == sorted(str(2 * number + n) for n in range(4))
    assert read(*(gpqa(n) for n in range(7, 9))) == rows[7:9]
    # a binomial share of 1/4 of 200: five standard deviations
    assert all(abs(count - 50) < 5 * math.sqrt(200 * 3 / 16) for count in Counter(row[1] for row in rows).values())


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({**gpqa(1), "Correct Answer": " "}, "Correct Answer"),
        ({**gpqa(1), "Incorrect Answer 2": None}, "Incorrect Answer 2"),
        ({**MMLU, "answer": 4}, "answer"),
        ({**MMLU, "answer": "E"}, "answer"),
        ({**MMLU, "answer": True}, "answer"),
        ({**MMLU, "choices": ["4"]}, "choices"),
        ({**MMLU, "choices": "4"}, "choices"),
        ({**ARC, "answerKey": "9"}, "answerKey"),
        ({**ARC, "choices": {"text": ["3"]}}, "choices"),
    ],
)
def test_a_row_without_what_it_needs_is_refused_by_line_and_field(row: dict[str, Any], field: str) -> None:
    with pytest.raises(DataError) as caught:
        read(row)
    assert caught.value.problem.where == f"f.jsonl:1:{field}"
