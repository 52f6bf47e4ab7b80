"""Which characters of a rendered conversation are learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rft_core.errors import DataError
from rft_trainer.data.turn_masks import TrainedTurns, masked_text

TALK = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]


class Template:
    """One token a character, "$" ends a turn; what it does to a conversation is a function of the test."""

    eos_ids = (ord("$"),)

    def __init__(self, render: Any = None, spans: Any = None) -> None:
        self._render = render or plain
        self.assistant_spans = lambda messages: spans

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        return self._render(messages) + "<assistant>" * add_generation_prompt


def plain(messages: Sequence[Mapping[str, Any]]) -> str:
    """Every turn behind its role, with an end token and a new line behind it."""
    return "".join(f"<{m['role']}>{m['content']}$\n" for m in messages)


def without_ends(messages: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"<{m['role']}>{m['content']}\n" for m in messages)


def without_earlier_thoughts(messages: Sequence[Mapping[str, Any]]) -> str:
    """As Qwen3 does: the last turn of the assistant has a thought in front, earlier ones have none."""
    last = max((n for n, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    last = -1 if any(m["role"] == "user" for m in messages[last + 1 :]) else last
    return "".join(f"<{m['role']}>{'(thought)' if n == last else ''}{m['content']}$\n" for n, m in enumerate(messages))


def learned(template: Template, indices: Sequence[int], messages: Sequence[Mapping[str, Any]] = TALK) -> list[str]:
    masked = masked_text(template, messages, indices, where="row 1")
    assert template.render_chat(messages, add_generation_prompt=False).startswith(masked.text)
    return [piece for piece, is_learned in masked.pieces if is_learned]


def test_a_turn_of_the_assistant_is_its_words_and_its_end_token() -> None:
    assert learned(Template(), [2, 4]) == ["2$", "4$"]
    masked = masked_text(Template(), TALK, [2], where="row 1")
    assert masked.pieces == (("<system>be short$\n<user>1+1?$\n<assistant>", False), ("2$", True))
    assert masked.ends


def test_a_turn_of_another_role_has_its_header() -> None:
    assert learned(Template(), [0, 1, 2]) == ["<system>be short$\n", "<user>1+1?$\n", "2$"]


def test_a_template_without_end_tokens_is_told_apart() -> None:
    masked = masked_text(Template(without_ends), TALK, [2, 4], where="row 1")
    assert [piece for piece, is_learned in masked.pieces if is_learned] == ["2\n", "4\n"]
    assert not masked.ends


def test_marks_of_the_template_are_taken_before_prefixes() -> None:
    text = without_earlier_thoughts(TALK)
    spans = [(text.index("2$"), text.index("2$") + 2), (text.index("(thought)4"), text.index("(thought)4") + 11)]
    assert learned(Template(without_earlier_thoughts, spans), [2, 4]) == ["2$", "(thought)4$"]


def test_marks_that_do_not_belong_to_turns_are_refused() -> None:
    with pytest.raises(DataError, match="marks 1 passages of the assistant, the conversation has 2 of its turns"):
        learned(Template(plain, [(0, 3)]), [2, 4])


def test_a_template_that_changes_earlier_turns_is_refused_with_what_helps() -> None:
    with pytest.raises(DataError, match="turn 3") as caught:
        learned(Template(without_earlier_thoughts), [2, 4])
    problem = caught.value.problem
    assert problem.code == "data.turns_not_located"
    assert "(thought)2" in problem.what
    assert (problem.where, problem.do) == ("row 1", "--train_on_turns last")
    assert learned(Template(without_earlier_thoughts), [4]) == ["(thought)4$"]


def test_without_a_remedy_of_its_own_another_template_is_named() -> None:
    def counted(messages: Sequence[Mapping[str, Any]]) -> str:
        return f"{len(messages)} turns:" + plain(messages)

    with pytest.raises(DataError) as caught:
        learned(Template(counted), [2, 4])
    assert "chat_template.jinja" in caught.value.problem.do


@pytest.mark.parametrize(
    ("turns", "marks", "expected"),
    [
        (TrainedTurns(), [None] * 5, [2, 4]),
        (TrainedTurns(last_only=True), [None] * 5, [4]),
        (TrainedTurns(("user", "assistant")), [None] * 5, [1, 2, 3, 4]),
        (TrainedTurns(), [None, None, False, None, None], [4]),
        (TrainedTurns(), [None, True, None, None, False], [1, 2]),
        (TrainedTurns(last_only=True), [None, None, None, None, False], [2]),
        (TrainedTurns(), [None, None, False, None, False], []),
    ],
)
def test_messages_may_say_themselves_whether_they_are_learned(
    turns: TrainedTurns, marks: list[bool | None], expected: list[int]
) -> None:
    assert turns.of([str(message["role"]) for message in TALK], marks) == expected
