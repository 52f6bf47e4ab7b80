"""Noise on embeddings: its size, and that it follows from the sample alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rft_core.packed_tokens import PackedTokens
from rft_models.layers.embedding_noise import EmbeddingNoise
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_tokenizer, build_decoder

WIDTH = 4096
FIRST, SECOND = torch.tensor([5, 6, 7, 8]), torch.tensor([5, 6, 9])


def noise_of(*segments: Tensor, alpha: float = 5.0, update: int = 0, key: int = 3) -> Tensor:
    """[T, D] noise of packed segments."""
    tokens = PackedTokens.of_segments(segments)
    noise = EmbeddingNoise(alpha, key)
    noise.update = update
    rows = noise.rows(tokens.token_ids_T, tokens.positions_T, tokens.segment_ids_T)
    return rows.added_to(torch.zeros(tokens.num_tokens, WIDTH))


def test_it_is_uniform_up_to_alpha_over_the_root_of_length_times_width() -> None:
    found, bound = noise_of(FIRST), 5.0 / (4 * WIDTH) ** 0.5
    assert found.abs().max() <= bound
    assert found.abs().max() > 0.999 * bound
    # 16,384 draws: the mean of their squares is that of a uniform within three of its deviations
    assert float(found.square().mean()) == pytest.approx(bound**2 / 3, rel=0.025)
    assert float(found.mean()) == pytest.approx(0.0, abs=3 * bound / 3**0.5 / 128)
    assert torch.allclose(noise_of(FIRST, alpha=10.0), 2 * found)
    assert noise_of(SECOND).abs().max() > 1.1 * bound, "a shorter sample has more"


def test_it_follows_from_sample_place_step_and_key_and_from_nothing_else() -> None:
    alone, other = noise_of(FIRST), noise_of(SECOND)
    assert torch.equal(noise_of(SECOND, FIRST), torch.cat([other, alone]))
    assert torch.equal(noise_of(FIRST, FIRST), torch.cat([alone, alone]))
    rows = [alone[0], alone[1], other[0], other[1], noise_of(FIRST, update=1)[0], noise_of(FIRST, key=4)[0]]
    for number, row in enumerate(rows):
        for later in rows[number + 1 :]:
            assert abs(float(torch.corrcoef(torch.stack([row, later]))[0, 1])) < 0.1


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> CausalPolicy:
    """A decoder of one layer."""
    path = tmp_path_factory.mktemp("model") / "m"
    sizes: dict[str, int] = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 16, "max_positions": 32}
    build_decoder(path, build_character_tokenizer("abcdefgh"), **sizes, seed=0)
    return load_policy(path)


def test_a_policy_has_it_while_gradients_are_taken_and_in_any_cut(policy: CausalPolicy) -> None:
    def logprobs(*segments: Tensor) -> list[Tensor]:
        tokens = PackedTokens.of_segments(segments)
        return list(policy.token_logprobs(tokens)[0].detach().split([len(segment) for segment in segments]))

    policy.model.train()
    (plain,) = logprobs(FIRST)
    policy.backbone.noise = EmbeddingNoise(20.0, 3)
    try:
        alone, other = logprobs(FIRST)[0], logprobs(SECOND)[0]
        assert not torch.allclose(alone, plain, atol=1e-4)
        # the common beginning of both is not computed once: each has noise of its own
        for found, expected in zip(logprobs(FIRST, SECOND, FIRST), [alone, other, alone], strict=True):
            assert torch.allclose(found, expected, atol=1e-6)
        with torch.no_grad():
            assert torch.allclose(logprobs(FIRST)[0], plain, atol=1e-6)
        policy.model.eval()
        assert torch.allclose(logprobs(FIRST)[0], plain, atol=1e-6)
    finally:
        policy.backbone.noise = None
