"""Sampling within a finite set of sequences: allowed tokens, completed rows, refused options.

A row is at a state of the tree; a draw takes it to the next one. The states of all rows are one
tensor, so a step costs a few gathers whatever the size of the tree. Errors are refused at both ends:
options that could cut a sequence are refused, and finished completions are walked through the tree.

Shape letters: B rows, V vocabulary, S states of the tree, C children of the widest state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from rft_algos.decoding import sampling
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import ROOT, TokenTrie
from rft_core.errors import OptionsError, ServiceError
from rft_engine.completions import Completion
from rft_engine.request_checks import unknown_token
from rft_engine.typed_lists import to_ints

States: TypeAlias = Tensor
"""[B] int64 states of a tree."""


class TrieSampler:
    """Draws tokens of a tree under fixed options; both samplers of a call share one tree."""

    def __init__(self, options: SamplingOptions, trie: TokenTrie) -> None:
        """The tree must be on the device of the logits."""
        self._options, self._trie = options, trie
        self.ends_S = trie.is_end(torch.arange(trie.num_states, device=trie.tokens_E.device))
        """[S] bool: a sequence is whole there."""

    @staticmethod
    def start(num_rows: int, device: torch.device) -> States:
        """Return the states of rows that have no token yet."""
        return torch.full((num_rows,), ROOT, device=device)

    def draw(self, logits_BV: Tensor, uniforms_B: Tensor, states_B: States) -> tuple[Tensor, Tensor, Tensor, States]:
        """Draw one token a row.

        Args:
            logits_BV: [B, V] float32.
            uniforms_B: [B] float64 in [0, 1); not used by greedy decoding.
            states_B: states of the rows; a row at the end of its sequence stays there, and its draw is ignored.

        Returns:
            token ids [B] int64, their log-probabilities [B] over the whole vocabulary, the log of the mass they were
            drawn from [B], and the states behind them.
        """
        options = self._options
        allowed_BC, children_BC, there_BC = self._trie.allowed(states_B)
        there_BC[:, 0] = True  # true already but for rows at their end, which would have nothing to draw
        columns_B, logprobs_B, log_kept_mass_B = sampling.draw_allowed(
            logits_BV,
            allowed_BC,
            there_BC,
            uniforms_B,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=max(options.top_k, 0),
            min_p=options.min_p,
        )
        columns_B1 = columns_B[:, None]
        behind_B = torch.where(self.ends_S[states_B], states_B, children_BC.gather(1, columns_B1)[:, 0])
        return allowed_BC.gather(1, columns_B1)[:, 0], logprobs_B, log_kept_mass_B, behind_B


def check_constraint(trie: TokenTrie, options: SamplingOptions, budgets: Sequence[int], vocab_size: int) -> None:
    """Raise `OptionsError` where some sequence of the tree could not be drawn whole."""
    check_vocabulary(trie, vocab_size)
    least = min(budgets, default=options.max_new_tokens)
    if least < trie.depth:
        name = "max_new_tokens" if least == options.max_new_tokens else "a budget"
        what = f"{name} = {least}, the longest sequence of the constraint has {trie.depth} tokens"
        remedy = f"max_new_tokens={trie.depth}" if name == "max_new_tokens" else f"budgets of {trie.depth} or above"
        raise _refusal("budget", what, "a completion is a whole sequence", remedy)
    if options.min_new_tokens >= trie.shortest:
        what = f"min_new_tokens = {options.min_new_tokens}, a sequence of the constraint has {trie.shortest} tokens"
        why = "the last token of a sequence ends it, and min_new_tokens come before the end"
        raise _refusal("min_new_tokens", what, why, f"min_new_tokens={trie.shortest - 1}, or leave short ones out")
    stops = torch.tensor(options.stop_token_ids, dtype=torch.int64, device=trie.tokens_E.device)
    # all edges at once: a stop token is allowed on an edge that completes a sequence only
    goes_on_E = ~trie.is_end(trie.children_E) & torch.isin(trie.tokens_E, stops)
    if bool(goes_on_E.any()):
        token = int(trie.tokens_E[goes_on_E][0])
        what = f"stop token {token} occurs inside a sequence of the constraint"
        raise _refusal("stop_token_ids", what, "it would end the sequence early", "stop_token_ids without it")


def check_vocabulary(trie: TokenTrie, vocab_size: int) -> None:
    """Raise `OptionsError` for a tree with a token that the model does not know."""
    largest = int(trie.tokens_E.max())
    if largest >= vocab_size:
        raise unknown_token("sequence", "the tree", largest, vocab_size)


def end_tokens(trie: TokenTrie) -> list[int]:
    """Tokens at which another engine's loop ends a sequence: none where all have one length, which then ends them.

    Raises:
        OptionsError: lengths differ, and a token ends one sequence and stands within another.
    """
    if trie.shortest == trie.depth:
        return []
    ends_E = trie.is_end(trie.children_E)
    last = sorted(set(to_ints(trie.tokens_E[ends_E])))
    within_E = ~ends_E & torch.isin(trie.tokens_E, torch.tensor(last, device=ends_E.device))
    if bool(within_E.any()):
        what = f"token {int(trie.tokens_E[within_E][0])} ends a sequence of the constraint and occurs inside another"
        why = "this engine ends a sequence by its last token, or all at one length"
        raise _refusal("ends", what, why, "end all sequences with the stop token, or --engine_type native")
    return last


def check_whole(trie: TokenTrie, completions: Sequence[Completion]) -> None:
    """Walk finished completions through the tree, all at once.

    Args:
        trie: the tree that they were drawn within.
        completions: the completions, in any number.

    Raises:
        ServiceError: a completion is no sequence of the tree; nothing that may follow had a probability, so there
            was nothing to draw.
    """
    # before the walk: what is drawn from no mass at all may still be a sequence of the tree
    for number, completion in enumerate(completions):
        if not all(map(math.isfinite, completion.log_kept_mass)):
            finite = [math.isfinite(value) for value in completion.log_kept_mass]
            raise _no_mass(number, list(completion.token_ids[: finite.index(False)]))
    trie = trie.to("cpu")
    states_N = torch.full((len(completions),), ROOT)
    lengths_N = torch.tensor([len(completion.token_ids) for completion in completions])
    is_in_N = torch.ones(len(completions), dtype=torch.bool)
    for step in range(max(to_ints(lengths_N), default=0)):
        going_K = (is_in_N & (lengths_N > step)).nonzero()[:, 0]
        tokens_K = torch.tensor([completions[row].token_ids[step] for row in to_ints(going_K)], dtype=torch.int64)
        allowed_KC, children_KC, there_KC = trie.allowed(states_N[going_K])
        here_KC = there_KC & (allowed_KC == tokens_K[:, None])
        is_in_N[going_K] = here_KC.any(1)
        # at most one child has the token, so the sum is that child
        states_N[going_K] = (children_KC * here_KC).sum(1)
    is_whole_N = is_in_N & trie.is_end(states_N)
    if not bool(is_whole_N.all()):
        number = int((~is_whole_N).nonzero()[0])
        raise _not_whole(number, list(completions[number].token_ids))


def _not_whole(number: int, tokens: list[int]) -> ServiceError:
    return ServiceError(
        code="engine.constraint.not_whole",
        what=f"completion {number}, {tokens[:20]}, is not a sequence of the constraint",
        where="generate(constraint=...)",
        why="every completion must be one of the sequences, complete",
        state="no sample of this call was used",
        do="report this with the names of the model and the engine; try --engine_type native if it is not in use",
    )


def _no_mass(number: int, before: list[int]) -> ServiceError:
    return ServiceError(
        code="engine.constraint.no_mass",
        what=f"completion {number}: the model gives probability 0 or NaN to every token that may follow {before}",
        where=f"generate(constraint=...), token {len(before)} of the completion",
        why="there is nothing to draw from, and a token outside of the constraint is never drawn",
        state="no sample of this call was used",
        do="look for -inf or NaN in the model's logits for the tokens of the constraint",
    )


def _refusal(name: str, what: str, why: str, remedy: str) -> OptionsError:
    return OptionsError(
        code=f"engine.constraint.{name}",
        what=what,
        where="generate(constraint=...)",
        why=why,
        state="nothing was generated",
        do=remedy,
    )
