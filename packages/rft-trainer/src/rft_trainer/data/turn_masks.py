"""Masks of rendered conversations: the turns of chosen roles are learned, located by the chat template.

A template that marks the assistant's words (`{% generation %}`) says itself where they stand. Any other is rendered
again up to each turn: what the rendering with the turn has more than the one before it is the turn.

```
<|im_start|>user\\n1+1?<|im_end|>\\n<|im_start|>assistant\\n2<|im_end|>\\n<|im_start|>user\\n...
└────── before: the turns so far, and the opening ───────┘└ learned ─┘
```

Both renderings must begin the whole one, character by character; a template that changes what it has written is
refused with the first place that differs. A turn of the assistant ends with its end token, as a sampled response does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rft_core.errors import DataError

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
"""First character and the one behind the last."""

_SHOWN = 40


class ChatRenderer(Protocol):
    """The part of a tokenizer that is used here."""

    @property
    def eos_ids(self) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Decode token ids to text."""
        ...

    def render_chat(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """Render a conversation as one text."""
        ...

    def assistant_spans(self, messages: Messages) -> Sequence[Span] | None:
        """Return the marked characters of each turn of the assistant; None where the template marks nothing."""
        ...


@dataclass(frozen=True, slots=True)
class TrainedTurns:
    """The turns of a conversation that are learned, where its messages do not say it themselves."""

    roles: tuple[str, ...] = ("assistant",)
    last_only: bool = False
    """Of these turns the last alone."""

    def of(self, roles: Sequence[str], marks: Sequence[bool | None]) -> list[int]:
        """Return the indices of the turns to learn.

        Args:
            roles: of each message.
            marks: what each message says of itself; None = nothing. True adds a turn of any role, false takes one out.
        """
        chosen = [mark if mark is not None else role in self.roles for role, mark in zip(roles, marks, strict=True)]
        indices = [index for index, learned in enumerate(chosen) if learned]
        return indices[-1:] if self.last_only else indices


ASSISTANT_TURNS = TrainedTurns()


@dataclass(frozen=True, slots=True)
class MaskedText:
    """A rendered conversation up to the end of its last learned turn, in pieces that are learned or not."""

    pieces: tuple[tuple[str, bool], ...]
    """(text, learned); their concatenation begins the rendering of the whole conversation."""
    ends: bool
    """Whether the last piece ends with a token that ends a response."""

    @property
    def text(self) -> str:
        """All pieces one after the other."""
        return "".join(piece for piece, _ in self.pieces)


def masked_text(tokenizer: ChatRenderer, messages: Messages, learned: Sequence[int], *, where: str) -> MaskedText:
    """Render a conversation and divide it into what is learned and what is not.

    Args:
        tokenizer: with the chat template of the model.
        messages: the conversation.
        learned: indices of the turns to learn, ascending and at least one.
        where: the row, for errors.

    Raises:
        DataError: the template refuses the conversation, or a turn cannot be told from what stands around it.
    """
    text = tokenizer.render_chat(messages, add_generation_prompt=False)
    marked = tokenizer.assistant_spans(messages)
    of_turn = {} if marked is None else _by_turn(messages, marked, where)
    ends = [end for end in (tokenizer.decode([token]) for token in tokenizer.eos_ids) if end]
    pieces: list[tuple[str, bool]] = []
    done, closed = 0, False
    for index in learned:
        first, behind = of_turn.get(index) or _by_prefix(tokenizer, messages, index, text, where)
        if messages[index]["role"] == "assistant" and index not in of_turn:
            behind = _end_of_turn(text, first, behind, ends)
        if not done <= first < behind <= len(text):
            raise _refused(where, f"turn {index + 1} has no characters of its own in the rendering", len(messages))
        pieces += [(text[done:first], False)] if done < first else []
        pieces.append((text[first:behind], True))
        done, closed = behind, text[:behind].endswith(tuple(ends)) if ends else False
    return MaskedText(tuple(pieces), closed or messages[learned[-1]]["role"] != "assistant")


def _by_turn(messages: Messages, marked: Sequence[Span], where: str) -> dict[int, Span]:
    """Return the marked characters by the index of the turn."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if len(turns) != len(marked):
        raise _refused(
            where,
            f"it marks {len(marked)} passages of the assistant, the conversation has {len(turns)} of its turns",
            len(messages),
        )
    return dict(zip(turns, marked, strict=True))


def _by_prefix(tokenizer: ChatRenderer, messages: Messages, index: int, text: str, where: str) -> Span:
    speaks = messages[index]["role"] == "assistant"
    before = tokenizer.render_chat(messages[:index], add_generation_prompt=speaks) if index else ""
    after = tokenizer.render_chat(messages[: index + 1], add_generation_prompt=False)
    for part, words in ((before, "the turns before it"), (after, "the turns up to it")):
        if not text.startswith(part):
            raise _rewritten(tokenizer, messages, index, part, text, words, where)
    return len(before), len(after)


def _end_of_turn(text: str, first: int, behind: int, ends: Sequence[str]) -> int:
    """Return the place behind the last token in the turn that ends a response; its end where there is none."""
    found = [text.rfind(end, first, behind) + len(end) for end in ends if text.rfind(end, first, behind) >= 0]
    return max(found, default=behind)


def _rewritten(
    tokenizer: ChatRenderer, messages: Messages, index: int, part: str, text: str, words: str, where: str
) -> DataError:
    at = next((i for i, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), min(len(part), len(text)))
    what = (
        f"turn {index + 1} ({messages[index]['role']}) cannot be located: {words} are rendered as "
        f"{part[at : at + _SHOWN]!r} at character {at}, and in the whole conversation as {text[at : at + _SHOWN]!r}"
    )
    return _refused(where, what, len(messages), do=_remedy(tokenizer, messages, index, text))


def _remedy(tokenizer: ChatRenderer, messages: Messages, index: int, text: str) -> str:
    """Return what was tried and helps: the last turn of the assistant alone, where that can be located."""
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if turns and turns[-1] != index:
        before = tokenizer.render_chat(messages[: turns[-1]], add_generation_prompt=True)
        after = tokenizer.render_chat(messages[: turns[-1] + 1], add_generation_prompt=False)
        if text.startswith(before) and text.startswith(after):
            return "--train_on_turns last"
    return "put a template that keeps earlier turns as they are into chat_template.jinja of the model's directory"


def _refused(where: str, what: str, num: int, *, do: str = "") -> DataError:
    return DataError(
        code="data.turns_not_located",
        what=f"the chat template gives no mask for {num} messages: {what}",
        where=where,
        why="a turn is learned where it stands in the rendered conversation, so its place must be certain",
        do=do or "mark the assistant's words with {% generation %} and {% endgeneration %} in chat_template.jinja",
    )
