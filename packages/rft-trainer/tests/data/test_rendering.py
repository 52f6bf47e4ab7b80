"""The text that the model sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_core.errors import DataError, OptionsError
from rft_trainer.data.images import MARKER, RowImage
from rft_trainer.data.prompts import Message, PromptRow
from rft_trainer.data.rendering import PromptRenderer, fill_template
from rft_trainer.data.turn_masks import TrainedTurns
from rft_trainer.rewards.images import as_text


class CharacterTokenizer:
    """One token a character; a chat template that shows every turn; 1 is the token that begins a text."""

    pad_id = 0
    eos_ids = (2,)
    vocab_size = 0x110000

    def __init__(self, *, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [1] * add_special_tokens + [ord(character) for character in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        turns = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return turns + "<assistant>" * add_generation_prompt

    def assistant_spans(self, messages: Sequence[Mapping[str, str]]) -> None:
        """This template marks nothing."""


def text_row(text: str, index: int = 0) -> PromptRow:
    return PromptRow(f"s:{index}", text, None, "7", "out", "s", index)


def chat_row(*turns: tuple[str, str]) -> PromptRow:
    return PromptRow("s:0", None, tuple(Message(*turn) for turn in turns), None, None, "s", 0)


def rendered(row: PromptRow, **options: Any) -> str:
    return PromptRenderer(CharacterTokenizer(), **options).render(row).text


def test_plain_text_is_left_as_it_is() -> None:
    prompt = PromptRenderer(CharacterTokenizer()).render(text_row("12+3="))
    assert (prompt.text, prompt.token_ids) == ("12+3=", tuple(map(ord, "12+3=")))
    assert (prompt.prompt_id, prompt.label, prompt.output, prompt.source, prompt.index) == ("s:0", "7", "out", "s", 0)


def test_the_template_puts_the_text_in_its_place() -> None:
    assert rendered(text_row("x"), input_template="Q: {}\nA:") == "Q: x\nA:"
    assert rendered(text_row("x"), input_template=r"{input} in \boxed{} or {0}") == r"x in \boxed{} or {0}"


@given(st.text(), st.text().filter(lambda t: "{input}" not in t), st.text().filter(lambda t: "{input}" not in t))
def test_the_text_survives_any_template(text: str, before: str, after: str) -> None:
    template = before + "{input}" + after
    if template.count("{input}") == 1:
        assert fill_template(template, text) == before + text + after


@pytest.mark.parametrize("template", ["Q:", "{} {}", "{input} {input}", "", "{ }", "{question}"])
def test_a_template_without_one_clear_place_is_refused(template: str) -> None:
    with pytest.raises(OptionsError) as caught:
        PromptRenderer(CharacterTokenizer(), input_template=template)
    assert caught.value.problem.code == "prompt.input_template"


def test_the_chat_template_gets_the_system_prompt_and_the_filled_template() -> None:
    options = {"apply_chat_template": True, "system_prompt": "Be short.", "input_template": "Q: {}"}
    assert rendered(text_row("x"), **options) == "<system>Be short.<user>Q: x<assistant>"
    assert rendered(text_row("x"), apply_chat_template=True) == "<user>x<assistant>"


def test_a_system_prompt_takes_the_place_of_the_one_in_the_data() -> None:
    row = chat_row(("system", "old"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    assert rendered(row, apply_chat_template=True) == "<system>old<user>a<assistant>b<user>c<assistant>"
    with_new = rendered(row, apply_chat_template=True, system_prompt="new")
    assert with_new == "<system>new<user>a<assistant>b<user>c<assistant>"


def test_special_tokens_are_added_to_plain_text_only() -> None:
    tokenizer = CharacterTokenizer()
    assert PromptRenderer(tokenizer, add_special_tokens=True).render(text_row("x")).token_ids == (1, ord("x"))
    chat = PromptRenderer(tokenizer, add_special_tokens=True, apply_chat_template=True).render(text_row("x"))
    assert chat.token_ids == tuple(map(ord, "<user>x<assistant>"))


def test_a_setting_that_would_have_no_effect_is_refused() -> None:
    with pytest.raises(OptionsError) as caught:
        PromptRenderer(CharacterTokenizer(), system_prompt="x")
    assert caught.value.problem.code == "prompt.system_without_chat"
    assert caught.value.problem.what == "system_prompt = 'x', apply_chat_template = False"
    with pytest.raises(OptionsError) as caught:
        PromptRenderer(CharacterTokenizer(has_chat_template=False), apply_chat_template=True)
    assert caught.value.problem.code == "prompt.no_chat_template"
    with pytest.raises(OptionsError) as caught:
        rendered(chat_row(("user", "x")))
    assert caught.value.problem.code == "prompt.messages_without_chat"
    with pytest.raises(OptionsError) as caught:
        rendered(chat_row(("user", "x")), apply_chat_template=True, input_template="{}")
    assert caught.value.problem.code == "prompt.template_with_messages"


def test_a_prompt_without_tokens_is_an_error() -> None:
    tokenizer = CharacterTokenizer()
    tokenizer.encode = lambda text, add_special_tokens=False: []  # type: ignore[method-assign]
    with pytest.raises(DataError) as caught:
        PromptRenderer(tokenizer).render(text_row("x"))
    assert caught.value.problem.where == "s:0"


def conversation(row: PromptRow, **options: Any) -> list[tuple[str, Any]]:
    """(role, content) of the conversation that the text renders."""
    renderer = PromptRenderer(CharacterTokenizer(), **options)
    messages = renderer.render(row).messages
    assert messages == renderer.messages(row)
    return [(message["role"], message["content"]) for message in messages]


def test_a_prompt_carries_the_conversation_that_its_text_renders() -> None:
    chat = {"apply_chat_template": True}
    assert conversation(text_row("x")) == []
    assert conversation(text_row("x"), input_template="Q: {}", **chat) == [("user", "Q: x")]
    turns = (("system", "old"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    assert conversation(chat_row(*turns), **chat) == list(turns)
    assert conversation(chat_row(*turns), system_prompt="new", **chat) == [("system", "new"), *turns[1:]]


def test_images_without_a_place_stand_in_front_and_others_where_the_text_has_them() -> None:
    images = tuple(RowImage(f"s:0:image[{number}]", "digest") for number in range(2))
    for text, expected in (
        ("x", "<image><image>x"),
        ("<image>x<image>", "<image>x<image>"),
        ("", "<image><image>"),
    ):
        row = replace(text_row(text), images=images)
        assert rendered(row, input_template="Q: {}") == f"Q: {expected}"
        assert conversation(row, apply_chat_template=True)[0][0] == "user"
    assert rendered(text_row("x<image>")) == "x<image>", "a text alone is left as it is"


def test_images_of_a_conversation_without_places_stand_in_its_last_turn() -> None:
    images = (RowImage("s:0:image[0]", "digest"),)
    without = replace(chat_row(("user", "a"), ("assistant", "b"), ("user", "c")), images=images)
    with_place = replace(chat_row(("user", "a <image>"), ("assistant", "b"), ("user", "c")), images=images)
    shown = [
        [as_text(content) for _, content in conversation(row, apply_chat_template=True)]
        for row in (without, with_place)
    ]
    assert shown == [["a", "b", "<image>c"], ["a <image>", "b", "c"]]
    text_alone = conversation(chat_row(("user", "a"), ("user", "c")), apply_chat_template=True)
    assert text_alone == [("user", "a"), ("user", "c")]


def whole(*turns: tuple[str, str], marks: Mapping[int, bool] | None = None, **options: Any) -> PromptRow:
    messages = tuple(Message(*turn, learned=(marks or {}).get(n)) for n, turn in enumerate(turns))
    return replace(chat_row(*turns), messages=messages, is_conversation=True, **options)


TALK = (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"))


def learned_text(row: PromptRow, **options: Any) -> tuple[str, str]:
    """(text, its learned characters) of a conversation."""
    tokenizer = CharacterTokenizer()
    found = PromptRenderer(tokenizer, apply_chat_template=True, **options).render(row)
    assert len(found.learned) == len(found.token_ids)
    kept = [token for token, is_learned in zip(found.token_ids, found.learned, strict=True) if is_learned]
    return tokenizer.decode(found.token_ids), tokenizer.decode(kept)


def test_a_conversation_is_rendered_up_to_its_last_learned_turn() -> None:
    # this template writes no end token: the last learned turn gets the model's
    assert learned_text(whole(*TALK)) == ("<user>a<assistant>b<user>c<assistant>d\x02", "bd\x02")
    text, learned = learned_text(whole(*TALK, marks={3: False}))
    assert (text, learned) == ("<user>a<assistant>b\x02", "b\x02")
    _, learned = learned_text(whole(*TALK), turns=TrainedTurns(last_only=True))
    assert learned == "d\x02"
    text, learned = learned_text(whole(*TALK), turns=TrainedTurns(("user",)), system_prompt="s")
    assert (text[:9], learned) == ("<system>s", "<user>a<user>c<user>e")


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (whole(("user", "a"), ("user", "b")), "none of the 2 turns is learned"),
        (whole(*TALK, marks={1: False, 3: False}), "none of the 5 turns is learned"),
        (whole(*TALK[1:]), "begins with a turn of the assistant"),
        (
            whole(("user", "a"), ("assistant", "b"), ("user", MARKER), images=(RowImage(b"", "f:1:x", "d"),)),
            "an image stands behind",
        ),
    ],
)
def test_a_conversation_with_nothing_to_learn_is_refused(row: PromptRow, what: str) -> None:
    with pytest.raises(DataError, match=what) as caught:
        learned_text(row)
    assert caught.value.problem.where == "s:0"


class AllAtOnce(CharacterTokenizer):
    """Counts its calls for many texts; has no token for a letter x."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.calls = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        if "x" in text:
            raise DataError(code="c", what=text, where="w", why="y", do="d")
        return super().encode(text, add_special_tokens)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        self.calls += 1
        return [self.encode(text, add_special_tokens) for text in texts]


@pytest.mark.parametrize("special", [False, True])
def test_many_rows_are_rendered_as_one_by_one_with_one_call(special: bool) -> None:
    tokenizer = AllAtOnce()
    renderer = PromptRenderer(tokenizer, input_template="Q: {}", add_special_tokens=special)  # type: ignore[arg-type]
    rows = [text_row(f"{n}+1=", n) for n in range(5)]
    assert renderer.render_all(rows) == [renderer.render(row) for row in rows]
    assert tokenizer.calls == 1
    assert renderer.render_all([]) == []
    talk = [*rows, chat_row(("user", "a"), ("assistant", "b"))]
    learned = PromptRenderer(tokenizer, apply_chat_template=True)  # type: ignore[arg-type]
    assert learned.render_all(talk) == [learned.render(row) for row in talk]


def test_of_many_rows_the_first_that_cannot_be_rendered_is_named() -> None:
    renderer = PromptRenderer(AllAtOnce())  # type: ignore[arg-type]
    with pytest.raises(DataError, match="second x"):
        renderer.render_all([text_row("first"), text_row("second x"), text_row(""), text_row("x")])
    with pytest.raises(DataError) as caught:
        renderer.render_all([text_row("first"), text_row("", 3)])
    assert (caught.value.problem.code, caught.value.problem.where) == ("prompt.no_tokens", "s:3")
