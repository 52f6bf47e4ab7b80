"""Functions of the installed task."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_genrec.training.task_functions import held_out_metrics, item_sequences
from rft_models.tiny_models.text import build_character_tokenizer
from rft_models.tokenization.added_tokens import with_added_tokens
from rft_models.tokenization.tokenizer import HfTokenizer

TOKENS = [f"<{level}_{n}>" for level in "ab" for n in range(3)]


def test_every_id_is_a_sequence_with_an_end(catalogue: Path) -> None:
    tokenizer = HfTokenizer(build_character_tokenizer("<>_ab012"))
    size = tokenizer.vocab_size
    with pytest.raises(DataError, match="as 5 tokens"):
        item_sequences(tokenizer, str(catalogue))
    tokenizer = with_added_tokens(tokenizer, TOKENS)
    found = item_sequences(tokenizer, str(catalogue))
    assert found[4] == [size + 1, size + 4, tokenizer.eos_ids[0]]
    assert len(found) == 6


def test_metrics_of_most_likely_items() -> None:
    answers = ["<a_0><b_0>", "<a_0><b_1>", "<a_0><b_0>", "<a_1><b_0>"]
    wanted = ["<a_0><b_0>", "<a_0><b_2>", "<a_1><b_0>", "<a_1><b_0>"]
    assert held_out_metrics(answers, wanted, [None] * 4) == {"hr@1": 0.5, "first_level": 0.75, "distinct": 0.75}
