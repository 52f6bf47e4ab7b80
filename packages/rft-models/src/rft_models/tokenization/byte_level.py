"""Tokenizers made from texts: of characters, of bytes, and byte-level BPE, each with <pad> = 0 and <eos> = 1.

All three are byte-level BPE as Qwen's are: NFC, the same splitting into words, bytes, and merges within a word. So
every loader has the same tokens, `AutoTokenizer` beside a model of any family included. The kinds differ in their
merges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any
from unicodedata import normalize

from rft_core.errors import OptionsError

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
NUM_BYTES = 256
SMALLEST_VOCABULARY = 2 + NUM_BYTES
"""Two special tokens and every byte."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""One line a message, `role: content`; an assistant's turn ends with the end token."""


def character_tokenizer(texts: Iterable[str], chat_template: str = CHAT_TEMPLATE) -> Any:
    """Return a transformers tokenizer with one token for each character of the texts, by their code points.

    A character of several bytes is one token by merges of its bytes, which have tokens of their own behind those of the
    characters. A text with another character is refused by `HfTokenizer`.

    Raises:
        OptionsError: the texts have no character.
    """
    found: set[str] = set()
    for text in texts:
        found.update(normalize("NFC", text))
    if not found:
        raise OptionsError(
            code="tokenizer.no_characters",
            what="the texts have no character",
            where="--prompt_data",
            why="a tokenizer of characters has one token for each character of the texts",
            do="--prompt_data input.txt, a file with text",
        )
    vocab = {PAD_TOKEN: 0, EOS_TOKEN: 1}
    symbols = [_symbols(character) for character in sorted(found)]
    for symbol in symbols:
        vocab.setdefault(symbol, len(vocab))
    merges: dict[tuple[str, str], None] = {}
    for symbol in symbols:
        # from the first byte on: no merge begins with a byte that goes on with a character
        for end in range(1, len(symbol)):
            merges.setdefault((symbol[:end], symbol[end]))
            for part in (symbol[:end], symbol[end]):
                vocab.setdefault(part, len(vocab))
    return _as_transformers(_backend(vocab, [*merges]), chat_template)


def byte_tokenizer(chat_template: str = CHAT_TEMPLATE) -> Any:
    """Return a transformers tokenizer with one token for each byte of UTF-8."""
    vocab = {PAD_TOKEN: 0, EOS_TOKEN: 1, **{symbol: 2 + byte for byte, symbol in byte_symbols().items()}}
    return _as_transformers(_backend(vocab, []), chat_template)


def bpe_tokenizer(texts: Iterable[str], vocab_size: int, chat_template: str = CHAT_TEMPLATE) -> Any:
    """Return a transformers tokenizer of `vocab_size` tokens whose merges of bytes are learned from the texts.

    Texts that have few words give fewer tokens.

    Raises:
        OptionsError: `vocab_size` below 258 (two special tokens and 256 bytes).
    """
    from tokenizers import pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCABULARY:
        raise OptionsError(
            code="build.small_vocabulary",
            what=f"vocab_size = {vocab_size}; needed are at least 2 special tokens + 256 bytes = {SMALLEST_VOCABULARY}",
            where="vocab_size",
            why="a byte-level vocabulary holds every byte",
            do=f"vocab_size {SMALLEST_VOCABULARY}",
        )
    backend = _backend({}, [])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _as_transformers(backend, chat_template)


@cache
def byte_symbols() -> Mapping[int, str]:
    """Return the printable character that byte-level tokenizers write for each byte (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    hidden = [byte for byte in range(NUM_BYTES) if byte not in shown]
    symbols = {byte: chr(byte) for byte in shown} | {byte: chr(NUM_BYTES + n) for n, byte in enumerate(hidden)}
    return {byte: symbols[byte] for byte in range(NUM_BYTES)}


def characters_of(tokens: Iterable[str]) -> frozenset[str]:
    """Return the characters that byte-level tokens of one character each stand for."""
    table = {symbol: byte for byte, symbol in byte_symbols().items()}
    found: set[str] = set()
    for token in tokens:
        if all(symbol in table for symbol in token):
            text = bytes(table[symbol] for symbol in token).decode("utf-8", "ignore")
            found.update([text] if len(text) == 1 else [])
    return frozenset(found)


def _symbols(character: str) -> str:
    return "".join(byte_symbols()[byte] for byte in character.encode())


def _backend(vocab: dict[str, int], merges: Sequence[tuple[str, str]]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    backend = Tokenizer(models.BPE(vocab=vocab, merges=[*merges]) if vocab else models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _as_transformers(backend: Any, chat_template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD_TOKEN, eos_token=EOS_TOKEN)
    tokenizer.chat_template = chat_template
    return tokenizer
