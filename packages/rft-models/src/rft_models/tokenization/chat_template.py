"""The text that a chat template puts between the turns of a conversation, as tokens.

A policy's turn is never rendered: its tokens stay as they were sampled. What comes between two turns is cut out of
renderings of a short conversation with a mark in the policy's place:

```
<|im_start|>assistant\\nMARK<|im_end|>\\n<|im_start|>user\\nthe observation<|im_end|>\\n<|im_start|>assistant\\n
                           └ sampled ┘└──────────────────── observation ────────────────────────────────────┘
```

This is right where the template only ever adds to what it has written: the rendering of a conversation and one message
more begins with that of the conversation. A template that does otherwise is refused, with the first place that
differs. One difference is known and kept: templates that leave earlier thinking out of a rendering (Qwen3) would make
the policy's own tokens disappear; here they stay in its context.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rft_core.errors import DataError
from rft_models.tokenization.tokenizer import HfTokenizer

Messages = Sequence[Mapping[str, Any]]

_MARK, _SECOND_MARK, _ASKED, _REPLY = "5550001", "5550002", "5550003", "5550004"
"""Digits alone, which every tokenizer and every template leaves as they are."""

_CACHED = 4096


class ChatTurnTemplate:
    """Openings and observations by a tokenizer's chat template.

    A message of the role "tool" becomes the user's, between <tool_response> tags, where the template has no such role;
    special tokens in a message's content, and words that stand for an image, are broken up, so that no tool can end a
    turn, write a turn of another role or leave a placeholder of an absent image. Several threads may use it.
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        """Check the template and read the texts around a turn from it.

        Raises:
            DataError: no chat template, or one that changes what it has written, or whose turns end with no token that
                ends a response.
        """
        self._tokenizer = tokenizer
        self._cache: dict[str, tuple[int, ...]] = {}
        self._one_at_a_time = threading.Lock()
        self._end_texts = [tokenizer.decode([token]) for token in tokenizer.eos_ids]
        words = {*tokenizer.hf_tokenizer.all_special_tokens, *tokenizer.media_words}
        self._special = sorted(words, key=len, reverse=True)
        asked = self._text([_user(_ASKED)], speaks=False)
        speaking = self._text([_user(_ASKED)], speaks=True)
        self._require_prefix(asked, speaking, "the words that open the assistant's turn")
        self._end_of_asked = asked[asked.rindex(_ASKED) + len(_ASKED) :]
        self.has_tool_role = self._takes_tools()
        self.drops_thinking = self._leaves_thinking_out()
        """True where the template would leave the thinking of earlier turns out; here it stays."""
        self._check_growth(speaking, "user")
        if self.has_tool_role:
            self._check_growth(speaking, "tool")
        self.generation_ids = tuple(tokenizer.encode(speaking.removeprefix(asked)))
        """Tokens that open the assistant's turn, with which a rendered prompt ends."""

    def opening(self, messages: Messages) -> tuple[int, ...]:
        """Return the tokens from the end of a prompt's last (user's) message to the policy's turn, `messages` between.

        Raises:
            DataError: the template refuses these messages there.
        """
        if not messages:
            return self.generation_ids
        return self._cached("opening", messages)

    def observation(self, messages: Messages) -> tuple[int, ...]:
        """Return the tokens between the end token of the policy's turn and the start of its next turn.

        Raises:
            DataError: the template refuses these messages there.
        """
        return self._cached("observation", messages)

    def _cached(self, kind: str, messages: Messages) -> tuple[int, ...]:
        key = json.dumps([kind, *map(dict, messages)], sort_keys=True)
        # rendering too: an `HfProcessor` changes the tokenizer's template while it renders
        with self._one_at_a_time:
            tokens = self._cache.get(key)
            if tokens is None:
                text = self.opening_text(messages) if kind == "opening" else self.observation_text(messages)
                if len(self._cache) >= _CACHED:
                    self._cache.clear()
                tokens = self._cache[key] = tuple(self._tokenizer.encode(text))
            return tokens

    def opening_text(self, messages: Messages) -> str:
        """`opening` before it is tokenised."""
        text = self._text([_user(_ASKED), *self._harmless(messages)], speaks=True)
        self._require_prefix(self._text([_user(_ASKED)], speaks=False), text, "the messages that open a conversation")
        return text[text.rindex(_ASKED) + len(_ASKED) + len(self._end_of_asked) :]

    def observation_text(self, messages: Messages) -> str:
        """`observation` before it is tokenised."""
        history = [_user(_ASKED), {"role": "assistant", "content": _MARK}]
        text = self._text([*history, *self._harmless(messages)], speaks=True)
        behind = text[text.rindex(_MARK) + len(_MARK) :]
        return behind[self._end_of_turn(behind) :]

    def _end_of_turn(self, behind: str) -> int:
        """Characters up to the end of the first token that ends a response."""
        ends = [behind.find(end) + len(end) for end in self._end_texts if end and end in behind]
        if not ends:
            raise self._refused(
                f"after the assistant's words it writes {behind[:40]!r}",
                f"a turn is over when one of {self._end_texts} is sampled, but the template writes none of them",
                "put the token that ends a turn into eos_token_id of generation_config.json",
            )
        return min(ends)

    def _harmless(self, messages: Messages) -> list[dict[str, Any]]:
        kept: list[dict[str, Any]] = []
        for message in messages:
            content = str(message["content"])
            for token in self._special:
                content = content.replace(token, f"{token[0]} {token[1:]}")
            role = message["role"]
            if role == "tool" and not self.has_tool_role:
                role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
                # results of several tools become one message: many templates refuse two of the user in a row
                if kept and kept[-1]["role"] == "user":
                    kept[-1]["content"] += f"\n{content}"
                    continue
            kept.append({**message, "role": role, "content": content})
        return kept

    def _takes_tools(self) -> bool:
        """Return true where the template renders a tool's message behind a plain turn, with its content."""
        history = [_user(_ASKED), {"role": "assistant", "content": _MARK}]
        try:
            text = self._text([*history, {"role": "tool", "content": _REPLY}], speaks=True)
        except DataError:
            return False
        return _REPLY in text and text != self._as_assistant(history)

    def _as_assistant(self, history: Messages) -> str:
        """Render the message as the assistant's, which a template without the tool role may do with it."""
        try:
            return self._text([*history, {"role": "assistant", "content": _REPLY}], speaks=True)
        except DataError:
            return ""

    def _leaves_thinking_out(self) -> bool:
        thought = f"<think>\n{_SECOND_MARK}\n</think>\n\n{_MARK}"
        messages = [_user(_ASKED), {"role": "assistant", "content": thought}, _user(_REPLY)]
        return _SECOND_MARK not in self._text(messages, speaks=True)

    def _check_growth(self, speaking: str, role: str) -> None:
        """Check on two turns and two observations that each rendering begins with the one before it."""
        first = [_user(_ASKED), {"role": "assistant", "content": _MARK}, {"role": role, "content": _REPLY}]
        one = self._text(first, speaks=True)
        index = one.find(_MARK, len(speaking)) if one.startswith(speaking) else -1
        # a template may put white space before a turn's words, and nothing else
        if index < 0 or one[len(speaking) : index].strip():
            self._require_prefix(speaking + _MARK, one, "the assistant's first turn")
        second = [{"role": "assistant", "content": _SECOND_MARK}, {"role": role, "content": _REPLY}]
        two = self._text([*first, *second], speaks=True)
        index = two.find(_SECOND_MARK, len(one)) if two.startswith(one) else -1
        if index < 0 or two[len(one) : index].strip():
            self._require_prefix(one + _SECOND_MARK, two, "the assistant's second turn")
        self._end_of_turn(one[one.rindex(_MARK) + len(_MARK) :])

    def _require_prefix(self, before: str, after: str, added: str) -> None:
        if after.startswith(before):
            return
        index = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
        raise self._refused(
            f"with {added} added it writes {after[index : index + 24]!r} at character {index}, "
            f"where it had written {before[index : index + 24]!r}",
            "turns are appended to one another as tokens, so a template may only add to what it has written",
            "put a template that keeps earlier turns as they are into chat_template.jinja of the model's directory",
        )

    def _text(self, messages: Messages, *, speaks: bool) -> str:
        return self._tokenizer.render_chat(messages, add_generation_prompt=speaks)

    def _refused(self, what: str, why: str, do: str) -> DataError:
        return DataError(
            code="text.chat_turns",
            what=f"the chat template cannot be used for conversations: {what}",
            where=self._tokenizer.where,
            why=why,
            state="nothing was sampled",
            do=do,
        )


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
