"""Rows of a step: their weights are 1 on average, their reference is that of their own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rft_trainer.batches.units import units_of
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.scoring.preference_rows import PreferenceRows
from rft_trainer.scoring.reference_logprobs import ReferenceLogprobs
from rft_trainer.testing.bigram import OneRank

WEIGHTS = [1.0, 3.0, 2.0]


def samples(name: str, count: int = 3, size: int = 2) -> list[TrainingSample]:
    made = [(row, part) for row in range(count) for part in range(size)]
    return [
        TrainingSample(f"{name}:{row}/{part}", (9, 10 * row + part + 1, row), 1, WEIGHTS[row], unit=f"{name}:{row}")
        for row, part in made
    ]


def by_token(given: Sequence[TrainingSample]) -> list[tuple[float, ...]]:
    return [tuple(-float(t) for t in sample.token_ids[1:]) for sample in given]


def rows(tmp_path: Path, **more: Sequence[TrainingSample]) -> PreferenceRows:
    reference = ReferenceLogprobs(tmp_path / "x.safetensors", by_token, OneRank(), {})
    made = PreferenceRows(samples=samples("t"), held_out=samples("h", 2), samples_a_row=2, reference=reference, **more)
    made.begin()
    return made


def test_a_step_has_both_samples_of_each_row_with_their_reference(tmp_path: Path) -> None:
    found = rows(tmp_path).of_step([2, 0])
    assert [sample.sample_id for sample in found] == ["t:2/0", "t:2/1", "t:0/0", "t:0/1"]
    assert [sample.reference_logprobs for sample in found] == [(-21.0, -2.0), (-22.0, -2.0), (-1.0, 0.0), (-2.0, 0.0)]


def test_a_row_that_is_drawn_twice_is_two_units(tmp_path: Path) -> None:
    assert [len(unit) for unit in units_of(rows(tmp_path).of_step([1, 1, 0]))] == [2, 2, 2]


def test_weights_are_one_on_average_over_the_step(tmp_path: Path) -> None:
    found = rows(tmp_path).of_step([0, 1])
    assert [sample.advantage for sample in found] == [0.5, 0.5, 1.5, 1.5]


def test_held_out_rows_have_a_table_of_their_own(tmp_path: Path) -> None:
    table = rows(tmp_path).held_out_table()
    assert table is not None
    assert [table.row(i) for i in range(4)] == [(-1.0, 0.0), (-2.0, 0.0), (-11.0, -1.0), (-12.0, -1.0)]


def test_without_a_reference_nothing_is_computed() -> None:
    made = PreferenceRows(samples=samples("t"), held_out=[], samples_a_row=2)
    made.begin()
    assert made.held_out_table() is None
    assert made.of_step([0])[0].reference_logprobs == ()


def test_the_reference_point_is_one_mean_over_the_rows(tmp_path: Path) -> None:
    made = rows(tmp_path, mismatched=samples("m", 3, 1), held_out_mismatched=samples("n", 2, 1))

    def score(given: Sequence[TrainingSample]) -> list[tuple[float, ...]]:
        # the first row 1 nat less likely than under the reference, the others 2 nats more likely
        return [
            (row[0] + (-1.0 if sample.sample_id.endswith(":0/0") else 2.0), row[1])
            for sample, row in zip(given, by_token(given), strict=True)
        ]

    assert made.reference_point(score, [0, 1, 2]) == pytest.approx(1.0)
    assert made.reference_point(score, [0]) == 0.0
    assert made.held_out_reference_point(score) == pytest.approx(0.5)
