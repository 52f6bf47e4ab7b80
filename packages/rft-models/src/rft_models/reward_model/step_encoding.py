"""Prompt and steps as the tokens that a step reward model reads, in its training and wherever it scores.

Prompt, steps and separators are encoded each by itself and joined, as TRL's PRMTrainer does: so the tokens that end a
step are known, and no merge across a border makes the same step other tokens in another response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rft_core.errors import DataError
from rft_models.reward_model.spec import StepSpec
from rft_models.reward_model.text import Messages
from rft_models.tokenization.tokenizer import HfTokenizer


@dataclass(frozen=True, slots=True)
class StepText:
    """A prompt with the steps of a response.

    Example: `StepText((5, 6, 7, 2, 8, 2), 2, (3, 5))`: a prompt of two tokens, and two steps that end with token 2.
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    ends: tuple[int, ...]
    """Index of the last token of each step, which is its separator's."""


def split_steps(response: str, separator: str) -> list[tuple[str, int]]:
    """Divide a response into (step, characters up to its end with the separator); what is blank is no step.

    Example: `split_steps("a\\n\\nb", "\\n")` is `[("a", 2), ("b", 4)]`.
    """
    steps: list[tuple[str, int]] = []
    begin = 0
    for part in response.split(separator):
        behind = begin + len(part) + len(separator)
        if part.strip():
            steps.append((part, min(behind, len(response))))
        begin = behind
    return steps


class StepTextEncoder:
    """Encoder of prompts with steps with a reward model's own tokenizer and chat template.

    Where the tokenizer has a template, the prompt is a conversation and the steps are the assistant's next turn;
    elsewhere, and for a token classifier, the prompt is a text. Each step has its separator behind it, and nothing
    stands behind the last one.
    """

    def __init__(self, tokenizer: HfTokenizer, steps: StepSpec) -> None:
        """Encode the separator.

        Raises:
            DataError: the tokenizer has no token for it.
        """
        self.tokenizer = tokenizer
        self.separator = steps.separator
        self._separator_ids = _separator_ids(tokenizer, steps.separator)
        self._is_plain = steps.is_of_token_classifier

    def encode(self, prompt: str, messages: Messages, steps: Sequence[str]) -> StepText:
        """Encode a prompt and its steps, whose texts hold no separator.

        Args:
            prompt: the prompt as text, used where the tokenizer has no chat template.
            messages: the prompt as a conversation; empty for a prompt that is plain text.
            steps: at least one.

        Raises:
            DataError: tokenizer or template cannot take a text.
        """
        ids = self._prompt(prompt, messages)
        prompt_length = len(ids)
        ends: list[int] = []
        for step in steps:
            ids += [*self.tokenizer.encode(step), *self._separator_ids]
            ends.append(len(ids) - 1)
        return StepText(tuple(ids), prompt_length, tuple(ends))

    def _prompt(self, prompt: str, messages: Messages) -> list[int]:
        if self._is_plain:
            return self._plain_prompt(prompt, messages)
        if self.tokenizer.has_chat_template:
            turns = list(messages) or [{"role": "user", "content": prompt}]
            return self.tokenizer.encode(self.tokenizer.render_chat(turns, add_generation_prompt=True))
        ids = self.tokenizer.encode(prompt, add_special_tokens=True)
        # some tokenizers end every text; here the steps are still to come
        return ids[:-1] if ids and ids[-1] in self.tokenizer.eos_ids else ids

    def _plain_prompt(self, prompt: str, messages: Messages) -> list[int]:
        """Encode a prompt as TRL does: its text alone, behind the begin token where the tokenizer has one."""
        # what was asked, without the template in which a policy saw it
        text = "\n".join(str(turn.get("content", "")) for turn in messages) if messages else prompt
        begin = self.tokenizer.hf_tokenizer.bos_token_id
        return [*([] if begin is None else [int(begin)]), *self.tokenizer.encode(text)]


def _separator_ids(tokenizer: HfTokenizer, separator: str) -> list[int]:
    try:
        ids = tokenizer.encode(separator)
        why = "" if ids else "it encodes to no token"
    except DataError as error:
        ids, why = [], error.problem.what
    if ids:
        return ids
    raise DataError(
        code="models.step_separator",
        what=f"the tokenizer cannot encode the separator of steps {separator!r}: {why}",
        where="--step_separator",
        why="the score of a step is read at the last token of its separator",
        do="--step_separator TEXT, a text that the tokenizer has tokens for",
    )
