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
