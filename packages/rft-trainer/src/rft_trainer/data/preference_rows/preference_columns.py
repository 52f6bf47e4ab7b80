"""Columns of preference data: which of them are prompt, better and worse response, and how a row is divided.

Rows come in these conventions, of which TRL's are the first four:

    explicit          prompt, chosen, rejected; each a text or a list of messages
    implicit          chosen, rejected alone, which begin alike: with the same messages or with the same text
    labelled          prompt, completion, label (true or false): responses that are not compared
    stepwise          prompt, completions, labels: the steps of a response, each with a label
    UltraFeedback     prompt as text, and conversations in chosen and rejected
    hh-rlhf           texts in chosen and rejected with turns that begin with "\\n\\nHuman:" and "\\n\\nAssistant:"
    Alpaca            instruction and input are the prompt
    ShareGPT          conversations of from and value, and one such turn in chosen and in rejected
    OpenAI            input.messages, preferred_output, non_preferred_output
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rft_trainer.data.columns import Columns
from rft_trainer.data.readers.rows import Row, shown, wrong_type
from rft_trainer.data.row_forms import turns_of

_PROMPTS = ("prompt", "question", "query", "problem", "instruction", "conversations", "messages", "input.messages")
_CHOSEN = ("response_chosen", "chosen_response", "answer_chosen", "preferred", "preferred_output", "response_j")
_REJECTED = (
    "response_rejected",
    "rejected_response",
    "answer_rejected",
    "dispreferred",
    "non_preferred_output",
    "response_k",
)
_COMPLETIONS = ("response", "output", "answer")
_INSTRUCTION, _ABOUT = "instruction", "input"
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
IMPLICIT = ""
"""Column of the prompt where chosen and rejected begin with it."""

Value = str | list[dict[str, Any]]
"""A text, or turns with role and content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceKeys:
    """Columns of preference pairs; the defaults stand for any of the conventions."""

    prompt: str = "input"
    """The prompt; `IMPLICIT` where the responses begin with it."""
    chosen: str = "chosen"
    rejected: str = "rejected"
    margin: str = ""
    """By how much the chosen response is better; "" = no column."""
    weight: str = ""
    """Weight of the pair; "" = no column."""
    outcomes: tuple[str, ...] = ()
    """Columns that say which response is the better, one a head of a reward model; none = chosen is."""

    def found_in(self, present: Sequence[str]) -> PreferenceKeys:
        """Return the columns to read of rows that have the columns `present`; a name that is given stays."""
        default = PreferenceKeys()
        chosen, rejected = self.chosen, self.rejected
        if (chosen, rejected) == (default.chosen, default.rejected) and not {chosen, rejected} & {*present}:
            pairs = zip(_CHOSEN, _REJECTED, strict=True)
            chosen, rejected = next((pair for pair in pairs if {*pair} <= {*present}), (chosen, rejected))
        prompt = _found_prompt(self.prompt, default.prompt, present, IMPLICIT)
        return replace(self, prompt=prompt, chosen=chosen, rejected=rejected)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledKeys:
    """Columns of responses that are labelled good or bad; the defaults stand for any of the conventions."""

    prompt: str = "input"
    completion: str = "completion"
    label: str = "label"
    weight: str = ""
    """Weight of the response; "" = no column."""

    def found_in(self, present: Sequence[str]) -> LabelledKeys:
        """Return the columns to read of rows that have the columns `present`; a name that is given stays."""
        default = LabelledKeys()
        completion = self.completion
        if completion == default.completion and completion not in present:
            completion = next((name for name in _COMPLETIONS if name in present), completion)
        prompt = _found_prompt(self.prompt, default.prompt, present, default.prompt)
        return LabelledKeys(prompt=prompt, completion=completion, label=self.label, weight=self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKeys:
    """Columns of responses whose steps are labelled; the defaults are TRL's."""

    prompt: str = "input"
    steps: str = "completions"
    labels: str = "labels"
    weight: str = ""
    """Weight of the row; "" = no column."""

    def found_in(self, present: Sequence[str]) -> StepKeys:
        """Return the columns to read of rows that have the columns `present`; a name that is given stays."""
        default = StepKeys()
        return replace(self, prompt=_found_prompt(self.prompt, default.prompt, present, default.prompt))


def _found_prompt(asked: str, default: str, present: Sequence[str], without: str) -> str:
    """Return the column of the prompt: the one that is asked for, or by default the first that is known."""
    if asked != default:
        return asked
    if asked in present and _INSTRUCTION not in present and "preferred_output" not in present:
        return asked
    tops = {name for name in _PROMPTS if name.partition(".")[0] in present}
    return next((name for name in _PROMPTS if name in tops), without)


@dataclass(frozen=True, slots=True)
class Divided:
    """A row as prompt and responses."""

    row: Row
    """The row, with the prompt in a column of its own where it was made from others."""
    prompt_key: str
    responses: tuple[str, ...]


def divided(row: Row, prompt_key: str, response_keys: Mapping[str, str], columns: Columns, *, chat: bool) -> Divided:
    """Divide a row into its prompt and the responses to it.

    `response_keys` are settings with the columns that they name. With `chat` the texts of hh-rlhf become messages;
    otherwise they stay as they are, as all texts do.

    Raises:
        DataError: a field is missing or of another kind, a response is empty or no reply, or the prompts differ.
    """
    values = [_value(columns.field(row, key, flag), row, key) for flag, key in response_keys.items()]
    keys = list(response_keys.values())
    prompt = _prompt(row, prompt_key, columns) if prompt_key != IMPLICIT else None
    if all(isinstance(value, str) for value in values):
        texts = [value for value in values if isinstance(value, str)]
        asked, texts = (prompt, texts) if prompt is not None else _split_texts(texts, row, keys, chat)
    else:
        asked, texts = _split_turns(values, prompt, row, keys)
    for key, text in zip(keys, texts, strict=True):
        if not text.strip():
            raise wrong_type(row, key, "an empty response", "a response must have text")
    made = prompt_key in ("", _INSTRUCTION) or not isinstance(asked, str)
    name = f"{prompt_key or keys[0]} (prompt)" if made else prompt_key
    return Divided(Row({**row.fields, name: asked}, row.file, row.line) if made else row, name, tuple(texts))


def _prompt(row: Row, key: str, columns: Columns) -> Value:
    value = _value(columns.field(row, key, "--input_key"), row, key)
    about = row.fields.get(_ABOUT)
    if key == _INSTRUCTION and isinstance(value, str) and isinstance(about, str) and about:
        return f"{value}\n\n{about}"
    return value


def _value(value: Any, row: Row, key: str) -> Value:
    """Return a text, or the turns of a conversation; one turn may stand without a list."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    turns = [value] if isinstance(value, Mapping) else value
    if not isinstance(turns, list | tuple) or not turns:
        raise wrong_type(row, key, shown(value), "the field must be text, or a list of turns")
    first = turns[0]
    names = ("from", "value") if isinstance(first, Mapping) and "from" in first else ("role", "content")
    return turns_of(turns, row, key, *names)


def _split_texts(texts: Sequence[str], row: Row, keys: Sequence[str], chat: bool) -> tuple[Value, list[str]]:
    """Part texts from the prompt that they begin with: at hh-rlhf's last common reply, else between two words."""
    length = next((n for n, characters in enumerate(zip(*texts, strict=False)) if len({*characters}) > 1), None)
    shared = min(texts, key=len)[:length]
    at = shared.rfind(_ASSISTANT)
    is_dialogue = shared.startswith(_HUMAN) and at > 0
    end = at + len(_ASSISTANT) if is_dialogue else max((n + 1 for n, c in enumerate(shared) if c.isspace()), default=0)
    # a response that begins with its space has the tokens that a model writes
    end -= 0 if is_dialogue or not shared[:end].endswith(" ") else 1
    if not shared[:end].strip():
        what = f"no column of the prompt, and the texts of {' and '.join(keys)} do not begin alike"
        raise wrong_type(row, keys[0], what, "without a column of its own the prompt is what both begin with")
    responses = [text[end:] for text in texts]
    if not (is_dialogue and chat):
        return shared[:end], responses
    return _dialogue(shared[:at]), [response.strip() for response in responses]


def _dialogue(text: str) -> list[dict[str, Any]]:
    """Return the turns of a text of hh-rlhf."""
    turns: list[dict[str, Any]] = []
    for part in text.split(_HUMAN)[1:]:
        said, *replies = part.split(_ASSISTANT)
        turns.append({"role": "user", "content": said.strip()})
        turns += [{"role": "assistant", "content": reply.strip()} for reply in replies]
    return turns


def _split_turns(
    values: Sequence[Value], prompt: Value | None, row: Row, keys: Sequence[str]
) -> tuple[Value, list[str]]:
    """Part conversations from their last turns, which are the responses."""
    befores: list[list[dict[str, Any]]] = []
    texts: list[str] = []
    for key, value in zip(keys, values, strict=True):
        turns = [{"role": "assistant", "content": value}] if isinstance(value, str) else value
        if turns[-1]["role"] != "assistant":
            raise wrong_type(row, key, f"turns that end with {turns[-1]['role']}", "the last turn is the response")
        befores.append(turns[:-1])
        texts.append(_content(turns[-1]["content"], row, key))
    if any(before != befores[0] for before in befores):
        what = f"the turns of {' and '.join(keys)} differ before the last"
        raise wrong_type(row, keys[-1], what, "responses are compared that answer the same prompt")
    asked = befores[0]
    if isinstance(prompt, list) and asked and asked != prompt:
        what = f"the turns before the last are not those of the prompt's column, which has {len(prompt)}"
        raise wrong_type(row, keys[0], what, "a response is one turn, and what stands before it is the prompt")
    if not asked and prompt is None:
        raise wrong_type(row, keys[0], "one turn, and no column of the prompt", "a response answers a prompt")
    # a text beside whole conversations repeats their first turn; the conversation has its system message too
    return (asked or prompt or ""), texts


def _content(content: Any, row: Row, key: str) -> str:
    """Return the text of a response; parts of text are joined."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise wrong_type(row, key, shown(content), "a response is text")
    return "".join(text for text in texts if isinstance(text, str))
