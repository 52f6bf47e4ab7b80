"""Steps as tokens: each encoded by itself with its separator, and a response divided in the same way."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_models.reward_model.spec import StepSpec
from rft_models.reward_model.step_encoding import StepTextEncoder, split_steps
from rft_models.tiny_models.text import build_bpe_tokenizer
from rft_models.tokenization.tokenizer import HfTokenizer


def test_a_response_is_divided_at_separators_and_what_is_blank_is_no_step() -> None:
    assert split_steps("1+1=2\n\n2+1=3\n", "\n") == [("1+1=2", 6), ("2+1=3", 13)]
    assert split_steps("a", "\n\n") == [("a", 1)]
    assert split_steps(" \n", "\n") == []


def test_the_tokens_are_those_of_prompt_steps_and_separators_alone() -> None:
    tokenizer = HfTokenizer(build_bpe_tokenizer(["one and one is two\n", "1+1=2\n"] * 4, 300))
    text = StepTextEncoder(tokenizer, StepSpec()).encode("1+1?", (), ["one", "two"])
    end = tokenizer.encode("\n")
    asked = tokenizer.render_chat([{"role": "user", "content": "1+1?"}], add_generation_prompt=True)
    parts = [tokenizer.encode(asked), tokenizer.encode("one"), end, tokenizer.encode("two"), end]
    assert list(text.token_ids) == [token for part in parts for token in part]
    assert text.prompt_length == len(parts[0])
    assert [text.token_ids[place] for place in text.ends] == [end[-1]] * 2
    assert text.ends[-1] == len(text.token_ids) - 1


def test_a_separator_without_a_token_is_refused(character_directory: Path) -> None:
    from rft_models.vision.processor import load_processor

    with pytest.raises(DataError) as caught:
        StepTextEncoder(load_processor(character_directory), StepSpec(separator="\u2603"))
    assert (caught.value.problem.code, caught.value.problem.where) == ("models.step_separator", "--step_separator")
