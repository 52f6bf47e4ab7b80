"""The tokens that each target was drawn among, walked through a tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import OptionsError
from rft_core.packed_tokens import PackedTokens
from rft_trainer.scoring.constrained_policy import ConstrainedPolicy, allowed_tokens

TRIE = TokenTrie.of([[5, 1, 9], [5, 2, 9], [7, 9]])


def packed(*segments: tuple[list[int], list[int]]) -> PackedTokens:
    """Prompts with their responses, which are the targets."""
    tokens = PackedTokens.of_segments([torch.tensor(prompt + response) for prompt, response in segments])
    mask = [one for prompt, response in segments for one in [False] * len(prompt) + [True] * len(response)]
    return PackedTokens(tokens.token_ids_T, tokens.positions_T, tokens.segment_ids_T, torch.tensor(mask))


def sets_of(tokens: PackedTokens) -> list[list[int]]:
    found = allowed_tokens(tokens, TRIE)
    return [one.tolist() for one in found.ids_E.split(found.counts_R.tolist())]


def test_every_segment_walks_from_the_root() -> None:
    tokens = packed(([3, 5], [5, 2, 9]), ([4], [7, 9]), ([1], []), ([8, 8, 8], [5, 1, 9]))
    assert sets_of(tokens) == [[5, 7], [1, 2], [9], [5, 7], [9], [5, 7], [1, 2], [9]]


def test_neighbouring_segments_without_a_prompt_between_are_told_apart() -> None:
    assert sets_of(packed(([3], [7, 9]), ([3], [7, 9]))) == [[5, 7], [9], [5, 7], [9]]


def test_a_batch_without_targets_has_no_sets() -> None:
    assert sets_of(packed(([3, 4], []))) == []


@pytest.mark.parametrize("response", [[5, 3, 9], [6], [7, 8]])
def test_a_response_that_is_in_no_sequence_is_refused(response: list[int]) -> None:
    with pytest.raises(OptionsError, match="does not continue any sequence"):
        allowed_tokens(packed(([3], response)), TRIE)


def test_a_refusal_shows_the_text_of_the_tokens_where_the_policy_has_a_tokenizer() -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return f"<{ids[0]}>"

    class Policy:
        tokenizer = Tokenizer()

        def token_logprobs(self, tokens: PackedTokens) -> None: ...

    with pytest.raises(OptionsError, match=r"token 3 '<3>' does not .* \[1, 2\], spelt '<1>', '<2>'"):
        ConstrainedPolicy(Policy(), TRIE).token_logprobs(packed(([3], [5, 3, 9])))


def test_forwards_have_the_sets_and_all_else_is_the_policys_own() -> None:
    calls: list[tuple[str, PackedTokens, dict[str, Any]]] = []

    class Policy:
        num_experts = 4

        def token_logprobs(self, tokens: PackedTokens, **options: Any) -> str:
            calls.append(("logprobs", tokens, options))
            return "logprobs"

        def token_logprobs_and_balance(self, tokens: PackedTokens, **options: Any) -> str:
            calls.append(("balance", tokens, options))
            return "balance"

    policy: Any = ConstrainedPolicy(Policy(), TRIE)
    tokens = packed(([3], [7, 9]))
    assert policy.token_logprobs(tokens, temperature=0.5) == "logprobs"
    assert policy.token_logprobs_and_balance(tokens, expert_counts_E=None) == "balance"
    assert [(name, options) for name, _, options in calls] == [
        ("logprobs", {"temperature": 0.5}),
        ("balance", {"expert_counts_E": None}),
    ]
    assert all(one.allowed is not None and one.allowed.ids_E.tolist() == [5, 7, 9] for _, one, _ in calls)
    assert policy.num_experts == 4
    assert tokens.allowed is None
