"""Checks of what training reveals of the test."""

from rft_genrec.catalogue.records import Sample
from rft_genrec.interactions.leakage import check_leakage


def test_what_the_splits_share_is_counted() -> None:
    found = check_leakage(
        {
            "train": [Sample("train:0", "u", (1,), 2, 50), Sample("train:1", "u", (1, 2), 3, 99)],
            "valid": [],
            "test": [
                Sample("test:0", "u", (1,), 2, 60),
                Sample("test:1", "v", (1,), 9, 70),
                Sample("t:2", "v", (1,), 9, 70),
            ],
        }
    )
    assert found.late_targets == {("train", "test"): 1}
    assert found.shared_samples == {("train", "test"): 1}
    assert found.duplicates == {"train": 0, "test": 1}
    assert found.unseen_items == {"test": 2}
    assert "test targets that training never shows: 2 of 3 (66.7 %)" in [*found.lines()]


def test_without_times_nothing_is_said_of_them() -> None:
    found = check_leakage({"valid": [Sample("v", "u", (1,), 2)], "test": [Sample("t", "u", (1,), 3)]})
    assert found.late_targets == found.unseen_items == {}
