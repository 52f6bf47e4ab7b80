"""Items, IDs and samples."""

from rft_genrec.catalogue.records import Sample, SemanticIds, user_sequences


def test_items_that_share_an_id_are_found() -> None:
    ids = SemanticIds((("<a_1>", "<b_0>"), ("<a_0>", "<b_0>"), ("<a_1>", "<b_0>")))
    assert ids.items_by_id == {("<a_1>", "<b_0>"): (0, 2), ("<a_0>", "<b_0>"): (1,)}
    assert ids.vocabulary == ("<a_0>", "<a_1>", "<b_0>")
    assert ids.collision_rate == 1 / 3
    assert ids.text(1) == "<a_0><b_0>"


def test_histories_that_were_cut_are_joined_where_they_overlap() -> None:
    samples = [
        Sample("1", "u", (1, 2), 3),
        Sample("2", "u", (2, 3), 4),
        Sample("3", "v", (), 9),
        Sample("4", "u", (2,), 3),
    ]
    assert user_sequences(samples) == {"u": (1, 2, 3, 4), "v": (9,)}
    assert user_sequences(samples, with_targets=False) == {"u": (1, 2, 3)}
