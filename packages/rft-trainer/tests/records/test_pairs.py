"""Labels of pairs as numbers and back, and whose score is whose."""

from __future__ import annotations

import torch

from rft_trainer.records.pairs import (
    EQUAL,
    FIRST_IS_BETTER,
    SECOND_IS_BETTER,
    UNLABELLED,
    PairLabel,
    PairLabels,
    head_names,
)


def test_labels_come_back_from_their_numbers() -> None:
    rows = [
        PairLabel((FIRST_IS_BETTER, EQUAL), margin=0.5, weight=2.0).as_numbers(),
        PairLabel((SECOND_IS_BETTER, UNLABELLED)).as_numbers(),
    ]
    labels = PairLabels.of(torch.tensor(rows))
    assert labels.margins_P.tolist() == [0.5, 0.0]
    assert labels.weights_P.tolist() == [2.0, 1.0]
    assert labels.decided_PK.tolist() == [[True, False], [True, False]]
    assert labels.tied_PK.tolist() == [[False, True], [False, False]]


def test_scores_change_places_where_the_second_response_is_the_better() -> None:
    labels = PairLabels.of(torch.tensor([PairLabel((1.0, -1.0)).as_numbers()]))
    better, worse = labels.better_first(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    assert (better.tolist(), worse.tolist()) == ([[1.0, 4.0]], [[3.0, 2.0]])


def test_one_head_has_the_metric_itself() -> None:
    assert head_names(["score"], "rm/accuracy") == ["rm/accuracy"]
    assert head_names(["a", "b"], "rm/accuracy") == ["rm/accuracy_a", "rm/accuracy_b"]
