"""A language model as a recommender: a beam search within the IDs of the catalogue after each history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rft.build.engines import native_engine
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import DataError, OptionsError
from rft_genrec.baselines.recommender import ItemScorer, RankedItems, check_histories
from rft_genrec.evaluation.rankings import Ranking
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.settings.eval import BeamSettings
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.tokenization.added_tokens import token_ids_of
from rft_models.tokenization.tokenizer import HfTokenizer

_PROBED = 8


class ModelRanker:
    """Ranks the IDs of a catalogue by a model's probability of writing them, each followed by the end of a text.

    Beams are whole IDs of the catalogue, each once; more beams than IDs give all IDs. A history without an item has no
    prompt where the template is the IDs alone: it is ranked by popularity.
    """

    def __init__(
        self,
        policy: CausalPolicy,
        builder: PromptBuilder,
        popularity: ItemScorer,
        beams: BeamSettings,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make the tree of IDs and an engine.

        Args:
            policy: the model with its tokenizer.
            builder: that the model was trained with.
            popularity: orders the items of one ID, and ranks for histories that have no prompt.
            beams: width and batch of the searches.
            device: where the model is.

        Raises:
            DataError: the tokenizer has no end of a text, or writes IDs otherwise behind a prompt than alone.
        """
        tokenizer = policy.tokenizer
        assert tokenizer is not None, "a policy that was loaded from a directory has its tokenizer"
        self._tokenizer, self._builder, self._beams = tokenizer, builder, beams
        self._popularity = popularity
        shares_N = popularity.scores([[]])[0]
        self._items: dict[tuple[int, ...], tuple[int, ...]] = {}
        for tokens, (_, items) in zip(id_sequences(tokenizer, builder), builder.ids.items_by_id.items(), strict=True):
            self._items[tokens] = tuple(sorted(items, key=lambda item: (-shares_N[item], item)))
        self.trie = TokenTrie.of([list(tokens) for tokens in self._items])
        self._policy, self._device = policy, device
        self._engine: Any = None
        self._max_len = 0
        self._probe()

    def rank(self, histories: Sequence[Sequence[int]], k: int) -> list[RankedItems]:
        """Return the best k items of every history; items that share an ID have its score, the most popular first."""
        found = self.rankings(histories, [str(number) for number in range(len(histories))], k)
        return [
            RankedItems(
                tuple(ranking.items(k)),
                tuple(score for place, score in zip(ranking.places, ranking.scores, strict=True) for _ in place)[:k],
            )
            for ranking in found
        ]

    def rankings(
        self, histories: Sequence[Sequence[int]], sample_ids: Sequence[str], num_beams: int = 0
    ) -> list[Ranking]:
        """Return the ranking of every history, under the id of its sample; `num_beams` 0 = those of the settings.

        Raises:
            OptionsError: an item that the catalogue lacks, or a prompt that is longer than the model can place.
            DataError: a beam that is no ID of the catalogue or comes twice.
        """
        check_histories(histories, len(self._builder.ids))
        num_beams = num_beams or self._beams.num_beams
        prompts = [self._builder.token_ids(self._tokenizer, history) for history in histories]
        asked = [number for number, prompt in enumerate(prompts) if prompt]
        found: dict[int, Ranking] = {}
        completions = self._searched([prompts[number] for number in asked], num_beams)
        for number, beams in zip(asked, completions, strict=True):
            found[number] = self._ranking(sample_ids[number], beams)
        for number in set(range(len(prompts))) - set(asked):
            found[number] = self._cold(sample_ids[number], num_beams)
        return [found[number] for number in range(len(prompts))]

    def batches(self, histories: Sequence[Sequence[int]], sample_ids: Sequence[str]) -> Iterator[list[Ranking]]:
        """Yield the rankings of all histories, `search_batch_size` of them at a time."""
        step = self._beams.search_batch_size
        # of similar length together: the rows of a search are as long as the longest prompt
        order = sorted(range(len(histories)), key=lambda number: len(histories[number]))
        for start in range(0, len(order), step):
            chosen = order[start : start + step]
            yield self.rankings([histories[n] for n in chosen], [sample_ids[n] for n in chosen])

    def _searched(self, prompts: Sequence[Sequence[int]], num_beams: int) -> list[Any]:
        if not prompts:
            return []
        longest = max(map(len, prompts)) + self.trie.depth
        width = min(num_beams, self.trie.num_sequences)
        rows = width * self._beams.search_batch_size
        if self._engine is None or self._max_len < longest or self._rows < rows:
            if self._engine is not None:
                self._engine.close()
            self._max_len, self._rows = max(longest, self._max_len), rows
            self._engine = native_engine(self._policy, rows, self._max_len, self._device)
        with torch.inference_mode():
            return self._engine.beam_search(prompts, self.trie, num_beams=num_beams, mass=self._beams.beam_mass)

    def _ranking(self, sample_id: str, beams: Sequence[Any]) -> Ranking:
        texts = [tuple(beam.token_ids) for beam in beams]
        if len(set(texts)) < len(texts) or any(text not in self._items for text in texts):
            wrong = next((text for text in texts if text not in self._items), texts[0])
            raise DataError(
                code="genrec.invalid_beam",
                what=f"sample {sample_id}: beam {list(wrong)} is no ID of the catalogue, or comes twice",
                where="the constrained beam search",
                why="every prediction is one item of the catalogue; nothing else is counted as one",
                state="no result was written",
                do="report it with the model: the search is at fault",
            )
        renormalised = self._beams.beam_mass == "allowed"
        scores = tuple(sum(beam.logprobs) - (sum(beam.log_kept_mass) if renormalised else 0.0) for beam in beams)
        return Ranking(sample_id, tuple(self._items[text] for text in texts), scores)

    def _cold(self, sample_id: str, num_beams: int) -> Ranking:
        shares_N = self._popularity.scores([[]])[0]
        places = sorted(self._items.values(), key=lambda items: (-shares_N[list(items)].sum(), items))[:num_beams]
        return Ranking(sample_id, tuple(places), tuple(float(shares_N[list(place)].sum()) for place in places))

    def _probe(self) -> None:
        """Refuse a tokenizer that writes an ID behind a prompt otherwise than alone, as merges across would."""
        if self._builder.template == "chat":
            return
        alone = dict(zip(range(len(self._builder.ids)), self._builder.ids.tokens_by_item, strict=True))
        for item in list(alone)[:_PROBED]:
            prompt = self._builder.token_ids(self._tokenizer, [item])
            whole = self._tokenizer.encode(
                self._builder.prompt([item]) + self._builder.response(item), add_special_tokens=True
            )
            own = token_ids_of(self._tokenizer, alone[item])
            if whole[: len(prompt) + len(own)] != [*prompt, *own]:
                raise DataError(
                    code="genrec.joined_tokens",
                    what=f"the tokenizer writes the ID of item {item} otherwise behind a prompt: {whole[len(prompt) :]}",
                    where=self._tokenizer.where,
                    why="the model would be searched for tokens that it was not trained to write",
                    do="--pretrain with a model that `rft-train genrec sft` has trained on this catalogue",
                )


def id_sequences(tokenizer: HfTokenizer, builder: PromptBuilder) -> list[tuple[int, ...]]:
    """Return the tokens of each distinct ID in the order of `items_by_id`, each with the end of a text.

    Raises:
        DataError: a token of an ID is not one token of the model, or the tokenizer has no end of a text.
    """
    if not tokenizer.eos_ids:
        raise DataError(
            code="genrec.no_end_token",
            what="the tokenizer has no token for the end of a text",
            where=tokenizer.where,
            why="it ends each ID, so that one which begins another can be told from it",
            do="--pretrain with a model whose tokenizer_config.json names an eos_token",
        )
    vocabulary = builder.ids.vocabulary
    number = dict(zip(vocabulary, token_ids_of(tokenizer, vocabulary), strict=True))
    end = tokenizer.eos_ids[0]
    return [(*(number[token] for token in tokens), end) for tokens in builder.ids.items_by_id]


def model_directory(pretrain: str) -> Path:
    """Return the directory of the model.

    Raises:
        OptionsError: it is not there.
    """
    path = Path(pretrain).expanduser()
    if not path.is_dir():
        raise OptionsError(
            code="genrec.no_model",
            what=f"{path} is not a directory",
            where="--pretrain",
            why="a model that was trained on IDs lies in a directory with its tokenizer and genrec.json",
            do="--pretrain RUN/checkpoints/step_000100/model",
        )
    return path
