"""Forms of rows in which published data sets come: which of their columns are prompt, label and response.

A form is taken where the rows lack the column that the settings name by default; a column that is named is taken as it
is. GSM8K has question and answer, MATH problem and solution, AIME Problem and Answer, GPQA, MMLU and ARC questions with
choices (`choices`), Alpaca instruction, input and output, ShareGPT conversations of from and value, chats messages of
role and content, preference sets prompt, chosen and rejected, rows written by hand prompt and answer or response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rft_core.errors import DataError
from rft_trainer.data.choices import LETTER, QUESTION, keyed_choices, lettered_choices, listed_choices
from rft_trainer.data.readers.rows import Row, SkipLog, shown, wrong_type
from rft_trainer.settings.data import DataSettings, SftDataSettings

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
    "system": "system",
    "developer": "developer",
}
"""Names of speakers in data sets, and the roles that chat templates have for them."""
_PROMPT, _REPLY = "{} (prompt)", "{} (reply)"


@dataclass(frozen=True, slots=True)
class Keys:
    """The columns of prompt, label and response; None where a command does not read one."""

    input: str
    label: str | None = None
    output: str | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """A form of rows."""

    columns: tuple[str, ...]
    """Columns by which it is known."""
    input: str
    label: str | None
    output: str
    used: tuple[str, ...]
    """Columns that it reads, of those that may be there."""
    convert: Callable[[Row], dict[str, Any]] | None = None
    """Makes the columns of prompt and reply from others; None where they stand in the row."""
    turns: tuple[str, str, str] | None = None
    """Column, speaker and words of a chat's turns; None for other forms."""


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Rows with the columns to read, and a sentence on them where they were found by their form."""

    rows: Sequence[Row]
    keys: Keys
    note: str = ""
    conversations: bool = False
    """Whether the rows are whole conversations, some turns of which are learned."""


def as_read(
    rows: Sequence[Row],
    keys: Keys,
    skips: SkipLog | None = None,
    *,
    conversations: bool = False,
    images: str = "",
    present: Sequence[str] | None = None,
) -> ReadRows:
    """Return the rows as the columns of their form say; as they are where they have the columns that are asked for.

    With `conversations` chats without a column of responses stay whole: their turns are learned. `images` is the column
    of images that is read beside them, and `present` the columns of the source's first row; None = `rows` begin there.

    Raises:
        DataError: a row lacks a turn or a text that its form needs.
    """
    if present is None:
        present = list(rows[0].fields) if rows else []
    form = _form_of(present) if keys.input == _DEFAULT.input else None
    # a column of responses that is named is read, and one that is there by the default name too
    has_response = keys.output is None or keys.output != _DEFAULT.output or keys.output in present
    if conversations and not has_response:
        if form is not None and form.turns is not None:
            return _as_conversations(rows, form.turns, present, skips or SkipLog())
        if form is None and _ends_with_reply(rows, keys.input):
            return ReadRows(rows, Keys(keys.input), conversations=True)
    if form is None:
        return ReadRows(rows, keys)
    found = Keys(
        form.input,
        _chosen(keys.label, _DEFAULT.label, present, form.label),
        _chosen(keys.output, _DEFAULT.output, present, form.output),
    )
    return ReadRows(_converted(rows, form, skips or SkipLog()), found, _note(form, found, keys, present, images))


def _as_conversations(
    rows: Sequence[Row], turns: tuple[str, str, str], present: Sequence[str], skips: SkipLog
) -> ReadRows:
    """Return the rows with their chats as messages of role and content."""
    column = turns[0]
    converted: list[Row] = []
    for row in rows:
        try:
            converted.append(replace(row, fields={**row.fields, column: turns_of(row.fields.get(column), row, *turns)}))
        except DataError as error:
            skips.take(error)
    unused = [name for name in present if name != column]
    note = f"{column} is the conversation" + (f"; not used: {', '.join(unused)}" if unused else "")
    return ReadRows(converted, Keys(column), note, conversations=True)


def _ends_with_reply(rows: Sequence[Row], column: str) -> bool:
    """Return true where the first row's column is a list of messages that ends with the assistant's."""
    value = rows[0].fields.get(column) if rows else None
    last = value[-1] if isinstance(value, list | tuple) and value else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def _defaults() -> Keys:
    values = {field.name: field.default for settings in (DataSettings, SftDataSettings) for field in fields(settings)}
    return Keys(str(values["input_key"]), str(values["label_key"]), str(values["output_key"]))


_DEFAULT = _defaults()


def _form_of(present: Sequence[str]) -> Form | None:
    """Return the first form whose columns are there; none where the column of the prompt is, but for Alpaca's."""
    known = [form for form in _FORMS if set(form.columns) <= set(present)]
    if _DEFAULT.input in present:
        known = [form for form in known if _DEFAULT.input in form.used]
    return known[0] if known else None


def _chosen(asked: str | None, default: str | None, present: Sequence[str], of_form: str | None) -> str | None:
    """Return the column to read: the one that is asked for, or by default the form's."""
    if asked is None:
        return None
    return asked if asked != default or asked in present else of_form


def _converted(rows: Sequence[Row], form: Form, skips: SkipLog) -> Sequence[Row]:
    if form.convert is None:
        return rows
    converted: list[Row] = []
    for row in rows:
        try:
            converted.append(replace(row, fields={**row.fields, **form.convert(row)}))
        except DataError as error:
            skips.take(error)
    return converted


def _note(form: Form, found: Keys, asked: Keys, present: Sequence[str], images: str) -> str:
    parts = [("the prompt", found.input)]
    parts += [("the label", found.label)] if asked.label is not None and found.label else []
    parts += [("the response", found.output)] if asked.output is not None and found.output else []
    used = {images, *(column for _, column in parts)} | ({*form.used} if form.convert else set())
    unused = [column for column in present if column not in used]
    text = ", ".join(f"{_words(column, form)} is {part}" for part, column in parts)
    text += "; none is the label, for rewards that need none" if asked.label is not None and not found.label else ""
    return text + (f"; not used: {', '.join(unused)}" if unused else "")


def _words(column: str, form: Form) -> str:
    if form is _ALPACA and column == form.input:
        return "instruction with input"
    if column in (QUESTION, LETTER):
        return "question with choices" if column == QUESTION else "the letter of the right one"
    if form.convert is None or column not in (form.input, form.output):
        return column
    divided = column.rpartition(" (")[0]
    if divided != (form.output if column == form.input else form.input).rpartition(" (")[0]:
        return divided or column
    return f"{divided} up to the last reply" if column == form.input else f"the last reply of {divided}"


def _alpaca(row: Row) -> dict[str, Any]:
    """Join the instruction and what it is about, which many rows lack."""
    instruction, about = _text(row, "instruction"), row.fields.get("input")
    joined = f"{instruction}\n\n{_text(row, 'input')}" if about not in (None, "") else instruction
    return {_PROMPT.format("instruction"): joined}


def _conversation(column: str, speaker: str, said: str) -> Callable[[Row], dict[str, Any]]:
    """Return the function that divides the turns of a column at the last reply."""

    def divided(row: Row) -> dict[str, Any]:
        turns = turns_of(row.fields.get(column), row, column, speaker, said)
        last = max((n for n, turn in enumerate(turns) if turn["role"] == "assistant"), default=None)
        if not last:  # none, or nothing before it
            why = "the turns before the last reply are the prompt"
            raise wrong_type(row, column, f"{len(turns)} turns without a reply to something", why)
        return {_PROMPT.format(column): turns[:last], _REPLY.format(column): turns[last]["content"]}

    return divided


def _preference(row: Row) -> dict[str, Any]:
    """Take the prompt and the better response; both may be conversations, whose last turn is the response."""
    chosen, prompt = row.fields.get("chosen"), row.fields.get("prompt")
    if isinstance(chosen, str):
        if prompt is None:
            why = "rows of texts need a column of their prompts: where they part from their responses cannot be seen"
            raise wrong_type(row, "prompt", "no prompt", why)
        return {_PROMPT.format("prompt"): prompt, _REPLY.format("chosen"): chosen}
    divided = _conversation("chosen", "role", "content")(row)
    asked = prompt if isinstance(prompt, list) and prompt else divided[_PROMPT.format("chosen")]
    return {_PROMPT.format("prompt"): asked, _REPLY.format("chosen"): divided[_REPLY.format("chosen")]}


def turns_of(value: Any, row: Row, column: str, speaker: str, said: str) -> list[dict[str, Any]]:
    """Return the turns of a conversation with the roles that chat templates have.

    Raises:
        DataError: it is no list of turns with `speaker` and `said`, or the role is unknown.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise wrong_type(row, column, shown(value), f"it is a list of turns with {speaker} and {said}")
    turns: list[dict[str, Any]] = []
    for number, turn in enumerate(value):
        field = f"{column}[{number}]"
        if not isinstance(turn, Mapping) or speaker not in turn or not {said, "tool_calls"} & turn.keys():
            raise wrong_type(row, field, shown(turn), f"a turn is an object with {speaker} and {said}")
        role = _ROLES.get(str(turn[speaker]))
        if role is None:
            raise wrong_type(row, f"{field}.{speaker}", shown(turn[speaker]), f"it is one of {', '.join(_ROLES)}")
        others = {name: value for name, value in turn.items() if name not in (speaker, said)}
        turns.append({**others, "role": role, "content": turn.get(said)})
    return turns


def _text(row: Row, column: str) -> str:
    value = row.fields.get(column)
    if not isinstance(value, str):
        raise wrong_type(row, column, f"{type(value).__name__} {shown(value)}", "the field must be text")
    return value


def _chat(column: str, speaker: str, said: str) -> Form:
    reply = _REPLY.format(column)
    divided = _conversation(column, speaker, said)
    return Form((column,), _PROMPT.format(column), reply, reply, (column,), divided, (column, speaker, said))


def _choices(convert: Callable[[Row], dict[str, Any]], *columns: str) -> Form:
    return Form(columns, QUESTION, LETTER, LETTER, columns, convert)


_ALPACA = Form(
    ("instruction", "output"),
    _PROMPT.format("instruction"),
    "output",
    "output",
    ("instruction", "input", "output"),
    _alpaca,
)
_FORMS = (
    _chat("conversations", "from", "value"),
    _chat("messages", "role", "content"),
    _ALPACA,
    # the better response is no answer that another one is compared with
    Form(
        ("chosen", "rejected"),
        _PROMPT.format("prompt"),
        None,
        _REPLY.format("chosen"),
        ("prompt", "chosen"),
        _preference,
    ),
    _choices(keyed_choices, "Question", "Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3))),
    _choices(lettered_choices, "question", "choices", "answerKey"),
    _choices(listed_choices("choices", "answer"), "question", "choices", "answer"),
    _choices(listed_choices("options", "answer_index"), "question", "options", "answer_index"),
    _choices(listed_choices("options", "answer"), "question", "options", "answer"),
    Form(("question", "answer"), "question", "answer", "answer", ("question", "answer")),
    Form(("problem", "solution", "answer"), "problem", "answer", "solution", ("problem", "solution", "answer")),
    Form(("problem", "solution"), "problem", "solution", "solution", ("problem", "solution")),
    Form(("problem", "answer"), "problem", "answer", "answer", ("problem", "answer")),
    Form(("Problem", "Solution", "Answer"), "Problem", "Answer", "Solution", ("Problem", "Solution", "Answer")),
    Form(("Problem", "Answer"), "Problem", "Answer", "Answer", ("Problem", "Answer")),
    Form(("Question", "Answer"), "Question", "Answer", "Answer", ("Question", "Answer")),
    Form(("prompt", "answer"), "prompt", "answer", "answer", ("prompt", "answer")),
    Form(("prompt", "response"), "prompt", "response", "response", ("prompt", "response")),
)
