"""Beam search over a finite set of sequences, on a model's own decode forward.

One prefill a prompt; after each step the rows of the cache follow the beams that were kept. All
prompts of a call have the same number of rows, so that a step has one shape: rows without a beam,
and rows whose sequence is complete, are computed and not read.

Shape letters: P prompts of one search, K beams, V vocabulary, T tokens so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rft_algos.decoding import sampling
from rft_algos.decoding.beam_search import Beams, Expansion, Mass, expand
from rft_algos.decoding.token_trie import TokenTrie
from rft_engine.completions import Completion
from rft_engine.decoding.trie_constraint import check_vocabulary
from rft_engine.protocols import CacheT, DecodableModel
from rft_engine.request_checks import refusal
from rft_engine.typed_lists import to_floats, to_ints


class BeamSearch:
    """Beam search within one tree: width, temperature and the mass by which beams are scored."""

    def __init__(self, trie: TokenTrie, num_beams: int, temperature: float, mass: Mass) -> None:
        self.trie, self.temperature = trie, temperature
        self.mass: Mass = mass
        self.width = min(num_beams, trie.num_sequences)  # more beams than sequences stay empty
        self.num_steps = 0

    def check(self, num_beams: int, max_rows: int, vocab_size: int) -> None:
        """Raise `OptionsError` for what cannot be searched with so many rows and tokens."""
        if num_beams < 1:
            raise refusal("engine.num_beams", f"num_beams = {num_beams}", "at least one is needed", "num_beams=1")
        if not 0.0 < self.temperature < math.inf:
            what = f"temperature = {self.temperature}"
            raise refusal("engine.beam_temperature", what, "beams are ranked by probability", "temperature=1.0")
        if self.width > max_rows:
            what = f"{self.width} beams of one prompt; the engine decodes {max_rows} sequences at once"
            raise refusal("engine.num_beams", what, "all beams of a prompt are decoded together", "a higher max_rows")
        check_vocabulary(self.trie, vocab_size)

    def run(
        self,
        model: DecodableModel[CacheT],
        cache: CacheT,
        prompts: Sequence[Sequence[int]],
        weight_version: int,
        device: torch.device,
    ) -> list[list[Completion]]:
        """Return the best sequences of each prompt, best first; `width` rows a prompt must fit into the cache."""
        lengths = [len(prompt) for prompt in prompts]
        tokens_PL = torch.zeros((len(prompts), max(lengths)), dtype=torch.int64)
        for row, prompt in zip(tokens_PL, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        logits = model.prefill(cache, tokens_PL.to(device), torch.tensor(lengths, device=device), [1] * len(prompts))
        beams, history = Beams.start(len(prompts), device), _History.empty(len(prompts), device)
        while True:
            # a sum over the vocabulary and a few logits of each row: nothing of the size of the logits is written
            step = expand(
                beams,
                (logits if self.temperature == 1.0 else logits / self.temperature).view(*beams.scores_PK.shape, -1),
                self.trie,
                self.width,
                mass=self.mass,
                log_normaliser_PK=sampling.log_normaliser(logits, self.temperature).view_as(beams.scores_PK),
            )
            history = history.after(step)
            if bool(step.beams.are_done(self.trie).all()):
                return history.completions(step.beams, weight_version)
            # the cache still has the old width: one row a prompt before the first step, `width` of them after it
            first_row_P1 = torch.arange(len(prompts), device=device)[:, None] * beams.scores_PK.shape[1]
            # rows of the cache must follow the beams before the next step reads them
            cache.select((first_row_P1 + step.parents_PK).flatten())
            # rows that are complete or empty have token -1, and any id will do: their logits are not read
            logits = model.step(cache, step.tokens_PK.clamp(min=0).flatten())
            beams = step.beams
            self.num_steps += 1


class _History:
    """[P, K, T] of every beam: its tokens (-1 behind its end), their log-probs, the log of the mass allowed."""

    def __init__(self, tokens: Tensor, logprobs: Tensor, log_mass: Tensor) -> None:
        self._tokens, self._logprobs, self._log_mass = tokens, logprobs, log_mass

    @classmethod
    def empty(cls, num_prompts: int, device: torch.device) -> _History:
        nothing = torch.zeros((num_prompts, 1, 0), device=device)
        return cls(nothing.long(), nothing, nothing)

    def after(self, step: Expansion) -> _History:
        """Return the history with the tokens of one more step, in the order of its beams."""
        added = (step.tokens_PK, step.logprobs_PK, step.log_mass_PK)
        old = (self._tokens, self._logprobs, self._log_mass)
        # a beam's past is that of its parent, which several beams may share
        parents_PKT = step.parents_PK[..., None].expand(-1, -1, self._tokens.shape[2])
        return _History(
            *(torch.cat([o.gather(1, parents_PKT), a[..., None]], 2) for o, a in zip(old, added, strict=True))
        )

    def completions(self, beams: Beams, weight_version: int) -> list[list[Completion]]:
        """Return the beams as records on the host; empty beams are left out."""
        # one copy to the host for each table, not one for each beam
        is_beam_PK = (beams.scores_PK > -torch.inf).cpu()
        tokens, logprobs, log_mass = self._tokens.cpu(), self._logprobs.cpu(), self._log_mass.cpu()
        lengths_PK = (tokens >= 0).sum(2)
        completions_by_prompt: list[list[Completion]] = []
        for prompt in range(tokens.shape[0]):
            completions_by_prompt.append([])
            for beam in to_ints(is_beam_PK[prompt].nonzero()[:, 0]):
                index = prompt, beam, slice(int(lengths_PK[prompt, beam]))
                completions_by_prompt[-1].append(
                    Completion(
                        token_ids=tuple(to_ints(tokens[index])),
                        logprobs=tuple(to_floats(logprobs[index])),
                        log_kept_mass=tuple(to_floats(log_mass[index])),
                        finish_reason="stop",
                        weight_version=weight_version,
                    )
                )
        return completions_by_prompt
