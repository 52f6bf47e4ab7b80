"""One token a row by the definition in float64: what is taken away, which token a uniform gives, and the figures."""

from __future__ import annotations

import math

import pytest
import torch

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_engine.decoding.token_sampler import TokenSampler

VOCAB, ROWS = 9, 12
LOGITS = 2.0 * torch.randn((ROWS, VOCAB), generator=torch.Generator().manual_seed(1))
UNIFORMS = torch.rand(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
CPU = torch.device("cpu")


def kept_of(left: list[float], options: SamplingOptions) -> list[int]:
    """Tokens that may be drawn of these probabilities: top-k, then top-p, then min-p, each of what is left."""
    order = [token for token in sorted(range(VOCAB), key=lambda token: -left[token]) if left[token] > 0.0]
    order = order[: options.top_k] if options.top_k > 0 else order
    order = [token for token in order if left[token] >= options.min_p * left[order[0]]]
    total, so_far, kept = sum(left[token] for token in order), 0.0, list[int]()
    for token in order:
        kept.append(token)
        so_far += left[token]
        if so_far >= options.top_p * total:
            break
    return sorted(kept)


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1.0, max_new_tokens=1),
        SamplingOptions(temperature=0.1, max_new_tokens=1, stop_token_ids=(3,)),
        SamplingOptions(temperature=0.7, max_new_tokens=1, top_k=1, stop_token_ids=(0, 3)),
        SamplingOptions(temperature=1.6, max_new_tokens=1, top_k=4),
        SamplingOptions(temperature=1.3, max_new_tokens=1, top_p=0.6, stop_token_ids=(3, 0, 5)),
        SamplingOptions(temperature=1.0, max_new_tokens=1, min_p=0.05, stop_token_ids=(8,)),
    ],
    ids=range(6),
)
@pytest.mark.parametrize("stops", ["all may", "some may"])
def test_each_row_is_drawn_by_the_definition(options: SamplingOptions, stops: str) -> None:
    sampler = TokenSampler(options, VOCAB, CPU)
    may_stop = [row % 3 == 0 for row in range(ROWS)]
    may_stop_B = torch.tensor(may_stop) if stops == "some may" and options.stop_token_ids else None
    tokens, logprobs, masses = sampler.draw(LOGITS.clone(), UNIFORMS, may_stop_B)
    for row in range(ROWS):
        whole = (LOGITS[row].double() / options.temperature).softmax(-1).tolist()
        is_held = may_stop_B is not None and not may_stop[row]
        left = [0.0 if is_held and token in options.stop_token_ids else whole[token] for token in range(VOCAB)]
        kept = kept_of(left, options)
        mass = sum(whole[token] for token in kept)
        below, drawn = 0.0, kept[-1]
        for token in kept:
            below += whole[token]
            if float(UNIFORMS[row]) * mass < below:
                drawn = token
                break
        assert int(tokens[row]) == drawn
        assert float(logprobs[row]) == pytest.approx(math.log(whole[drawn]), abs=2e-5)
        assert float(masses[row]) == pytest.approx(math.log(mass), abs=2e-5)


@pytest.mark.parametrize("stops", [(), (2, 4, 6)])
def test_greedy_takes_the_likeliest_that_is_allowed_at_temperature_one(stops: tuple[int, ...]) -> None:
    sampler = TokenSampler(SamplingOptions(temperature=0.0, max_new_tokens=1, stop_token_ids=stops), VOCAB, CPU)
    may_stop = [row % 2 == 0 for row in range(ROWS)]
    given = LOGITS.clone()
    tokens, logprobs, masses = sampler.draw(given, UNIFORMS, torch.tensor(may_stop) if stops else None)
    assert torch.equal(given, LOGITS), "the logits are left as they are"
    for row in range(ROWS):
        allowed = [token for token in range(VOCAB) if may_stop[row] or token not in stops]
        best = max(allowed, key=lambda token: float(LOGITS[row, token]))
        assert int(tokens[row]) == best
        assert float(logprobs[row]) == pytest.approx(float(LOGITS[row].double().log_softmax(-1)[best]), abs=1e-5)
    assert masses.tolist() == [0.0] * ROWS


def test_which_tokens_are_stop_tokens() -> None:
    sampler = TokenSampler(SamplingOptions(temperature=1.0, max_new_tokens=1, stop_token_ids=(4, 1, 4)), VOCAB, CPU)
    assert sampler.has_stop_tokens
    assert sampler.is_stop_V.dtype == torch.bool
    assert sampler.is_stop_V.nonzero().flatten().tolist() == [1, 4]
    assert not TokenSampler(SamplingOptions(temperature=1.0, max_new_tokens=1), VOCAB, CPU).has_stop_tokens
