"""Tokenizers made from texts: the same tokens in every loader, whatever model stands beside them."""

from __future__ import annotations

import json
from pathlib import Path
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from rft_core.errors import DataError, OptionsError
from rft_models.tokenization.byte_level import (
    CHAT_TEMPLATE,
    bpe_tokenizer,
    byte_symbols,
    byte_tokenizer,
    character_tokenizer,
    characters_of,
)
from rft_models.tokenization.tokenizer import HfTokenizer, load_tokenizer

ALPHABET = " \n!019AZaz'é日本😀"
TEXTS = [ALPHABET, "Zaz 019!\n\n aZ"]
KINDS = {
    "characters": character_tokenizer(TEXTS),
    "bytes": byte_tokenizer(),
    "bpe": bpe_tokenizer(TEXTS * 3, 280),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["", "qwen2", "qwen3", "qwen3_moe", "llama", "mixtral"])
def test_auto_tokenizer_has_the_same_tokens_beside_any_model(tmp_path: Path, kind: str, family: str) -> None:
    HfTokenizer(KINDS[kind]).save_pretrained(tmp_path)
    if family:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    for text in [*TEXTS, "", "  a", "a\n \n0", "1900 'Zaz'!<eos>"]:
        ids = ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids == KINDS[kind].encode(text)
        assert theirs.decode(ids) == ours.decode(ids) == text
    assert (theirs.pad_token_id, theirs.eos_token_id) == (ours.pad_id, ours.eos_ids[0]) == (0, 1)
    assert theirs.chat_template == CHAT_TEMPLATE


@given(st.text(alphabet=ALPHABET, max_size=40))
@settings(deadline=None, max_examples=50)
def test_characters_are_one_token_each(text: str) -> None:
    tokenizer = HfTokenizer(KINDS["characters"])
    ids = tokenizer.encode(text)
    assert ids == [2 + sorted(ALPHABET).index(character) for character in text]
    assert tokenizer.decode(ids) == text


@given(st.text(max_size=40))
@settings(deadline=None, max_examples=50)
def test_bytes_are_one_token_each(text: str) -> None:
    text = normalize("NFC", text.encode("utf-8", "ignore").decode())
    tokenizer = HfTokenizer(KINDS["bytes"])
    ids = tokenizer.encode(text)
    assert ids == [2 + byte for byte in text.encode()]
    assert tokenizer.decode(ids) == text


def test_parts_of_characters_have_tokens_behind_them() -> None:
    tokenizer = HfTokenizer(character_tokenizer(["aé"]))
    # a, é, and the two bytes of é
    assert (tokenizer.vocab_size, tokenizer.encode("aé")) == (6, [2, 3])


def test_the_order_of_texts_changes_no_token_of_characters() -> None:
    one, other = (character_tokenizer(texts).get_vocab() for texts in (TEXTS, TEXTS[::-1]))
    assert one == other


def test_another_character_is_named_and_one_in_two_parts_is_none() -> None:
    tokenizer = HfTokenizer(KINDS["characters"])
    with pytest.raises(DataError, match="'x'") as caught:
        tokenizer.encode("ax")
    assert caught.value.problem.code == "text.unknown_character"
    with pytest.raises(DataError, match="'ü'"):
        tokenizer.encode("aü")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")
    # every text can be written in bytes
    assert HfTokenizer(KINDS["bytes"]).encode("x") == [2 + ord("x")]


def test_texts_without_a_character_are_refused() -> None:
    with pytest.raises(OptionsError, match="no character"):
        character_tokenizer(["", ""])


def test_a_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(OptionsError, match="258"):
        bpe_tokenizer(TEXTS, 257)


def test_the_table_of_bytes_is_that_of_byte_level_tokenizers() -> None:
    assert sorted(byte_symbols().values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    shown = splitter.pre_tokenize_str("é \n")[0][0]
    assert shown == "".join(byte_symbols()[byte] for byte in "é \n".encode())


def test_characters_of_tokens() -> None:
    assert characters_of(["a", "ab", "Ġ", "Ã©", "Ã", "<eos>é日"]) == frozenset("a é")
