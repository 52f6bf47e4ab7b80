"""Log-probs of responses among the tokens that may follow in a tree of sequences, as they were drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rft_algos.decoding.token_trie import ROOT, TextOf, TokenTrie
from rft_core.packed_tokens import AllowedTokens, PackedTokens
from rft_trainer.protocols import BalanceShare


class ConstrainedPolicy:
    """A policy whose log-probs are those among the tokens that may follow in a tree; all else is the policy's own.

    The targets of a segment are a sequence of the tree from its first token on, as the response to a prompt is.
    """

    def __init__(self, policy: Any, trie: TokenTrie) -> None:
        """Store the policy, whose forwards take `PackedTokens.allowed`."""
        self._policy, self._trie = policy, trie

    def token_logprobs(self, tokens: PackedTokens, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Compute `Policy.token_logprobs` within the tree; entropies are those of what may follow."""
        return self._policy.token_logprobs(self._within(tokens), **options)

    def token_logprobs_and_balance(
        self, tokens: PackedTokens, **options: Any
    ) -> tuple[Tensor, Tensor | None, BalanceShare]:
        """Compute `RoutedPolicy.token_logprobs_and_balance` within the tree."""
        return self._policy.token_logprobs_and_balance(self._within(tokens), **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def _within(self, tokens: PackedTokens) -> PackedTokens:
        if self._trie.tokens_E.device != tokens.token_ids_T.device:
            self._trie = self._trie.to(tokens.token_ids_T.device)
        text = getattr(getattr(self._policy, "tokenizer", None), "decode", None)
        return replace(tokens, allowed=allowed_tokens(tokens, self._trie, text=text))


def allowed_tokens(tokens: PackedTokens, trie: TokenTrie, *, text: TextOf | None = None) -> AllowedTokens:
    """Return the tokens of a tree that each target could have been.

    Args:
        tokens: packed; the targets of a segment are a sequence of the tree, or the beginning of one.
        trie: the tree, on their device.
        text: returns the text of token ids, for an error.

    Returns:
        The tokens of every target, in the order of `targets_T`.

    Raises:
        OptionsError: a target with which no sequence of the tree goes on.
    """
    targets_R = tokens.targets_T.nonzero()[:, 0]
    segments_R, ids_R = tokens.segment_ids_T[targets_R], tokens.token_ids_T[targets_R]
    numbers_R = torch.arange(len(targets_R), device=targets_R.device)
    starts_R = torch.ones_like(segments_R, dtype=torch.bool)
    starts_R[1:] = segments_R[1:] != segments_R[:-1]
    # how many targets of its segment come before each one
    depths_R = numbers_R - torch.where(starts_R, numbers_R, 0).cummax(0).values
    states_R = torch.full_like(ids_R, ROOT)
    for depth in range(1, 1 + int(depths_R.max()) if len(depths_R) else 0):
        here_K = (depths_R == depth).nonzero()[:, 0]
        states_R[here_K] = trie.advance(states_R[here_K - 1], ids_R[here_K - 1], text=text)
    trie.advance(states_R, ids_R, text=text)  # refuses a last token that is not in the tree
    counts_R = trie.offsets_S1[states_R + 1] - trie.offsets_S1[states_R]
    within_E = torch.arange(int(counts_R.sum()), device=counts_R.device)
    within_E = within_E - torch.repeat_interleave(counts_R.cumsum(0) - counts_R, counts_R)
    places_E = torch.repeat_interleave(trie.offsets_S1[states_R], counts_R) + within_E
    return AllowedTokens(trie.tokens_E[places_E], counts_R)
