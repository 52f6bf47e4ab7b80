"""A decoder with random weights as a recommender: every beam is an item, whatever the width."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rft_core.errors import DataError, OptionsError
from rft_genrec.baselines.counters import Popularity
from rft_genrec.catalogue.minionerec_files import read_dataset
from rft_genrec.catalogue.records import SemanticIds
from rft_genrec.evaluation.model_ranker import ModelRanker, model_directory
from rft_genrec.evaluation.ranking_evaluation import open_ranker
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.settings.catalogue import CatalogueSettings
from rft_genrec.settings.eval import BeamSettings, GenrecEvalSettings, RankedModelSettings
from rft_models.policy.load import load_policy

SEQUENCES = [[39], [39], [38], [5]]
HISTORIES = [[0], [1, 2, 3], [], [39, 36], [7] * 12]


@pytest.fixture(scope="module")
def policy(ring_model: Path):
    return load_policy(ring_model).eval()


@pytest.fixture(scope="module")
def builder(ring: Path) -> PromptBuilder:
    ids = read_dataset(ring).ids
    assert ids is not None
    return PromptBuilder(ids)


def ranker(policy, builder: PromptBuilder, **beams) -> ModelRanker:
    return ModelRanker(policy, builder, Popularity(SEQUENCES, 40), BeamSettings(**beams))


@pytest.mark.parametrize("num_beams", [1, 7, 39, 60])
def test_beams_of_any_width_are_distinct_ids_of_the_catalogue(policy, builder, num_beams: int) -> None:
    for ranking in ranker(policy, builder, num_beams=num_beams).rankings(HISTORIES, list("abcde")):
        # 40 items have 39 IDs
        assert len(ranking.places) == min(num_beams, 39)
        items = [item for place in ranking.places for item in place]
        assert len(set(items)) == len(items)
        assert list(ranking.scores) == sorted(ranking.scores, reverse=True)
        if num_beams >= 39:
            assert sorted(items) == list(range(40))


def test_all_ids_together_have_the_whole_probability(policy, builder) -> None:
    [ranking] = ranker(policy, builder, num_beams=39, beam_mass="allowed").rankings([[4, 5]], ["a"])
    assert torch.tensor(ranking.scores).exp().sum() == pytest.approx(1.0, abs=1e-4)


def test_scores_are_the_log_probabilities_of_the_tokens(policy, builder) -> None:
    [ranking] = ranker(policy, builder, num_beams=5, beam_mass="vocabulary").rankings([[4, 5]], ["a"])
    tokenizer = policy.tokenizer
    prompt = tokenizer.encode(builder.prompt([4, 5]))
    written = [*tokenizer.encode(builder.response(ranking.places[0][0])), tokenizer.eos_ids[0]]
    with torch.no_grad():
        logits = policy.model(torch.tensor([[*prompt, *written]])).logits[0].log_softmax(-1)
    expected = sum(float(logits[len(prompt) - 1 + n, token]) for n, token in enumerate(written))
    assert ranking.scores[0] == pytest.approx(expected, abs=1e-4)


def test_items_of_one_id_come_by_popularity_and_share_its_score(policy, builder) -> None:
    [found] = ranker(policy, builder, num_beams=39).rank([[3]], 40)
    at = found.items.index(39)
    assert found.items[at + 1] == 38
    assert found.scores[at] == found.scores[at + 1]


def test_a_cold_history_is_ranked_by_popularity(policy, builder) -> None:
    [ranking] = ranker(policy, builder, num_beams=2).rankings([[]], ["a"])
    assert ranking.places == ((39, 38), (5,))


def test_batches_rank_every_history_as_alone(policy, builder) -> None:
    small, large = (ranker(policy, builder, num_beams=6, search_batch_size=size) for size in (1, 4))
    ids = list("abcde")
    one = {r.sample_id: r for part in small.batches(HISTORIES, ids) for r in part}
    four = {r.sample_id: r for part in large.batches(HISTORIES, ids) for r in part}
    assert set(one) == set(four) == set(ids)
    for sample_id in ids:
        assert one[sample_id].places == four[sample_id].places
        assert one[sample_id].scores == pytest.approx(four[sample_id].scores, abs=1e-4)


def test_an_unknown_item_is_refused(policy, builder) -> None:
    with pytest.raises(OptionsError, match="holds item 40"):
        ranker(policy, builder).rankings([[40]], ["a"])


def test_what_is_no_item_is_never_a_prediction(policy, builder, monkeypatch: pytest.MonkeyPatch) -> None:
    at_fault = ranker(policy, builder, num_beams=3)
    searched = at_fault._searched

    def twice(prompts, num_beams):
        return [[beams[0], beams[0]] for beams in searched(prompts, num_beams)]

    monkeypatch.setattr(at_fault, "_searched", twice)
    with pytest.raises(DataError, match="comes twice"):
        at_fault.rankings([[1]], ["a"])


def test_a_model_of_other_ids_is_refused(ring: Path, ring_model: Path, builder: PromptBuilder) -> None:
    other = SemanticIds(tuple(reversed(builder.ids.tokens_by_item)))
    settings = GenrecEvalSettings(
        catalogue=CatalogueSettings(catalogue=str(ring)), model=RankedModelSettings(pretrain=str(ring_model))
    )
    with pytest.raises(DataError, match="trained on the IDs"):
        open_ranker(settings, other, Popularity(SEQUENCES, 40), "cpu")


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="is not a directory"):
        model_directory(str(tmp_path / "none"))
