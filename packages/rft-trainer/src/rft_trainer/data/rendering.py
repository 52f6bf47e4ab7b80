"""Rendering of prompts to the model's text and token ids, and selection by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rft_core.errors import DataError, OptionsError
from rft_trainer.data.image_placeholders import count_places, put_in_front
from rft_trainer.data.images import MARKER
from rft_trainer.data.media_cache import MediaStore, StoredMedia
from rft_trainer.data.prompts import Message, PromptRow
from rft_trainer.data.readers.rows import shown


class TextCodec(Protocol):
    """Protocol of the tokenizer that a run needs."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def eos_ids(self) -> Sequence[int]: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode `text` to token ids."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Decode token ids to text."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Render a conversation as one text with the tokenizer's own template."""
        ...


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt ready for the engine: `text` is exactly what was turned into `token_ids`."""

    prompt_id: str
    text: str
    token_ids: tuple[int, ...]
    label: str | None
    output: str | None
    source: str
    index: int
    media: StoredMedia | None = None
    """Its images; None without any."""
    messages: tuple[dict[str, Any], ...] = ()
    """The conversation that `text` renders; empty where it is plain text."""


@dataclass(frozen=True, slots=True)
class PromptRenderer:
    """Renderer of prompts: input template, then system prompt and chat template.

    `input_template` holds one placeholder, `{input}` or, where that does not occur, `{}`; all
    other braces stand for themselves, so that LaTeX needs no escapes. A system prompt takes the
    place of one that the data bring. The text of a chat template already holds its special
    tokens, so none are added to it; `add_special_tokens` concerns plain text.

    Raises `OptionsError` at construction for a combination in which a setting has no effect.

    Example: `PromptRenderer(codec, input_template="Q: {}\\nA:").render(prompt).text`
    """

    codec: TextCodec
    input_template: str | None = None
    system_prompt: str | None = None
    apply_chat_template: bool = False
    add_special_tokens: bool = False
    media: MediaStore | None = None
    """Store that prepares images; required for rows with images."""

    def __post_init__(self) -> None:
        if self.input_template is not None:
            check_input_template(self.input_template)
        if self.system_prompt is not None and not self.apply_chat_template:
            raise OptionsError(
                code="prompt.system_without_chat",
                what=f"system_prompt = {shown(self.system_prompt)} without apply_chat_template",
                where="--system_prompt",
                why="a system prompt is a message, and messages become text through the chat template only",
                do="--apply_chat_template",
            )
        if self.apply_chat_template and not self.codec.has_chat_template:
            raise OptionsError(
                code="prompt.no_chat_template",
                what="apply_chat_template is set and the tokenizer has no chat template",
                where="--apply_chat_template",
                why="the text of a conversation is defined by the tokenizer's own template",
                do="--input_template 'Question: {input} Answer:'",
            )

    def render(self, prompt: PromptRow) -> RenderedPrompt:
        """Render text and token ids of one prompt; `DataError` when they are empty."""
        text = self.text(prompt)
        special = self.add_special_tokens and not self.apply_chat_template
        if self.media is None:
            token_ids, media = self.codec.encode(text, add_special_tokens=special), None
        else:
            token_ids, media = self.media.encode(text, prompt.images, special=special, where=_where(prompt))
        if not token_ids:
            raise DataError(
                code="prompt.no_tokens",
                what=f"the prompt {shown(text)} has 0 tokens",
                where=prompt.prompt_id,
                why="a model answers at least one token",
                do=f"correct or remove row {prompt.index} of {prompt.source}",
            )
        return RenderedPrompt(
            prompt.prompt_id,
            text,
            tuple(token_ids),
            prompt.label,
            prompt.output,
            prompt.source,
            prompt.index,
            media,
            self.messages(prompt),
        )

    def text(self, prompt: PromptRow) -> str:
        """Render the text of one prompt."""
        if prompt.text is not None:
            text = fill_template(self.input_template, self._question(prompt, prompt.text))
            if not self.apply_chat_template:
                return text
            return self._chat((Message("user", text),))
        assert prompt.messages is not None
        self._check_messages_allowed(prompt)
        return self._chat(self._turns(prompt, prompt.messages))

    def messages(self, prompt: PromptRow) -> tuple[dict[str, Any], ...]:
        """Return the conversation that `text` renders; empty where it is plain text."""
        if not self.apply_chat_template:
            return ()
        if prompt.text is not None:
            text = fill_template(self.input_template, self._question(prompt, prompt.text))
            turns: tuple[Message, ...] = (Message("user", text),)
        else:
            turns = self._turns(prompt, prompt.messages or ())
        return tuple(message.as_dict() for message in self._with_system(turns))

    def _question(self, prompt: PromptRow, text: str) -> str:
        """Return the text, with image markers in front where it has no placeholders for its images."""
        if not prompt.images or MARKER in text:
            return text
        return MARKER * len(prompt.images) + text

    def _turns(self, prompt: PromptRow, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return the messages, with images without placeholders in front of the last turn."""
        if not prompt.images or count_places([message.content for message in messages]):
            return messages
        *earlier, last = messages
        return (*earlier, Message(last.role, put_in_front(last.content, len(prompt.images))))

    def _chat(self, messages: tuple[Message, ...]) -> str:
        turns = self._with_system(messages)
        return self.codec.render_chat([message.as_dict() for message in turns], add_generation_prompt=True)

    def _with_system(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return the messages with the system prompt of the settings, where there is one."""
        if self.system_prompt is None:
            return messages
        others = tuple(message for message in messages if message.role != "system")
        return (Message("system", self.system_prompt), *others)

    def _check_messages_allowed(self, prompt: PromptRow) -> None:
        if not self.apply_chat_template:
            raise OptionsError(
                code="prompt.messages_without_chat",
                what=f"{prompt.prompt_id} is a list of messages and apply_chat_template is off",
                where="--apply_chat_template",
                why="messages become text through the chat template only",
                do="--apply_chat_template",
            )
        if self.input_template is not None:
            raise OptionsError(
                code="prompt.template_with_messages",
                what=f"input_template is set and {prompt.prompt_id} is a list of messages",
                where="--input_template",
                why="a template wraps a text; messages are already divided into turns",
                do="leave --input_template out",
            )


def _where(prompt: PromptRow) -> str:
    """Return the location of the row's images field, or else of the row."""
    return prompt.images[0].where.removesuffix("[0]") if prompt.images else prompt.prompt_id


def check_input_template(template: str) -> None:
    """Raise `OptionsError` for a template in which the position of the prompt is not clear."""
    named, bare = template.count("{input}"), template.count("{}")
    if named == 1 or (named == 0 and bare == 1):
        return
    raise OptionsError(
        code="prompt.input_template",
        what=f"input_template = {shown(template)} has {named} times {{input}} and {bare} times {{}}",
        where="--input_template",
        why="the place of the prompt is marked once, by {input}, or by {} where {input} does not occur",
        do="--input_template '{input}'",
    )


def fill_template(template: str | None, text: str) -> str:
    """Insert `text` at the template's placeholder; without a template, return `text` itself."""
    if template is None:
        return text
    mark = "{input}" if "{input}" in template else "{}"
    before, after = template.split(mark)
    return before + text + after


@dataclass(frozen=True, slots=True)
class TooLong:
    """A prompt that is left out, with its length in tokens."""

    prompt_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class LengthSelection:
    """The prompts that fit into `prompt_max_len` tokens, and those that do not; none is cut."""

    kept: tuple[PromptRow, ...]
    dropped: tuple[TooLong, ...]
    prompt_max_len: int
    longest_kept: int

    def lines(self) -> list[str]:
        """Return the lines for the plan of the run: the counts, then every prompt that was left out."""
        total = len(self.kept) + len(self.dropped)
        head = f"{len(self.kept):,} of {total:,} prompts have at most {self.prompt_max_len} tokens"
        longest = f"longest {self.longest_kept}; {len(self.dropped):,} left out"
        return [f"{head} ({longest})", *(f"left out {d.prompt_id}: {d.num_tokens} tokens" for d in self.dropped)]


def select_by_length(prompts: Sequence[PromptRow], renderer: PromptRenderer, *, prompt_max_len: int) -> LengthSelection:
    """Render every prompt once and keep those of at most `prompt_max_len` tokens.

    Raises `DataError` when none is left.
    """
    kept: list[PromptRow] = []
    dropped: list[TooLong] = []
    longest_kept = 0
    for prompt in prompts:
        num_tokens = len(renderer.render(prompt).token_ids)
        if num_tokens > prompt_max_len:
            dropped.append(TooLong(prompt.prompt_id, num_tokens))
        else:
            kept.append(prompt)
            longest_kept = max(longest_kept, num_tokens)
    if not kept:
        raise _nothing_fits(dropped, prompt_max_len)
    return LengthSelection(tuple(kept), tuple(dropped), prompt_max_len, longest_kept)


def _nothing_fits(dropped: Sequence[TooLong], prompt_max_len: int) -> DataError:
    lengths = [prompt.num_tokens for prompt in dropped]
    span = f"{min(lengths)} to {max(lengths)} tokens" if lengths else "none is there"
    return DataError(
        code="prompt.all_too_long",
        what=f"0 of {len(dropped)} prompts have at most prompt_max_len = {prompt_max_len} tokens ({span})",
        where="--prompt_max_len",
        why="a prompt is used whole or left out, and here all would be left out",
        do=f"--prompt_max_len {max(lengths, default=prompt_max_len)}",
    )
