"""A finite set of sequences as a logits processor of transformers' `generate`, for sampling and for beam search.

It knows the tree and where the prompt ends, and reads the prefix of every row from the tokens that it is called with.
So nothing is kept between calls, one processor serves any number of `generate` calls on the same inputs, and neither a
model's name nor its tokenizer has a part in it. torch alone is imported.

Shape letters: B prompts, R rows (B times the beams or the samples of a prompt), L tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft_algos.decoding.token_trie import ROOT, TokenTrie
from rft_engine.decoding.trie_constraint import check_vocabulary
from rft_engine.request_checks import refusal
from rft_engine.typed_lists import to_ints


class ConstrainedLogitsProcessor:
    """Lets every row go on with tokens of the tree only; every other token gets -inf.

    A row whose sequence is whole goes on with the end token. So does a row whose tokens are no prefix of the tree,
    which is what beam search fills its rows with where the tree has fewer sequences than there are beams: it ends at
    once, with the score of -inf that it has already. `sequences` leaves such rows out.

    Example::

        processor = ConstrainedLogitsProcessor(trie, inputs["input_ids"], eos_token_id=tokenizer.eos_token_id)
        found = model.generate(**inputs, logits_processor=[processor], num_beams=50, num_return_sequences=50)
        best = processor.sequences(found)
    """

    def __init__(self, trie: TokenTrie, input_ids: Tensor, *, eos_token_id: int) -> None:
        """Store the tree and the length of the prompts.

        Args:
            trie: the sequences; each ends with the end token where lengths differ.
            input_ids: [B, L] the prompts of the call as `generate` gets them, padded on the left: their padded length
                is where the responses begin.
            eos_token_id: the end token, one of those that end a generation.

        Raises:
            OptionsError: prompts that are not [B, L].
        """
        if input_ids.dim() != 2:
            what = f"input_ids of shape {list(input_ids.shape)}"
            raise refusal("engine.processor_inputs", what, "prompts are rows of one length", "input_ids of [B, L]")
        self.prompt_length, self.num_prompts = input_ids.shape[1], input_ids.shape[0]
        self.eos_token_id = eos_token_id
        self._trie = trie

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Give -inf to every token with which no sequence goes on.

        Args:
            input_ids: [R, L + n] prompts and what was generated.
            scores: [R, V] logits or log-probs of the next token.

        Returns:
            [R, V]: the scores of the tokens that may follow as they are, the end token of a row that has ended at 0.

        Raises:
            OptionsError: tokens shorter than the prompts, or a tree with a token that the scores lack.
        """
        generated_RN = input_ids[:, self.prompt_length :]
        if input_ids.shape[1] < self.prompt_length:
            what = f"rows of {input_ids.shape[1]} tokens, prompts of {self.prompt_length}"
            why = "the responses begin behind the prompts that the processor was made for"
            raise refusal("engine.processor_inputs", what, why, "a processor of these inputs")
        trie = self._on(scores.device)
        check_vocabulary(trie, scores.shape[1])
        states_R, is_prefix_R = walk(trie, generated_RN)
        tokens_RC, _, there_RC = trie.allowed(states_R)
        there_RC &= is_prefix_R[:, None]
        left_RC = scores.gather(1, tokens_RC).masked_fill(~there_RC, -torch.inf)
        # the largest and not the last written, because unused places stand for token 0 as well
        left_RV = torch.full_like(scores, -torch.inf).scatter_reduce_(1, tokens_RC, left_RC, "amax")
        has_ended_R = ~is_prefix_R | trie.is_end(states_R)
        left_RV[:, self.eos_token_id].masked_fill_(has_ended_R, 0.0)
        return left_RV

    def sequences(self, output_ids: Tensor) -> list[list[tuple[int, ...]]]:
        """The whole sequences that `generate` returned for each prompt.

        Args:
            output_ids: [R, L + n] as `generate` returned it, R a multiple of the number of prompts.

        Returns:
            For each prompt its distinct sequences, in the order of the rows; fewer than rows where the tree has fewer
            sequences than there were beams.
        """
        trie = self._trie.to("cpu")
        generated_RN = output_ids[:, self.prompt_length :].cpu()
        # a row is as long as its sequence: what comes behind is padding, which may be any token
        states_R, lengths_R = _to_ends(trie, generated_RN)
        num_rows = output_ids.shape[0] // self.num_prompts
        found: list[dict[tuple[int, ...], None]] = [{} for _ in range(self.num_prompts)]
        for row in to_ints(trie.is_end(states_R).nonzero()[:, 0]):
            found[row // num_rows][tuple(to_ints(generated_RN[row, : int(lengths_R[row])]))] = None
        return [list(sequences) for sequences in found]

    def _on(self, device: torch.device) -> TokenTrie:
        if self._trie.tokens_E.device != device:
            self._trie = self._trie.to(device)
        return self._trie


def walk(trie: TokenTrie, tokens_RN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states that rows of tokens lead to; tokens behind the end of a sequence are not read.

    Args:
        trie: the tree, on the device of the tokens.
        tokens_RN: [R, N] int64.

    Returns:
        [R] int64 states, the root where tokens are no prefix; [R] bool: they are one.
    """
    states_R = torch.full(tokens_RN.shape[:1], ROOT, device=tokens_RN.device)
    is_prefix_R = torch.ones_like(states_R, dtype=torch.bool)
    for tokens_R in tokens_RN.unbind(1):
        behind_R, goes_on_R = _step(trie, states_R, tokens_R)
        has_ended_R = trie.is_end(states_R) & is_prefix_R
        is_prefix_R &= goes_on_R | has_ended_R
        states_R = torch.where(has_ended_R, states_R, behind_R)
    return torch.where(is_prefix_R, states_R, ROOT), is_prefix_R


def _to_ends(trie: TokenTrie, tokens_RN: Tensor) -> tuple[Tensor, Tensor]:
    """[R] states and [R] the number of tokens up to the end of a sequence; the root where there is no whole one."""
    states_R, is_prefix_R = walk(trie, tokens_RN)
    lengths_R = torch.zeros_like(states_R)
    here_R = torch.full_like(states_R, ROOT)
    for tokens_R in tokens_RN.unbind(1):
        lengths_R += ~trie.is_end(here_R)
        here_R = torch.where(trie.is_end(here_R), here_R, _step(trie, here_R, tokens_R)[0])
    return torch.where(is_prefix_R, states_R, ROOT), lengths_R


def _step(trie: TokenTrie, states_R: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor]:
    """[R] states behind one token more, the root where there is none; [R] bool: there is one."""
    tokens_RC, children_RC, there_RC = trie.allowed(states_R)
    here_RC = there_RC & (tokens_RC == tokens_R[:, None])
    # at most one child has the token, so the sum is that child
    return (children_RC * here_RC).sum(1), here_RC.any(1)
