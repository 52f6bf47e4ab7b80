"""Pooling and heads of a reward model against each segment alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rft_core.errors import OptionsError
from rft_core.keyed_random import derive_key, keyed_normal
from rft_models.reward_model.head import AttentionPooling, ScoreHead, last_tokens, new_head, segment_softmax
from rft_models.reward_model.spec import RewardSpec

WIDTH, SEGMENTS = 6, torch.tensor([0, 0, 0, 1, 2, 2])


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_a_softmax_is_over_the_tokens_of_each_segment() -> None:
    logits = (drawn(6, 2) * 300).requires_grad_()  # powers of which overflow without the maximum
    found = segment_softmax(logits, SEGMENTS, 3)
    for segment in range(3):
        rows = segment == SEGMENTS
        torch.testing.assert_close(found[rows], torch.softmax(logits[rows], 0))
    weights = drawn(6, 2)
    ours = torch.autograd.grad((found * weights).sum(), logits)[0]
    other = sum(
        ((torch.softmax(logits[segment == SEGMENTS], 0) * weights[segment == SEGMENTS]).sum() for segment in range(3)),
        torch.zeros(()),
    )
    torch.testing.assert_close(ours, torch.autograd.grad(other, logits)[0])


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_a_query_attends_to_the_states_of_each_segment(heads: int) -> None:
    pooling, states = AttentionPooling(WIDTH, heads, seed=3), drawn(6, WIDTH)
    found = pooling(states, SEGMENTS, 3)
    size = WIDTH // heads
    for segment in range(3):
        own = states[segment == SEGMENTS]
        keys, values = own @ pooling.key_weight.T, own @ pooling.value_weight.T
        parts: list[Tensor] = []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            weights = torch.softmax(keys[:, part] @ pooling.query[head] / math.sqrt(size), 0)
            parts.append(weights @ values[:, part])
        torch.testing.assert_close(found[segment], pooling.output_weight @ torch.cat(parts))


def test_the_first_weights_follow_from_the_seed_and_have_the_size_of_their_inputs() -> None:
    pooling = AttentionPooling(WIDTH, 2, seed=3)
    for name, shape in (("query", (2, 3)), ("key", (6, 6)), ("value", (6, 6)), ("output", (6, 6))):
        weight = pooling.get_parameter(name if name == "query" else f"{name}_weight")
        expected = keyed_normal(shape, derive_key(3, f"reward-pooling:{name}")) / math.sqrt(shape[1])
        assert torch.equal(weight, expected)
    head = new_head(RewardSpec(heads=("a", "b"), weights=None, pooling="attention", attention_heads=3), WIDTH, seed=3)
    assert torch.equal(head.score.weight, keyed_normal((2, 6), derive_key(3, "reward-head")) / math.sqrt(7))
    assert head.pooling is not None
    assert head.pooling.num_heads == 3
    assert torch.equal(head.pooling.key_weight, pooling.key_weight)
    assert new_head(RewardSpec(), WIDTH, seed=3).pooling is None


def test_queries_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(OptionsError) as caught:
        AttentionPooling(6, 4, seed=0)
    assert caught.value.problem.code == "models.reward_pooling"
    assert caught.value.problem.do == "attention_heads 2"


def test_scores_are_scaled_in_training_alone() -> None:
    weight, pooled = drawn(2, WIDTH), drawn(3, WIDTH)
    plain = ScoreHead(RewardSpec(heads=("a", "b"), weights=None), weight)
    torch.testing.assert_close(plain.train()(pooled), pooled @ weight.T)
    assert plain.score.bias is None
    assert (plain.score.in_features, plain.score.out_features) == (WIDTH, 2)
    assert [name for name, _ in plain.named_parameters()] == ["score.weight"]
    scaled = ScoreHead(RewardSpec(heads=("a", "b"), weights=None, scale_for_train=True), weight)
    torch.testing.assert_close(scaled.eval()(pooled), pooled @ weight.T)
    torch.testing.assert_close(scaled.train()(pooled), pooled @ weight.T / 0.07)
    assert torch.equal(AttentionPooling(WIDTH, 4 // 2, seed=0).query, _attention_head().query)


def _attention_head() -> AttentionPooling:
    """The pooling of a head that is made without a seed."""
    spec = RewardSpec(pooling="attention", attention_heads=2)
    pooling = ScoreHead(spec, drawn(1, WIDTH)).pooling
    assert pooling is not None
    return pooling


def test_nothing_is_drawn_from_the_generator_of_torch() -> None:
    before = torch.get_rng_state()
    new_head(RewardSpec(pooling="attention", attention_heads=2), WIDTH, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("pad", "expected"),
    [(None, [2, 3, 6, 8]), (0, [1, 3, 4, 7]), (5, [2, 3, 6, 8]), (6, [2, 3, 6, 8])],
)
def test_the_last_token_of_a_segment_is_no_padding_and_its_first_where_all_are(
    pad: int | None, expected: list[int]
) -> None:
    ids = torch.tensor([0, 7, 0, 6, 5, 0, 0, 0, 0])
    segments = torch.tensor([0, 0, 0, 1, 2, 2, 2, 3, 3])
    assert last_tokens(ids, segments, 4, pad).tolist() == expected


def test_tokens_of_a_segment_need_not_be_neighbours() -> None:
    ids, segments = torch.tensor([4, 0, 3, 0]), torch.tensor([1, 0, 0, 1])
    assert last_tokens(ids, segments, 2, None).tolist() == [2, 3]
    assert last_tokens(ids, segments, 2, 0).tolist() == [2, 0]
    assert last_tokens(ids.to("meta"), segments.to("meta"), 2, 0).is_meta
