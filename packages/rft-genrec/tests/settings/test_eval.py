"""Contradictions of the settings of `genrec eval`, and its places."""

from __future__ import annotations

import pytest

from rft.config.errors import SettingsError
from rft_cli.config.resolve import resolve
from rft_genrec.settings.eval import RankedRowsSettings


def test_places_are_sorted_and_distinct() -> None:
    assert RankedRowsSettings(ks="10, 1,10").places == (1, 10)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--ks 0", "genrec.ks"),
        ("--ks a", "genrec.ks"),
        ("--baselines populerity", "genrec.baseline"),
        ("--pretrain m --mix_with transitions,item_knn", "genrec.mix_one"),
        ("--mix_with transitions", "genrec.mix_model"),
        ("--baselines=", "genrec.nothing"),
        ("--pretrain m --mix_weight 0.5", "genrec.mix_weight"),
        ("--split valid --fit_on train+valid", "genrec.fit_on"),
        ("--sasrec dir", "genrec.sasrec"),
    ],
)
def test_what_contradicts_is_refused(words: str, code: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve("genrec-eval", ["--catalogue", "c", *words.split()])
    assert [problem.code for problem in caught.value.problems] == [code]


def test_what_agrees_is_taken() -> None:
    words = "--catalogue c --pretrain m --mix_with sasrec --sasrec dir --mix_weight 0.5"
    assert resolve("genrec-eval", words.split()).settings.mixture.mix_weight == 0.5


@pytest.mark.parametrize(
    ("devices", "words", "num"), [("0,1,2", "", 3), ("0,1", "--nproc 4", 4), ("1", "", 0), ("0,1", "--device cpu", 0)]
)
def test_there_is_a_rank_for_each_visible_device(
    devices: str, words: str, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    given = ["--catalogue", "c", "--pretrain", "m", *words.split()]
    assert resolve("genrec-eval", given).values["nproc"] == num
