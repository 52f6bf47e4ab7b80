"""A mistyped name finds the one that was meant: by its letters, by its words, and none where nothing is like it."""

from __future__ import annotations

import pytest

from rft_core.nearest_names import nearest_names, similarity

KNOWN = ["rollout_batch_size", "train_batch_size", "max_steps"]


@pytest.mark.parametrize("wrong", ["max_step", "max_setps", "mx_steps", "MAX-STEPS", "max__steps"])
def test_a_slip_of_the_fingers_finds_the_name(wrong: str) -> None:
    assert nearest_names(wrong, KNOWN)[0] == "max_steps"


def test_two_letters_that_changed_places_are_one_slip() -> None:
    assert nearest_names("gpro", ["gdpo", "gspo", "grpo", "gpg"])[0] == "grpo"
    assert similarity("gpro", "grpo") > similarity("gpro", "gspo")
    assert nearest_names("kto", ["kl_cov", "pass_at_k"]) == []


def test_words_that_are_cut_short_find_the_whole_name() -> None:
    assert nearest_names("roll_batch", KNOWN)[0] == "rollout_batch_size"
    assert "rollout_batch_size" not in nearest_names("batch_roll", KNOWN)[:1], "the order of the words counts"


@pytest.mark.parametrize(
    "wrong",
    [
        "micro_batchsize_train",
        "train_micro_batch_size",
        "batch-size-train-micro",
        "MICRO_BATCHSIZE_TRAIN",
        "train_micro_bacth_size",
    ],
)
def test_the_parts_of_a_name_in_another_order_find_it(wrong: str) -> None:
    known = ["micro_rollout_batch_size", "train_batch_size", "micro_batching", "micro_train_batch_size"]
    found = nearest_names(wrong, known)
    assert found[0] == "micro_train_batch_size"
    assert all(similarity(wrong, found[0]) > similarity(wrong, other) for other in found[1:])


def test_parts_that_are_written_together_in_the_known_name_find_it_too() -> None:
    assert nearest_names("top_log_prob", ["logprob_top", "log_top_k"], count=1) == ["logprob_top"]
    assert nearest_names("batch_max", ["max_steps_of_a_batch"], cutoff=0.9) == [], "half of the parts are not there"


def test_a_name_inside_longer_ones_finds_them_and_the_shortest_first() -> None:
    known = ["critic_learning_rate", "learning_rate_of_the_critic", "momentum"]
    assert nearest_names("learning_rate", known) == ["critic_learning_rate", "learning_rate_of_the_critic"]


def test_what_is_like_nothing_finds_nothing_unless_all_is_allowed() -> None:
    assert nearest_names("qqqq", KNOWN) == []
    assert len(nearest_names("qqqq", KNOWN, count=1, cutoff=0.0)) == 1
    assert nearest_names("qqqq", [], cutoff=0.0) == []


def test_the_number_of_names_and_the_least_similarity_are_kept() -> None:
    assert nearest_names("abcd", ["abce", "abcf", "abcg", "abch"], count=2) == ["abce", "abcf"]
    assert nearest_names("abcd", ["abce", "wxyz"], cutoff=0.75) == ["abce"]
    assert nearest_names("abcd", ["abce", "wxyz"], cutoff=0.76) == []
