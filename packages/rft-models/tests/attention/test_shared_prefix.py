"""A prompt that several segments share: what is shared and what is not. Equality is in test_equality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.packed_tokens import PackedTokens
from rft_models.attention.shared_prefix import find_shared_prefixes
from rft_models.policy.load import make_policy

VOCAB = 61
Build = Callable[..., Any]
Batch = tuple[Tensor, Tensor, Tensor, Tensor]

# (prompt number, prompt length, response length): two groups of one shape, two ragged ones, and segments between them
ROWS = (
    *((0, 9, 4), (0, 9, 4), (0, 9, 4), (1, 5, 3), (2, 5, 2), (3, 7, 1), (3, 7, 6), (3, 7, 2)),
    *((4, 9, 4), (4, 9, 4), (4, 9, 4), (5, 7, 3), (5, 7, 1), (5, 7, 2)),
)


def grouped_batch(rows: tuple[tuple[int, int, int], ...] = ROWS) -> Batch:
    generator = torch.Generator().manual_seed(5)
    prompts = {
        number: torch.randint(0, VOCAB, (length,), generator=generator) for number, length, _ in dict.fromkeys(rows)
    }
    for number, length, _ in rows:
        prompts[number] = prompts[number][:length]
    parts = [torch.cat([prompts[n], torch.randint(0, VOCAB, (r,), generator=generator)]) for n, _, r in rows]
    lengths = torch.tensor([len(part) for part in parts])
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    segments = torch.repeat_interleave(torch.arange(len(parts)), lengths)
    return torch.cat(parts), positions, segments, positions >= torch.tensor([p for _, p, _ in rows])[segments]


def test_each_prompt_runs_once() -> None:
    shared = find_shared_prefixes(*grouped_batch())
    assert shared is not None
    assert shared.kept_K.shape[0] == 2 * (9 + 3 * 4) + (5 + 3) + (5 + 2) + (7 + 1 + 6 + 2) + (7 + 3 + 1 + 2)
    assert len(shared.layout.responses) == 12


def test_a_token_has_the_state_of_an_equal_token_at_the_same_place() -> None:
    ids, positions, segments, wanted = grouped_batch()
    shared = find_shared_prefixes(ids, positions, segments, wanted)
    assert shared is not None
    torch.testing.assert_close(ids[shared.kept_K][shared.place_T], ids)
    torch.testing.assert_close(positions[shared.kept_K][shared.place_T], positions)
    assert shared.place_T[wanted].unique().numel() == int(wanted.sum()), "responses share nothing"


@pytest.mark.parametrize("change", ["token", "position", "length"])
def test_prompts_that_differ_in_anything_are_not_shared(change: str) -> None:
    ids, positions, segments, wanted = grouped_batch(((0, 9, 4), (0, 9, 4)))
    if change == "token":
        ids[13 + 8] = (ids[13 + 8] + 1) % VOCAB
    elif change == "position":
        positions[13:] += 1
    else:
        wanted[13 + 8] = True
    assert find_shared_prefixes(ids, positions, segments, wanted) is None


def test_segments_without_a_wanted_token_share_nothing() -> None:
    ids, positions, segments, wanted = grouped_batch(((0, 9, 4), (0, 9, 4)))
    assert find_shared_prefixes(ids, positions, segments, torch.zeros_like(wanted)) is None


def test_little_repetition_is_left_alone() -> None:
    assert find_shared_prefixes(*grouped_batch(((0, 1, 30), (0, 1, 30)))) is None


def test_with_dropout_each_copy_of_a_prompt_draws_its_own(tiny_model: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(tiny_model("qwen2", attention_dropout=0.5), None, packed=True)
    asked: list[bool] = []

    def noted(*batch: Tensor) -> None:
        asked.append(True)

    monkeypatch.setattr("rft_models.backbone.backbone.find_shared_prefixes", noted)
    policy.train().token_logprobs(PackedTokens(*grouped_batch()))
    assert not asked
    policy.eval().token_logprobs(PackedTokens(*grouped_batch()))
    assert asked
