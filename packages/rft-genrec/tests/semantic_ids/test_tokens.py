"""Codes as tokens."""

import pytest

from rft_genrec.semantic_ids.tokens import codes_of, tokens_of


def test_codes_have_a_letter_a_level() -> None:
    assert tokens_of((12, 200, 7)) == ("<a_12>", "<b_200>", "<c_7>")
    assert codes_of(("<a_12>", "<b_200>", "<c_7>")) == (12, 200, 7)


@pytest.mark.parametrize("tokens", [("<b_1>",), ("<a_1>", "<c_2>"), ("a1",), ("<a_-1>",)])
def test_tokens_of_another_form_have_no_codes(tokens: tuple[str, ...]) -> None:
    assert codes_of(tokens) is None
