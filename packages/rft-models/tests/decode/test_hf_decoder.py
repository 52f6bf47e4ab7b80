"""What `HfDecoder` asks a transformers backbone, and what it makes of the answer, with a double of one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from rft_core.errors import OptionsError
from rft_models.decode.hf_decoder import HfDecoder
from rft_models.policy.causal_policy import CausalPolicy

VOCAB, WIDTH = 11, 4


class Backbone(nn.Module):
    """One layer without attention: the state of a token is its embedding; what it is called with is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.calls: list[dict[str, Any]] = []

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(self, past_key_values: Any, **given: Any) -> Any:
        self.calls.append(given | {"training": self.dropout.training, "before": past_key_values.get_seq_length()})
        states = self.dropout(self.embedding(given["input_ids"]))
        past_key_values.update(states[:, None], -states[:, None], 0)
        return SimpleNamespace(last_hidden_state=states)


class Model(nn.Module):
    """A causal model around the backbone, in training mode."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.decoder = Backbone()
        self.config = SimpleNamespace(get_text_config=self.text_config, **config)

    def text_config(self, *, decoder: bool) -> Any:
        assert decoder
        return self.config

    def get_decoder(self) -> Backbone:
        return self.decoder


class Head:
    """Logits that are the states beside zeros."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.weight = torch.zeros(VOCAB, WIDTH, dtype=dtype)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return hidden_ND


def made(
    accepted: tuple[str, ...] = ("position_ids", "past_key_values"), dtype: torch.dtype = torch.float32, **config: Any
) -> tuple[HfDecoder, Backbone]:
    torch.manual_seed(0)
    model = Model(**({"max_position_embeddings": 30} | config))
    policy = SimpleNamespace(model=model, head=Head(dtype), tower=None, where="here", accepts=accepted.__contains__)
    return HfDecoder(cast("CausalPolicy", policy)), model.decoder


def columns_of(layer_BGLD: Tensor, backbone: Backbone) -> list[list[int]]:
    """Ids whose embeddings the columns of each row are; -1 where it is zero."""
    table = backbone.embedding.weight.tolist()
    return [[-1 if not any(column) else table.index(column) for column in row] for row in layer_BGLD[:, 0].tolist()]


def test_prompts_are_turned_to_the_right_and_rows_step_at_their_own_positions() -> None:
    decoder, backbone = made()
    cache = decoder.new_cache(4, 6)
    ids = torch.tensor([[3, 4, 5, 9], [6, 9, 9, 9]])
    logits = decoder.prefill(cache, ids, torch.tensor([3, 1]), [1, 2])
    assert torch.equal(logits, backbone.embedding.weight[[5, 6]])
    [call] = backbone.calls
    assert call["input_ids"].tolist() == [[3, 4, 5], [6, 6, 6]]
    assert call["position_ids"].tolist() == [[0, 1, 2], [0, 0, 0]]
    assert call["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert (call["use_cache"], call["training"], call["before"]) == (True, False, 0)
    assert backbone.dropout.training, "as it was"
    assert cache.lengths.tolist() == [3, 1, 1]
    assert cache.offsets.tolist() == [0, 0, 0]
    assert columns_of(cache.keys[0], backbone) == [[3, 4, 5], [6, 6, 6], [6, 6, 6]]
    assert torch.equal(cache.values[0], -cache.keys[0])

    cache.offsets = torch.tensor([0, -1, 2])
    logits = decoder.step(cache, torch.tensor([7, 8, 1]))
    assert torch.equal(logits, backbone.embedding.weight[[7, 8, 1]])
    call = backbone.calls[-1]
    assert call["input_ids"].tolist() == [[7], [8], [1]]
    assert call["position_ids"].tolist() == [[3], [0], [3]]
    assert call["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert (call["use_cache"], call["training"], call["before"]) == (True, False, 3)
    assert cache.lengths.tolist() == [4, 2, 2]
    assert columns_of(cache.keys[0], backbone) == [[3, 4, 5, 7], [6, 6, 6, 8], [6, 6, 6, 1]]
    assert torch.equal(cache.values[0], -cache.keys[0])
    assert not cache.keys[0].requires_grad

    cache.keep(torch.tensor([1]))
    decoder.prefill(cache, torch.tensor([[2, 3]]), torch.tensor([2]), [1])
    assert columns_of(cache.keys[0], backbone) == [[6, 8], [2, 3]]
    assert (cache.lengths.tolist(), cache.offsets.tolist()) == ([2, 2], [-1, 0])


def test_padding_repeats_the_first_token_of_its_own_prompt() -> None:
    decoder, backbone = made()
    ids = torch.tensor([[3, 9, 9], [4, 5, 6], [7, 8, 9]])
    logits = decoder.prefill(decoder.new_cache(3, 4), ids, torch.tensor([1, 3, 2]), [1, 1, 1])
    assert backbone.calls[0]["input_ids"].tolist() == [[3, 3, 3], [4, 5, 6], [7, 7, 8]]
    assert torch.equal(logits, backbone.embedding.weight[[3, 6, 8]])


def test_a_model_that_takes_no_positions_gets_none() -> None:
    decoder, backbone = made(("past_key_values",))
    decoder.prefill(decoder.new_cache(1, 4), torch.tensor([[3]]), torch.tensor([1]), [1])
    assert "position_ids" not in backbone.calls[0]


def test_what_does_not_fit_is_refused_before_the_model_runs() -> None:
    decoder, backbone = made()
    cache = decoder.new_cache(2, 3)
    for lengths, copies in (([4], [1]), ([3], [3])):
        with pytest.raises(ValueError, match="asked for"):
            decoder.prefill(cache, torch.ones(1, 4, dtype=torch.int64), torch.tensor(lengths), copies)
    assert not backbone.calls
    decoder.prefill(cache, torch.ones(1, 2, dtype=torch.int64), torch.tensor([2]), [2])
    decoder.step(cache, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="asked for 2 of 4"):
        decoder.step(cache, torch.tensor([1, 2]))
    assert len(backbone.calls) == 2


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({}, 30),
        ({"max_position_embeddings": None, "n_positions": 20}, 20),
        ({"max_position_embeddings": 10, "n_positions": 20}, 10),
        ({"max_position_embeddings": None}, 0),
    ],
)
def test_a_cache_is_no_longer_than_the_positions_of_the_model(config: dict[str, Any], positions: int) -> None:
    decoder, _ = made(**config)
    assert (decoder.max_positions, decoder.vocab_size) == (positions, VOCAB)
    if positions:
        with pytest.raises(ValueError, match="asked for 0 of"):
            decoder.new_cache(1, positions + 1)
    cache = decoder.new_cache(3, positions or 1000)
    assert (cache.max_rows, cache.max_len) == (3, positions or 1000)


@pytest.mark.parametrize(
    ("config", "heads", "width"),
    [
        ({"num_key_value_heads": 2, "head_dim": 5}, 2, 5),
        ({"num_key_value_heads": None, "head_dim": None}, 4, 6),
        ({}, 4, 6),
    ],
)
def test_the_cache_takes_twice_its_keys_and_values_while_a_step_copies_them(
    config: dict[str, Any], heads: int, width: int
) -> None:
    decoder, _ = made(dtype=torch.bfloat16, num_hidden_layers=3, num_attention_heads=4, hidden_size=24, **config)
    assert decoder.cache_bytes(7, 11, num_prompts=2, prompt_len=3) == 2 * (2 * 3 * 7 * heads * 11 * width * 2)


@pytest.mark.parametrize(
    ("accepted", "layer_types", "is_refused"),
    [
        (("past_key_values",), None, False),
        (("past_key_values",), ["full_attention", "sliding_attention"], False),
        (("past_key_values",), ["full_attention", "linear_attention"], True),
        (("position_ids",), None, True),
    ],
)
def test_layers_without_a_column_a_token_are_refused(
    accepted: tuple[str, ...], layer_types: list[str] | None, is_refused: bool
) -> None:
    if not is_refused:
        made(accepted, layer_types=layer_types)
        return
    with pytest.raises(OptionsError) as caught:
        made(accepted, layer_types=layer_types)
    assert caught.value.problem.code == "models.no_decode"
    assert caught.value.problem.where == "here"
