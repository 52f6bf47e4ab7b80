"""What a reward model is asked for pairs of texts, with doubles of the model and its tokenizer."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rft_core.errors import DataError
from rft_core.packed_tokens import PackedTokens
from rft_models.reward_model.model import RewardModel
from rft_models.reward_model.scorer import RewardTextScorer, shared_lengths
from rft_models.reward_model.spec import RewardSpec

END = 99


class Tokenizer:
    """A token a letter; "!" cannot be read, "#" is the end token, and special tokens put "^" in front."""

    def __init__(self, eos_ids: tuple[int, ...] = (END, 98), template: bool = False) -> None:
        self.eos_ids, self.has_chat_template = eos_ids, template

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if "!" in text:
            raise DataError(code="tokenizer.text", what="a letter", where="text", why="a test", do="leave it out")
        ids = [END if letter == "#" else ord(letter) - 96 for letter in text]
        return [50, *ids] if add_special_tokens and ids else ids

    def render_chat(self, turns: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        assert not add_generation_prompt
        return "".join(turn["role"][0] + turn["content"] for turn in turns)


class Model:
    """Scores a text by its sum and its length; notes every forward."""

    def __init__(self, tokenizer: Tokenizer, max_positions: int) -> None:
        self.tokenizer, self.max_positions = tokenizer, max_positions
        self.spec = RewardSpec(heads=("sum", "length"), weights=None)
        self.device = torch.device("cpu")
        self.forwards: list[PackedTokens] = []

    def scores(self, tokens: PackedTokens) -> dict[str, Tensor]:
        assert not torch.is_grad_enabled()
        self.forwards.append(tokens)
        number = int(tokens.segment_ids_T.max()) + 1
        nothing = torch.zeros(number, dtype=torch.int64)
        return {
            "length": nothing.index_add(0, tokens.segment_ids_T, torch.ones_like(tokens.token_ids_T)).double(),
            "sum": nothing.index_add(0, tokens.segment_ids_T, tokens.token_ids_T).double(),
        }


def made(max_tokens: int = 12, max_positions: int = 0, **tokenizer: Any) -> tuple[RewardTextScorer, Model]:
    model = Model(Tokenizer(**tokenizer), max_positions)
    return RewardTextScorer(cast("RewardModel", model), max_tokens=max_tokens), model


def scored(scorer: RewardTextScorer, *pairs: tuple[str, str]) -> list[dict[str, float] | str]:
    return scorer.score([prompt for prompt, _ in pairs], [()] * len(pairs), [response for _, response in pairs])


def test_texts_fill_forwards_in_order_and_a_long_one_runs_alone() -> None:
    scorer, model = made(max_tokens=12)
    pairs = [("a", "b"), ("b", "ccc"), ("c", "d"), ("d", "e" * 20), ("e", "f"), ("f", "g"), ("g", "h")]
    found = scored(scorer, *pairs)
    assert found == [
        {"sum": 50.0 + END + sum(ord(letter) - 96 for letter in a + b), "length": 2.0 + len(a + b)} for a, b in pairs
    ]
    lengths = [torch.bincount(forward.segment_ids_T).tolist() for forward in model.forwards]
    assert lengths == [[4, 6], [4], [23], [4, 4, 4]]
    assert scorer.heads == ("sum", "length")


def test_a_forward_has_the_texts_one_after_another_and_wants_what_each_has_of_its_own() -> None:
    scorer, model = made(max_tokens=100)
    scored(scorer, ("ab", "c"), ("ab", "dd"), ("ab", "c"), ("b", "c"))
    [forward] = model.forwards
    rows = [[50, 1, 2, 3, END], [50, 1, 2, 4, 4, END], [50, 1, 2, 3, END], [50, 2, 3, END]]
    assert forward.token_ids_T.tolist() == [token for row in rows for token in row]
    assert forward.positions_T.tolist() == [place for row in rows for place in range(len(row))]
    assert forward.segment_ids_T.tolist() == [number for number, row in enumerate(rows) for _ in row]
    assert forward.target_mask_T is not None
    own = [place >= (3 if number < 3 else 0) for number, row in enumerate(rows) for place in range(len(row))]
    assert forward.target_mask_T.tolist() == own
    assert forward.mm_inputs is None


def test_what_the_model_cannot_take_is_said_and_runs_in_no_forward() -> None:
    scorer, model = made(max_tokens=100, max_positions=5)
    found = scored(scorer, ("a", "!"), ("a", "bb"), ("a", "bbb"))
    assert [isinstance(row, str) for row in found] == [True, False, True]
    assert model.forwards[0].num_tokens == 5
    unlimited, _ = made(max_positions=0)
    assert isinstance(scored(unlimited, ("a", "b" * 50))[0], dict)
    empty, model = made(eos_ids=())
    assert [isinstance(row, str) for row in scored(empty, ("", ""), ("a", ""))] == [True, False]
    assert model.forwards[0].token_ids_T.tolist() == [50, 1]


def test_images_for_a_model_of_text_have_no_score() -> None:
    scorer, model = made()
    found = scorer.score(["a", "a"], [(), ()], ["b", "b"], [(b"file",), ()])
    assert [isinstance(row, str) for row in found] == [True, False]
    assert len(model.forwards) == 1


def test_a_text_without_a_template_ends_with_the_first_end_token_once() -> None:
    scorer, _ = made()
    assert scorer.token_ids("a", (), "b") == [50, 1, 2, END]
    assert scorer.token_ids("a", (), "b#") == [50, 1, 2, END]
    assert scorer.token_ids("a#", (), "b") == [50, 1, END, 2, END]
    assert scorer.encode("", (), "") == ([END], None)


def test_a_conversation_is_rendered_with_the_response_as_its_last_turn() -> None:
    scorer, _ = made(template=True)
    turns = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    letters = {letter: ord(letter) - 96 for letter in "abcdefghijklmnopqrstuvwxyz"}
    assert scorer.token_ids("q", turns, "r") == [letters[letter] for letter in "sxuyar"]
    assert scorer.token_ids("q", (), "r") == [letters[letter] for letter in "uqar"]


@pytest.mark.parametrize("size", [8192, 8193])
def test_a_forward_has_up_to_8192_tokens_unless_said(size: int) -> None:
    model = Model(Tokenizer(eos_ids=(), template=True), 0)
    scorer = RewardTextScorer(cast("RewardModel", model))
    scored(scorer, ("", "a" * 4000), ("", "b" * (size - 4004)))
    assert [forward.num_tokens for forward in model.forwards] == ([8192] if size == 8192 else [4002 + 0, size - 4002])


def test_neighbours_share_the_tokens_before_the_first_that_differs() -> None:
    rows = [[1, 2, 3, 4], [1, 2, 5, 4], [1, 2, 3], [7], [7, 8], [9, 9]]
    assert shared_lengths(rows, "aaabbc") == [2, 2, 2, 0, 0, 0]
    assert shared_lengths([[1, 2, 3], [1, 2, 3]], "aa") == [2, 2]
    assert shared_lengths([], "") == []
