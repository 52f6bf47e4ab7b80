"""Rows as columns: one length for all, and names that no row has."""

from __future__ import annotations

import pytest

from rft.library.run_columns import RunColumns, UnknownColumn
from rft_core.errors import OptionsError

ROWS = [{"step": 1, "loss": 2.5}, {"step": 2, "kl": 0.0}, {"step": 3, "loss": None, "kl": 0.5}]


def test_every_column_has_a_value_a_row() -> None:
    columns = RunColumns(ROWS)
    assert dict(columns) == {"step": [1, 2, 3], "loss": [2.5, None, None], "kl": [None, 0.0, 0.5]}
    assert (len(columns), columns.num_rows, "loss" in columns, "gain" in columns) == (3, 3, True, False)
    assert columns.pairs("step", "kl") == [(2, 0.0), (3, 0.5)]
    assert repr(columns) == "Columns of 3 rows: step, loss, kl"


def test_no_rows_have_no_columns() -> None:
    columns = RunColumns([])
    assert (list(columns), columns.num_rows, repr(columns)) == ([], 0, "Columns of 0 rows: none")
    with pytest.raises(UnknownColumn) as caught:
        columns["loss"]
    assert (caught.value.problem.why, caught.value.problem.do) == ("there is no row", "")


def test_of_several_figures_of_one_quantity_the_mean_is_proposed() -> None:
    columns = RunColumns([{"reward/max": 1.0, "reward/min": 0.0, "reward/mean": 0.5}], "runs/a/metrics.jsonl")
    with pytest.raises(OptionsError) as caught:
        columns["rewards"]
    assert caught.value.problem.do == "['reward/mean']"
    # nearer by its letters is another one
    columns = RunColumns([{"time/share_reward": 0.1, "reward/max": 1.0, "reward/min": 0.0, "reward/mean": 0.5}], "m")
    with pytest.raises(OptionsError) as caught:
        columns["reward"]
    assert caught.value.problem.do == "['reward/mean']"


@pytest.mark.parametrize(
    ("name", "why", "do"),
    [("los", "the nearest are loss", "['loss']"), ("zzz", "there are step, loss, kl", "")],
)
def test_a_name_that_no_row_has_is_told_with_what_is_near(name: str, why: str, do: str) -> None:
    columns = RunColumns(ROWS, "runs/a/metrics.jsonl")
    with pytest.raises(OptionsError) as caught:
        columns[name]
    problem = caught.value.problem
    assert (problem.code, problem.where, problem.why, problem.do) == ("run.no_column", "runs/a/metrics.jsonl", why, do)
    assert isinstance(caught.value, KeyError)
    assert str(caught.value).startswith(f"no row has a column '{name}'\n")
    assert columns.get(name) is None, "as of any mapping"
