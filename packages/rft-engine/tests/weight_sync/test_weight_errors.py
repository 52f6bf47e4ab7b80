"""Errors of weights: one code each, with the names, the versions and the way out."""

from __future__ import annotations

import pytest

from rft_core.errors import ServiceError
from rft_engine.weight_sync.weight_errors import (
    first_names,
    incomplete_error,
    parity_error,
    require_version,
    unfinished_error,
)


def test_five_names_are_shown_and_the_others_counted() -> None:
    assert first_names(["a"]) == "a"
    assert first_names(list("abcde")) == "a, b, c, d, e"
    assert first_names(list("abcdefgh")) == "a, b, c, d, e and 3 more"


def test_a_call_for_other_weights_than_the_served_ones_is_refused_with_the_load_that_mends_it() -> None:
    require_version(3, 3)
    for served in (2, 4):
        with pytest.raises(ServiceError) as caught:
            require_version(3, served)
        problem = caught.value.problem
        assert problem.code == "engine.logprob_parity"
        assert problem.do == "load_weights(3)"
        assert problem.what.endswith("version 3 was requested")
        assert problem.where.endswith(f"version {served}")


def test_a_disagreement_of_weights_has_one_code_and_one_reason_unless_another_is_given() -> None:
    fields = {"where": "a restart", "state": "samples are dropped", "do": "load_weights(2)"}
    usual, other = (
        parity_error("they differ", **fields).problem,
        parity_error("they differ", why="a cache", **fields).problem,
    )
    assert usual.code == other.code == "engine.logprob_parity"
    assert (usual.what, usual.where, usual.state, usual.do) == ("they differ", *fields.values())
    assert usual.why != other.why == "a cache"


def test_incomplete_weights_are_named() -> None:
    problem = incomplete_error(
        ["lm_head.weight"], model="the replica's model", where="load", why="in place", state="refuses", do="again"
    ).problem
    assert problem.code == "engine.weights.incomplete"
    assert problem.what.endswith("the replica's model: lm_head.weight")
    assert (problem.where, problem.why, problem.state, problem.do) == ("load", "in place", "refuses", "again")


def test_after_a_broken_load_the_same_version_is_loaded_again_and_a_first_one_by_refresh() -> None:
    assert [unfinished_error(version, "engine").problem.do for version in (0, 7)] == ["refresh()", "load_weights(7)"]
    assert unfinished_error(7, "engine").problem.code == "engine.weights.unfinished"
    assert unfinished_error(7, "engine").problem.where == "engine"
