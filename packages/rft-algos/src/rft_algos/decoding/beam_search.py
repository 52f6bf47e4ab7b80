"""One step of a beam search over a finite set of sequences.

A beam is a prefix of some sequence and its score, the sum of log-probs of its tokens. A step
extends every beam by every token that may follow and keeps the K best. Prefixes in a tree are
distinct, so the results are valid and distinct at any width; where there are fewer sequences than
beams, the beams too many stay empty, with a score of -inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rft_algos.decoding.token_trie import ROOT, TokenTrie
from rft_algos.input_checks import refuse

Mass = Literal["vocabulary", "allowed"]
"""What a token's probability is a share of: all tokens, or those that may follow."""


@dataclass(frozen=True, slots=True)
class Beams:
    """The beams of P prompts, K each, best first."""

    scores_PK: Tensor
    """[P, K] sums of log-probs, in nats; -inf where there is no beam."""
    states_PK: Tensor
    """[P, K] int64 states of the tree; the root where there is no beam."""

    @classmethod
    def start(cls, num_prompts: int, device: torch.device | str = "cpu") -> Beams:
        """One empty beam for every prompt, of score 0.

        Args:
            num_prompts: P.
            device: where they are.

        Returns:
            Beams of K = 1.
        """
        states_PK = torch.full((num_prompts, 1), ROOT, device=device)
        return cls(torch.zeros(num_prompts, 1, device=device), states_PK)

    def are_done(self, trie: TokenTrie) -> Tensor:
        """[P, K] bool: the beam is a whole sequence, or there is none."""
        return trie.is_end(self.states_PK) | (self.scores_PK == -torch.inf)


@dataclass(frozen=True, slots=True)
class Expansion:
    """Outcome of one beam-search step."""

    beams: Beams
    parents_PK: Tensor
    """[P, K'] int64: the beam that each one came from, 0 .. K - 1."""
    tokens_PK: Tensor
    """[P, K'] int64: the token that was added; -1 where the beam was whole already, or there is none."""
    logprobs_PK: Tensor
    """[P, K'] log-prob of that token over the whole vocabulary; 0 where none was added."""
    log_mass_PK: Tensor
    """[P, K'] log of the probability of all tokens that could have followed; 0 likewise."""


def expand(
    beams: Beams,
    logprobs_PKV: Tensor,
    trie: TokenTrie,
    width: int,
    *,
    mass: Mass = "vocabulary",
    log_normaliser_PK: Tensor | None = None,
) -> Expansion:
    """Every beam with every token that may follow, the best `width` of each prompt.

    score' = score + log p(token), with p a share of the whole vocabulary or, with mass = "allowed", of what may
    follow. A whole sequence stays as it is and competes with its score. Equal scores keep their order: that of the
    beams, then that of the token ids.

    Args:
        beams: as they are.
        logprobs_PKV: [P, K, V] log-probs of the next token of each beam; not read where beams are done.
        trie: the sequences.
        width: K', how many beams to keep, at least 1.
        mass: what scores are made of.
        log_normaliser_PK: [P, K] what is to be subtracted from `logprobs_PKV`, which are logits then; None = nothing.

    Returns:
        The best beams and where they came from; no gradient.
    """
    if not width >= 1:
        refuse(f"width must be at least 1, it is {width}")
    tokens_PKC, children_PKC, there_PKC = trie.allowed(beams.states_PK)
    found_PKC = logprobs_PKV.detach().gather(-1, tokens_PKC)
    if log_normaliser_PK is not None:
        found_PKC = found_PKC - log_normaliser_PK.detach()[..., None]
    found_PKC = found_PKC.masked_fill(~there_PKC, -torch.inf)
    log_mass_PK = found_PKC.logsumexp(-1)
    gained_PKC = found_PKC if mass == "vocabulary" else found_PKC - log_mass_PK[..., None]
    is_beam_PK = beams.scores_PK > -torch.inf  # where there is none, nothing that the model says counts, NaN included
    gained_PKC = torch.where(there_PKC & is_beam_PK[..., None], gained_PKC, -torch.inf)
    ended_PK = trie.is_end(beams.states_PK)
    # one column more than tokens: a whole sequence stays as it is
    stays_PK1 = torch.where(ended_PK, 0.0, -torch.inf)[..., None]
    candidates_PKC = beams.scores_PK[..., None] + torch.cat([gained_PKC, stays_PK1], -1)
    num_each = candidates_PKC.shape[-1]
    flat = candidates_PKC.flatten(1)
    # a stable sort and not `topk`, which leaves the order of equals open
    scores_PK, order_PK = flat.sort(dim=1, descending=True, stable=True)
    scores_PK, order_PK = scores_PK[:, :width], order_PK[:, :width]
    parents_PK = order_PK // num_each
    column_PK = order_PK % num_each
    is_new_PK = (column_PK < num_each - 1) & (scores_PK > -torch.inf)

    def of_candidates(values_PKC: Tensor) -> Tensor:
        # the last column is no token, so its place is clamped; what is read there is not used
        place_PK = parents_PK * (num_each - 1) + column_PK.clamp(max=num_each - 2)
        return values_PKC.flatten(1).gather(1, place_PK)

    states_PK = torch.where(is_new_PK, of_candidates(children_PKC), beams.states_PK.gather(1, parents_PK))
    # the root is a valid state, so that the next step can look it up
    states_PK = torch.where(scores_PK > -torch.inf, states_PK, ROOT)
    return Expansion(
        Beams(scores_PK, states_PK),
        parents_PK,
        torch.where(is_new_PK, of_candidates(tokens_PKC), -1),
        torch.where(is_new_PK, of_candidates(found_PKC), 0.0),
        torch.where(is_new_PK, log_mass_PK.gather(1, parents_PK), 0.0),
    )
