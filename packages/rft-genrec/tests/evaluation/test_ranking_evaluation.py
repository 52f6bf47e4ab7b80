"""An evaluation from settings to files: all methods on the same rows, taken up after a kill, parts in a table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rft.process.machine import Machine
from rft_core.errors import DataError
from rft_dist.collectives import SingleProcess
from rft_dist.launch.environment import ranks_from_environment
from rft_genrec.catalogue.minionerec_files import read_dataset
from rft_genrec.evaluation.model_ranker import ModelRanker
from rft_genrec.evaluation.page import page
from rft_genrec.evaluation.ranking_evaluation import evaluate, fitted_sequences
from rft_genrec.settings.catalogue import CatalogueSettings
from rft_genrec.settings.eval import (
    BaselineSettings,
    BeamSettings,
    GenrecEvalSettings,
    MixtureSettings,
    RankedModelSettings,
    RankedRowsSettings,
    RankingOutputSettings,
)


def machine() -> Machine:
    return Machine("cpu", ranks_from_environment({}), SingleProcess())


def settings_of(ring: Path, model: Path, output: Path) -> GenrecEvalSettings:
    return GenrecEvalSettings(
        catalogue=CatalogueSettings(catalogue=str(ring)),
        model=RankedModelSettings(pretrain=str(model)),
        beams=BeamSettings(num_beams=5, search_batch_size=4),
        rows=RankedRowsSettings(bootstrap_draws=50),
        mixture=MixtureSettings(mix_with="transitions"),
        output=RankingOutputSettings(output=str(output)),
    )


def test_all_methods_are_scored_on_the_same_rows(ring: Path, ring_model: Path, tmp_path: Path) -> None:
    settings = settings_of(ring, ring_model, tmp_path / "out")
    found = evaluate(settings, machine())
    assert [*found.methods] == ["model", "popularity", "first_order", "transitions", "item_knn", "model + transitions"]
    # each item is followed by the next one, which a counter knows and random weights do not
    assert found.methods["first_order"].intervals["HR@1"].estimate > 0.5
    assert found.methods["model"].intervals["HR@1"].estimate < 0.5
    assert found.verdict is not None
    assert found.verdict.weight > 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["n"] == 15
    assert results["fit_on"] == "train"
    assert results["methods"]["model"]["HR@5"]["num"] == 15
    rows = [json.loads(line) for line in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()]
    assert [row["sample_id"] for row in rows] == [sample.sample_id for sample in read_dataset(ring).of("test")]
    assert len(rows[0]["model"]["places"]) == 5
    assert not (tmp_path / "out" / "parts").exists()
    table = "\n".join(page(found, settings))
    assert "15 samples of test, 5 places; baselines and popularity from train" in table
    assert "HR@50" not in table
    assert "mixture with weight" in table


def test_a_killed_evaluation_goes_on_and_ends_with_the_same_rows(
    ring: Path, ring_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(settings_of(ring, ring_model, tmp_path / "out"), mixture=MixtureSettings())
    ranked: list[int] = []
    search = ModelRanker.rankings

    def counted(self, histories, sample_ids, num_beams=0):
        if len(ranked) == 2 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            raise KeyboardInterrupt
        ranked.append(len(histories))
        return search(self, histories, sample_ids, num_beams)

    monkeypatch.setattr(ModelRanker, "rankings", counted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(settings, machine())
    evaluate(settings, machine())
    assert sum(ranked) == 15
    interrupted = (tmp_path / "out" / "predictions.jsonl").read_text()
    evaluate(replace(settings, output=RankingOutputSettings(output=str(tmp_path / "whole"))), machine())
    whole = (tmp_path / "whole" / "predictions.jsonl").read_text()
    assert _places(interrupted) == _places(whole)


def _places(text: str) -> list[object]:
    return [json.loads(line)["model"]["places"] for line in text.splitlines()]


def test_without_a_model_the_baselines_are_scored(ring: Path) -> None:
    settings = GenrecEvalSettings(
        catalogue=CatalogueSettings(catalogue=str(ring)),
        baselines=BaselineSettings(baselines="popularity", fit_on="train+valid"),
        rows=RankedRowsSettings(max_eval_samples=4, bootstrap_draws=10),
    )
    found = evaluate(settings, machine())
    assert [*found.methods] == ["popularity"]
    assert len(found.samples) == 4


def test_what_is_fitted_on_leaves_held_samples_out(ring: Path) -> None:
    dataset = read_dataset(ring)
    assert len(fitted_sequences(dataset, "valid")) == 15
    held = dataset.of("valid")[-5:]
    assert len(fitted_sequences(dataset, "train+valid", held)) == 40
    # the same samples in a copy of the split are left out too
    twice = replace(dataset, samples={"train": dataset.of("valid"), "valid": dataset.of("valid")})
    assert fitted_sequences(twice, "train", held) == fitted_sequences(dataset, "valid", held)
    with pytest.raises(DataError, match="no samples of the split train"):
        fitted_sequences(replace(dataset, samples={}), "train")


def test_a_weight_needs_samples_that_are_not_scored(ring: Path, ring_model: Path, tmp_path: Path) -> None:
    settings = settings_of(ring, ring_model, tmp_path / "out")
    with pytest.raises(DataError, match="split = valid"):
        evaluate(replace(settings, rows=RankedRowsSettings(split="valid", bootstrap_draws=10)), machine())
