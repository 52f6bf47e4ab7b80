"""A tokenizer learned from texts, as a Hugging Face directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rft.hub.sources import located_sources
from rft.settings import TrainTokenizerSettings
from rft.tiny_models.new_model import refuse_existing, vocabulary_of
from rft_core.errors import DataError, OptionsError
from rft_models.tokenization.byte_level import (
    CHAT_TEMPLATE,
    SMALLEST_VOCABULARY,
    bpe_tokenizer,
    byte_tokenizer,
    character_tokenizer,
)
from rft_models.tokenization.tokenizer import load_tokenizer
from rft_trainer.data.token_shards.open import separator_of
from rft_trainer.data.token_shards.pieces import pieces_of
from rft_trainer.data.token_shards.text_files import text_files
from rft_trainer.data.token_shards.text_plan import TextStream
from rft_trainer.settings.pretraining import TextSettings

_FEW_CHARACTERS = 100_000


@dataclass(frozen=True, slots=True)
class NewTokenizer:
    """A tokenizer that was written."""

    directory: Path
    kind: str
    num_characters: int
    """Of the texts that were read."""
    vocab_size: int

    @property
    def num_merges(self) -> int:
        """Tokens that were learned beside the bytes and the special ones; of `bpe` and `bytes`."""
        return self.vocab_size - SMALLEST_VOCABULARY


def new_tokenizer(settings: TrainTokenizerSettings) -> NewTokenizer:
    """Read the texts, learn the tokenizer, write it whole or not at all, and read it back.

    Raises:
        OptionsError: the target exists, or a setting has no effect on this kind of tokenizer.
        DataError: a text cannot be read, or there is none.
    """
    target = Path(settings.output.save_path).expanduser()
    _check(settings)
    refuse_existing(target)
    template = _template(settings.tokenizer.chat_template_file)
    texts = _Counted(limited(texts_of(settings.data), settings.data.max_characters))
    _write(_learned(settings, texts, template), target)
    return NewTokenizer(
        target, settings.tokenizer.tokenizer_type, texts.num_characters, load_tokenizer(target).vocab_size
    )


def _check(settings: TrainTokenizerSettings) -> None:
    kind, data = settings.tokenizer.tokenizer_type, settings.data
    if kind != "bytes" and not data.prompt_data:
        raise OptionsError(
            code="tokenizer.no_texts_named",
            what="prompt_data is empty",
            where="--prompt_data",
            why="a tokenizer is learned from texts: .txt files, files of rows, or a data set of the Hub",
            do="--prompt_data input.txt",
        )
    if kind == "bytes" and data.prompt_data:
        raise _idle("prompt_data", data.prompt_data, "its tokens are the bytes, whatever the texts are")
    if kind != "bpe" and settings.tokenizer.vocab_size is not None:
        size = "the texts have characters" if kind == "characters" else "there are bytes"
        raise _idle("vocab_size", settings.tokenizer.vocab_size, f"its tokens are as many as {size}")


def _idle(name: str, value: object, why: str) -> OptionsError:
    return OptionsError(
        code="tokenizer.idle_setting",
        what=f"{name} = {value} beside a tokenizer_type that has no use for it",
        where=f"--{name}",
        why=why,
        do="--tokenizer_type bpe",
    )


def texts_of(data: TextSettings) -> Iterator[str]:
    """Yield the texts of all sources, in pieces.

    Raises:
        DataError: a file cannot be read, or a row has no text.
    """
    separator = separator_of(data.text_separator)
    for spec in located_sources(data.prompt_data, None, split=data.prompt_split, flag="--prompt_data"):
        files = spec.files or tuple(text_files(spec.path, split=data.prompt_split or None))
        stream = TextStream(files, separator, data.text_key)
        for plan in stream.plans():
            for piece in pieces_of(stream, plan):
                yield piece.text


def limited(texts: Iterable[str], most: int) -> Iterator[str]:
    """Yield texts up to `most` characters in all; 0 = all."""
    left = most
    for text in texts:
        if not most:
            yield text
        elif left > 0:
            yield text[:left]
            left -= len(text)


class _Counted:
    """Texts, and the number of their characters so far."""

    def __init__(self, texts: Iterator[str]) -> None:
        self._texts = texts
        self.num_characters = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.num_characters += len(text)
            yield text


def _learned(settings: TrainTokenizerSettings, texts: _Counted, template: str) -> Any:
    chosen = settings.tokenizer
    if chosen.tokenizer_type == "bytes":
        return byte_tokenizer(template)
    if chosen.tokenizer_type == "characters":
        return character_tokenizer(texts, template)
    reading = iter(texts)
    # as many as decide the size of the vocabulary, and no more in memory
    first: list[str] = []
    while texts.num_characters < _FEW_CHARACTERS and (text := next(reading, None)) is not None:
        first.append(text)
    if not any(first):
        raise DataError(
            code="tokenizer.no_texts",
            what=f"{settings.data.prompt_data} gives no text",
            where="--prompt_data",
            why="a tokenizer is learned from texts",
            do="--prompt_data input.txt, a file with text",
        )
    return bpe_tokenizer(chain(first, reading), chosen.vocab_size or vocabulary_of(first), template)


def _template(file: str) -> str:
    if not file:
        return CHAT_TEMPLATE
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            code="tokenizer.chat_template",
            what=f"{file} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}",
            where="--chat_template_file",
            why="a chat template is a file of Jinja text",
            do=f"ls -l {file if Path(file).exists() else Path(file).parent}",
        ) from error


def _write(tokenizer: Any, target: Path) -> None:
    staging = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        staging.mkdir(parents=True)
        tokenizer.save_pretrained(str(staging))
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
