"""Sequences, samples and splits."""

from interaction_rows import table

from rft_genrec.catalogue.records import Sample
from rft_genrec.interactions.splits import Shares, numbered, samples_of, split_by_time, split_last_out


def test_numbers_are_in_the_order_of_first_appearance() -> None:
    sequences = numbered(table("bob saw 5", "ann axe 1", "bob nail 2", "ann saw 1", "bob saw 2"))
    assert sequences.user_names == ("bob", "ann")
    # bob's sequence names nail first; of one time the order of the file holds
    assert sequences.item_names == ("nail", "saw", "axe")
    assert sequences.items == ((0, 1, 1), (2, 1))
    assert sequences.times == ((2, 2, 5), (1, 1))
    assert numbered(table()).items == ()


def test_histories_are_cut_to_their_newest_items() -> None:
    sequences = numbered(table(*(f"a i{number} {number}" for number in range(5))))
    histories = [sample.history for _, sample in samples_of(sequences, 2)]
    assert histories == [(0,), (0, 1), (1, 2), (2, 3)]


def test_samples_are_divided_by_the_times_of_their_targets() -> None:
    rows = [f"a i{number} {2 * number}" for number in range(11)] + [
        f"b i{number} {2 * number + 1}" for number in range(11)
    ]
    samples = split_by_time(numbered(table(*rows)), 10, Shares())
    assert [len(samples[split]) for split in ("train", "valid", "test")] == [16, 2, 2]
    times = [sample.time for split in ("train", "valid", "test") for sample in samples[split]]
    assert times == sorted(times)
    assert samples["test"][1] == Sample("test:1", "A1", tuple(range(10)), 10, 21)
    without = split_by_time(numbered(table(*rows)), 10, Shares(valid=0, test=0.5))
    assert [len(rows) for rows in without.values()] == [10, 0, 10]


def test_the_last_items_of_every_user_are_left_out() -> None:
    samples = split_last_out(numbered(table("a x 1", "a y 2", "a z 3", "a w 4", "b x 1", "b y 2", "c x 1")), 10)
    assert {split: [(s.user, s.target) for s in rows] for split, rows in samples.items()} == {
        "train": [("A0", 1), ("A1", 1)],
        "valid": [("A0", 2)],
        "test": [("A0", 3)],
    }
