"""Rendering of prompts to the model's text and token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rft_core.errors import DataError, OptionsError, RftError
from rft_trainer.data.image_placeholders import count_places, put_in_front
from rft_trainer.data.images import MARKER
from rft_trainer.data.media_cache import MediaStore, StoredMedia
from rft_trainer.data.prompts import Message, PromptRow
from rft_trainer.data.readers.rows import shown
from rft_trainer.data.turn_masks import ASSISTANT_TURNS, MaskedText, TrainedTurns, masked_text
from rft_trainer.settings.data import system_prompt_refusal


class TextTokenizer(Protocol):
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

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        """Encode each text as `encode` does."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Decode token ids to text."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Render a conversation as one text with the tokenizer's own template."""
        ...

    def assistant_spans(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[tuple[int, int]] | None:
        """Return the characters of each turn of the assistant that the template marks; None = it marks nothing."""
        ...


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt ready for the engine: `text` is exactly what was turned into `token_ids`."""

    prompt_id: str
    text: str
    token_ids: tuple[int, ...]
    label: Any
    output: str | None
    source: str
    index: int
    media: StoredMedia | None = None
    """Its images; None without any."""
    messages: tuple[dict[str, Any], ...] = ()
    """The conversation that `text` renders; empty where it is plain text."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """All columns of the row, where code of the user scores."""
    learned: tuple[bool, ...] = ()
    """Of a whole conversation: which of its tokens are learned; empty for a prompt."""
    weight: float = 1.0
    """Weight of the row in the loss of demonstrations."""
    place: str = field(default="", compare=False)
    """file:line of the row, for messages."""


@dataclass(frozen=True, slots=True)
class PromptRenderer:
    """Renderer of prompts: input template, then system prompt and chat template.

    `input_template` holds one placeholder, `{input}` or, where that does not occur, `{}`; all
    other braces stand for themselves, so that LaTeX needs no escapes. A system prompt takes the
    place of one that the data bring. The text of a chat template already holds its special
    tokens, so none are added to it; `add_special_tokens` concerns plain text.

    Raises `OptionsError` at construction for a combination in which a setting has no effect.

    Example: `PromptRenderer(tokenizer, input_template="Q: {}\\nA:").render(prompt).text`
    """

    tokenizer: TextTokenizer
    input_template: str | None = None
    system_prompt: str | None = None
    apply_chat_template: bool = False
    add_special_tokens: bool = False
    media: MediaStore | None = None
    """Store that prepares images; required for rows with images."""
    turns: TrainedTurns = ASSISTANT_TURNS
    """Which turns of whole conversations are learned."""

    def __post_init__(self) -> None:
        if self.input_template is not None:
            check_input_template(self.input_template)
        refusal = system_prompt_refusal(self.system_prompt or "", apply_chat_template=self.apply_chat_template)
        if refusal is not None:
            raise refusal.as_error(
                {"system_prompt": shown(self.system_prompt), "apply_chat_template": self.apply_chat_template}
            )
        if self.apply_chat_template and not self.tokenizer.has_chat_template:
            raise OptionsError(
                code="prompt.no_chat_template",
                what="apply_chat_template is set, but the tokenizer has no chat template",
                where="--apply_chat_template",
                why="the text of a conversation is defined by the tokenizer's own template",
                do="leave --apply_chat_template out",
            )

    def render(self, prompt: PromptRow) -> RenderedPrompt:
        """Render text and token ids of one prompt; `DataError` when they are empty."""
        if prompt.is_conversation:
            return self._conversation(prompt)
        text = self.text(prompt)
        if self.media is None:
            return self._rendered(prompt, text, self.tokenizer.encode(text, add_special_tokens=self._special))
        ids, media = self.media.encode(text, prompt.images, special=self._special, where=place_of(prompt))
        return self._rendered(prompt, text, ids, media)

    def render_all(self, prompts: Sequence[PromptRow]) -> list[RenderedPrompt]:
        """Render each prompt as `render` does, and those of plain text with one call of the tokenizer for all."""
        if self.media is not None or any(prompt.is_conversation for prompt in prompts):
            return [self.render(prompt) for prompt in prompts]
        try:
            texts = [self.text(prompt) for prompt in prompts]
            ids = self.tokenizer.encode_batch(texts, add_special_tokens=self._special)
        except RftError:
            # one by one: the error of the first row that has one
            return [self.render(prompt) for prompt in prompts]
        return [self._rendered(*row) for row in zip(prompts, texts, ids, strict=True)]

    @property
    def _special(self) -> bool:
        # the text of a chat template holds them already: added again, they would stand twice
        return self.add_special_tokens and not self.apply_chat_template

    def _rendered(
        self, prompt: PromptRow, text: str, token_ids: Sequence[int], media: StoredMedia | None = None
    ) -> RenderedPrompt:
        if not token_ids:
            raise DataError(
                code="prompt.no_tokens",
                what=f"the prompt {shown(text)} has 0 tokens",
                where=prompt.prompt_id,
                why="a model needs at least one token to respond to",
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
            prompt.columns,
            weight=prompt.weight,
            place=prompt.place,
        )

    def _conversation(self, prompt: PromptRow) -> RenderedPrompt:
        """Render a whole conversation: tokens up to the end of its last learned turn, and which of them are learned.

        Each piece is encoded apart, so that what stands before a turn has the tokens that it has when one is sampled.
        """
        assert prompt.messages is not None
        self._check_messages_allowed(prompt)
        turns = self._with_system(_turns(prompt, prompt.messages))
        indices = self.turns.of([turn.role for turn in turns], [turn.learned for turn in turns])
        self._check_learned(prompt, turns, indices)
        messages = [turn.as_dict() for turn in turns]
        masked = masked_text(self.tokenizer, messages, indices, where=prompt.prompt_id)
        token_ids, learned, media = self._encoded(prompt, masked)
        if not masked.ends:
            end = list(self.tokenizer.eos_ids[:1])
            token_ids, learned = token_ids + end, learned + [True] * len(end)
        return RenderedPrompt(
            prompt.prompt_id,
            masked.text,
            tuple(token_ids),
            prompt.label,
            prompt.output,
            prompt.source,
            prompt.index,
            media,
            tuple(messages),
            prompt.columns,
            tuple(learned),
            prompt.weight,
            prompt.place,
        )

    def _encoded(self, prompt: PromptRow, masked: MaskedText) -> tuple[list[int], list[bool], StoredMedia | None]:
        """Return tokens, mask and images of all pieces; images stand before what is learned."""
        token_ids: list[int] = []
        learned: list[bool] = []
        media: StoredMedia | None = None
        for number, (piece, is_learned) in enumerate(masked.pieces):
            if number == 0 and self.media is not None and prompt.images:
                ids, media = self.media.encode(piece, prompt.images, special=False, where=place_of(prompt))
            else:
                ids = self.tokenizer.encode(piece)
            token_ids += ids
            learned += [is_learned] * len(ids)
        return token_ids, learned, media

    def _check_learned(self, prompt: PromptRow, turns: tuple[Message, ...], indices: Sequence[int]) -> None:
        """Refuse a conversation without a turn to learn, one that begins with it, or images behind it."""
        if not indices:
            raise _bad_turns(
                prompt,
                f"none of the {len(turns)} turns is learned (their roles are {', '.join(t.role for t in turns[:8])})",
                f"a demonstration needs a turn of {', '.join(self.turns.roles)} that does not say train: false",
            )
        if indices[0] == 0 and turns[0].role == "assistant":
            raise _bad_turns(
                prompt,
                "the conversation begins with a turn of the assistant",
                "a turn is learned as the answer to what stands before it",
                do='give that message "train": false, or put the turn that it answers before it',
            )
        if prompt.images and count_places([turn.content for turn in turns[indices[0] :]]):
            raise _bad_turns(
                prompt,
                "an image stands behind the first learned turn",
                "images are encoded with the text before the first learned turn",
                do="--train_on_turns last",
            )

    def text(self, prompt: PromptRow) -> str:
        """Render the text of one prompt."""
        if prompt.text is not None:
            text = fill_template(self.input_template, _question(prompt, prompt.text))
            if not self.apply_chat_template:
                return text
            return self._chat((Message("user", text),))
        assert prompt.messages is not None
        self._check_messages_allowed(prompt)
        return self._chat(_turns(prompt, prompt.messages))

    def messages(self, prompt: PromptRow) -> tuple[dict[str, Any], ...]:
        """Return the conversation that `text` renders; empty where it is plain text."""
        if not self.apply_chat_template:
            return ()
        if prompt.text is not None:
            text = fill_template(self.input_template, _question(prompt, prompt.text))
            turns: tuple[Message, ...] = (Message("user", text),)
        else:
            turns = _turns(prompt, prompt.messages or ())
        return tuple(message.as_dict() for message in self._with_system(turns))

    def _chat(self, messages: tuple[Message, ...]) -> str:
        turns = self._with_system(messages)
        return self.tokenizer.render_chat([message.as_dict() for message in turns], add_generation_prompt=True)

    def _with_system(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return the messages with the system prompt of the settings, where there is one."""
        if self.system_prompt is None:
            return messages
        # a chat template may take one system prompt alone, and only as the first message
        others = tuple(message for message in messages if message.role != "system")
        return (Message("system", self.system_prompt), *others)

    def _check_messages_allowed(self, prompt: PromptRow) -> None:
        if not self.tokenizer.has_chat_template:
            raise OptionsError(
                code="prompt.no_chat_template",
                what=f"{prompt.prompt_id} is a list of messages, and the tokenizer has no chat template",
                where=place_of(prompt),
                why="only the chat template turns messages into text",
                do="give prompts as plain text, or put chat_template.jinja into the model's directory",
            )
        if not self.apply_chat_template:
            raise OptionsError(
                code="prompt.messages_without_chat",
                what=f"{prompt.prompt_id} is a list of messages, but apply_chat_template is off",
                where="--apply_chat_template",
                why="only the chat template turns messages into text",
                do="--apply_chat_template",
            )
        if self.input_template is not None:
            raise OptionsError(
                code="prompt.template_with_messages",
                what=f"input_template is set, but {prompt.prompt_id} is a list of messages",
                where="--input_template",
                why="a template wraps a text; messages are already divided into turns",
                do="leave --input_template out",
            )


def with_places(prompt: PromptRow) -> PromptRow:
    """Return the prompt with placeholders of its images in front of its text, or last turn, where it has none."""
    if prompt.text is not None:
        return replace(prompt, text=_question(prompt, prompt.text))
    return replace(prompt, messages=_turns(prompt, prompt.messages or ()))


def _question(prompt: PromptRow, text: str) -> str:
    """Return the text, with image markers in front where it has no placeholders for its images."""
    if not prompt.images or MARKER in text:
        return text
    return MARKER * len(prompt.images) + text


def _turns(prompt: PromptRow, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages, with images without placeholders in front of the last turn."""
    if not prompt.images or count_places([message.content for message in messages]):
        return messages
    *earlier, last = messages
    return (*earlier, Message(last.role, put_in_front(last.content, len(prompt.images))))


def _bad_turns(prompt: PromptRow, what: str, why: str, *, do: str = "") -> DataError:
    return DataError(
        code="data.no_turn_to_learn",
        what=what,
        where=prompt.prompt_id,
        why=why,
        do=do or f"correct or remove row {prompt.index} of {prompt.source}",
    )


def place_of(prompt: PromptRow) -> str:
    """Return the location of the row's images field, or else of the row."""
    return prompt.images[0].where.removesuffix("[0]") if prompt.images else prompt.prompt_id


def check_input_template(template: str) -> None:
    """Raise `OptionsError` for a template in which the position of the prompt is not clear."""
    named, bare = template.count("{input}"), template.count("{}")
    if named == 1 or (named == 0 and bare == 1):
        return
    raise OptionsError(
        code="prompt.input_template",
        what=f"input_template = {shown(template)} has {{input}} {named} times and {{}} {bare} times",
        where="--input_template",
        why="the place of the prompt is marked once, by {input}, or by {} where {input} does not occur",
        do="--input_template '{input}'",
    )


def fill_template(template: str | None, text: str) -> str:
    """Insert `text` at the template's placeholder; without a template, return `text` itself."""
    if template is None:
        return text
    mark = "{input}" if "{input}" in template else "{}"
    # split and not `format`: braces of LaTeX or of code in the template stand for themselves
    before, after = template.split(mark)
    return before + text + after
