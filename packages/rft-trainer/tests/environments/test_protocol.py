"""Messages and answers of an environment: what is accepted, in which form, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rft_trainer.environments.protocol import (
    Answer,
    AssistantTurn,
    ImageMessageError,
    ToolCall,
    as_answer,
    as_messages,
)

PLAIN, CALLING = AssistantTurn("x"), AssistantTurn("x", (ToolCall("f", {}),))


def test_texts_get_the_role_and_messages_stay_what_they_are() -> None:
    given = ["a", {"role": "system", "content": "b", "name": "c"}]
    found = as_messages(given, "user")
    assert found == [{"role": "user", "content": "a"}, given[1]]
    assert found[1] is not given[1]
    assert as_messages(tuple(given), "tool")[0]["role"] == "tool"
    assert as_messages(None, "user") == as_messages([], "user") == []


@pytest.mark.parametrize(
    "given", ["text", {"role": "user"}, 3, [3], [None], [{"content": "a"}], [{"role": "user", "content": 3}], [{}]]
)
def test_what_is_no_list_of_messages_is_refused(given: Any) -> None:
    with pytest.raises(TypeError) as caught:
        as_messages(given, "user")
    assert not isinstance(caught.value, ImageMessageError)


@pytest.mark.parametrize("kind", ["image", "image_url"])
def test_an_image_in_a_message_is_refused_by_a_kind_of_its_own(kind: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": kind}]
    with pytest.raises(ImageMessageError):
        as_messages([{"role": "user", "content": parts}], "user")
    with pytest.raises(TypeError) as caught:
        as_messages([{"role": "user", "content": [*parts[:1], "image"]}], "user")
    assert not isinstance(caught.value, ImageMessageError), "a list of text is another mistake"


def test_an_answer_is_made_of_numbers_and_dictionaries() -> None:
    parts: Any = {"a": 1, 3: 2}
    found = as_answer(Answer(["m"], 1, 1, parts), CALLING)  # type: ignore[arg-type]
    assert found == Answer([{"role": "tool", "content": "m"}], 1.0, True, {"a": 1.0, "3": 2.0})
    assert (type(found.reward), type(found.done), type(found.parts["a"])) == (float, bool, float)
    assert as_answer(Answer(["m"]), PLAIN) == Answer([{"role": "user", "content": "m"}], 0.0, False, {})


@pytest.mark.parametrize(
    "answer",
    [Answer(reward=float("inf")), Answer(reward=float("nan")), Answer(parts={"a": 0.0, "b": float("-inf")})],
)
def test_a_number_that_is_not_finite_is_refused(answer: Answer) -> None:
    with pytest.raises(ValueError, match="finite"):
        as_answer(answer, PLAIN)


@pytest.mark.parametrize("answer", [None, 1.0, ([], 1.0), {"reward": 1.0}])
def test_what_is_no_answer_is_refused(answer: object) -> None:
    with pytest.raises(TypeError):
        as_answer(answer, PLAIN)
