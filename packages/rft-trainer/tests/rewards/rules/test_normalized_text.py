"""Texts as SQuAD compares them."""

from __future__ import annotations

import pytest

from rft_trainer.rewards.rules.normalized_text import normalized


@pytest.mark.parametrize(
    ("text", "expected"),
    [("The  Cat, sat.", "cat sat"), ("a theory of an ant", "theory of ant"), ("U.S.A.", "usa"), ("?!", ""), ("", "")],
)
def test_case_punctuation_articles_and_spaces_do_not_count(text: str, expected: str) -> None:
    assert normalized(text) == expected
