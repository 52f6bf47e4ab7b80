"""The one builder of prompts: training, reinforcement learning, evaluation and serving ask it and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rft_genrec.catalogue.records import SemanticIds

Template = Literal["tokens", "instruction", "chat"]

_INSTRUCTION = (
    "Below is an instruction that describes a task, paired with an input.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{content}\n\n### Response:\n"
)


@dataclass(frozen=True, slots=True)
class PromptQuestion:
    """Words in which a prompt asks for something."""

    short: str
    """Words behind the content in the template `tokens`; empty = the content alone."""
    instruction: str
    """The instruction of the other templates."""


NEXT_ID = PromptQuestion("", "These are the items that a person took, oldest first. Write the next item.")


class PromptTokenizer(Protocol):
    """Protocol of the tokenizer that turns a prompt into tokens."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode `text` to token ids."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Render a conversation as one text with the tokenizer's own template."""
        ...


@dataclass(frozen=True)
class PromptBuilder:
    """Texts of histories and of next items.

    Example: with IDs `<a_0><b_1>` and `<a_2><b_0>`, `prompt([0, 1])` is `<a_0><b_1><a_2><b_0>`.
    """

    ids: SemanticIds
    max_history: int = 10
    """Newest items of a history that a prompt holds; 0 = all."""
    template: Template = "tokens"
    """tokens = the IDs alone; instruction = an instruction, the IDs, and the head of a response, as plain text; chat =
    the same as a message of a user, in the chat template of the model."""

    def newest(self, history: Sequence[int]) -> Sequence[int]:
        """Return the items of a history that a prompt holds."""
        return history[-self.max_history :] if self.max_history else history

    def prompt(self, history: Sequence[int]) -> str:
        """Return the prompt after which the model writes the next item; with `chat` the message of the user."""
        return self.ask(NEXT_ID, self.history_text(history))

    def history_text(self, history: Sequence[int]) -> str:
        """Return the IDs of the newest items of a history."""
        separator = "" if self.template == "tokens" else ", "
        return separator.join(self.ids.text(item) for item in self.newest(history))

    def ask(self, question: PromptQuestion, content: str) -> str:
        """Return a question about a content in the form of the template."""
        if self.template == "tokens":
            return f"{content}\n{question.short} " if question.short else content
        if self.template == "instruction":
            return _INSTRUCTION.format(instruction=question.instruction, content=content)
        return f"{question.instruction}\n{content}"

    def response(self, item: int) -> str:
        """Return what the model writes for an item."""
        return self.ids.text(item)

    def token_ids(self, tokenizer: PromptTokenizer, history: Sequence[int]) -> list[int]:
        """Return the tokens of the prompt, exactly as training has them."""
        text = self.prompt(history)
        if self.template != "chat":
            return tokenizer.encode(text, add_special_tokens=True)
        messages = [{"role": "user", "content": text}]
        return tokenizer.encode(tokenizer.render_chat(messages, add_generation_prompt=True))

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides a prompt: a model is asked with the builder that it was trained with."""
        probe = self.ask(NEXT_ID, "?")
        facts = {"ids": self.ids.digest, "max_history": self.max_history, "template": self.template, "text": probe}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
