"""Tokens that are added to a vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_models.tiny_models.text import build_character_tokenizer
from rft_models.tokenization.added_tokens import known_tokens, token_ids_of, with_added_tokens
from rft_models.tokenization.tokenizer import COMPANIONS, HfTokenizer, load_tokenizer


def test_added_tokens_are_one_id_each_and_stay_so_in_a_directory(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(build_character_tokenizer("<a_b12>"))
    size = tokenizer.vocab_size
    added = with_added_tokens(tokenizer, ["<a_1>", "<a_12>", "<b_2>"])
    assert added.vocab_size == size + 3
    assert added.encode("<a_12><a_1>a<b_2>") == [size + 1, size, *added.encode("a"), size + 2]
    assert known_tokens(added, ["<b_2>", "<b_1>"]) == ("<b_2>",)
    (tmp_path / COMPANIONS[0]).write_text(json.dumps({"of": "these tokens"}))
    added.save_pretrained(tmp_path)
    read = load_tokenizer(tmp_path)
    assert token_ids_of(read, ["<b_2>", "<a_1>"]) == [size + 2, size]
    copied = tmp_path / "copied"
    read.save_pretrained(copied)  # what describes the tokens goes with them
    assert json.loads((copied / COMPANIONS[0]).read_text()) == {"of": "these tokens"}


def test_a_token_of_several_ids_is_refused() -> None:
    tokenizer = HfTokenizer(build_character_tokenizer("<a_b12>"))
    with pytest.raises(DataError, match="'<a_1>' is 5 tokens"):
        token_ids_of(tokenizer, ["a", "<a_1>"])
