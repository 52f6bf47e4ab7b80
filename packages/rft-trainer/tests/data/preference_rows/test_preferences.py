"""Preference pairs and labelled responses as they come in data files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import DataError
from rft_trainer.data.images import ImageColumn
from rft_trainer.data.preference_rows.preference_columns import LabelledKeys, PreferenceKeys
from rft_trainer.data.preference_rows.preferences import (
    LoadedLabels,
    LoadedPairs,
    labelled,
    load_labels,
    load_pairs,
    pairs_hash,
)
from rft_trainer.data.readers.rows import SkipLog
from rft_trainer.data.sources import parse_sources

PAIR = {"prompt": "1+1?", "chosen": " 2", "rejected": " 3"}


def read(tmp_path: Path, *rows: dict[str, Any], keys: PreferenceKeys | None = None, **options: Any) -> LoadedPairs:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_pairs(parse_sources(str(file)), keys or PreferenceKeys(), **options)


def read_labels(tmp_path: Path, *rows: dict[str, Any], **options: Any) -> LoadedLabels:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_labels(parse_sources(str(file)), LabelledKeys(), **options)


def test_a_pair_has_prompt_responses_margin_and_weight(tmp_path: Path) -> None:
    keys = PreferenceKeys(margin="m", weight="w")
    loaded = read(tmp_path, {**PAIR, "m": 2, "w": "0.5"}, keys=keys)
    (pair,) = loaded.pairs
    assert (pair.pair_id, pair.prompt.text, pair.chosen, pair.rejected) == ("p:0", "1+1?", " 2", " 3")
    assert (pair.margin, pair.weight) == (2.0, 0.5)


def test_columns_that_nothing_reads_are_named_once(tmp_path: Path) -> None:
    loaded = read(tmp_path, {**PAIR, "score": 1}, {**PAIR, "score": 2})
    assert loaded.unused == ("p: not used: score",)
    assert loaded.notes == ("p: prompt is the prompt, chosen is the better response, rejected is the worse one",)


def test_pairs_of_equal_responses_are_left_out_and_counted(tmp_path: Path) -> None:
    loaded = read(tmp_path, {**PAIR, "rejected": " 2"}, PAIR)
    assert [pair.pair_id for pair in loaded.pairs] == ["p:1"]
    assert loaded.equal == ("p:0",)
    with pytest.raises(DataError, match="all 1 pairs") as raised:
        read(tmp_path, {**PAIR, "rejected": " 2"})
    assert raised.value.problem.code == "data.equal_responses"


def test_the_hash_follows_everything_that_a_loss_depends_on(tmp_path: Path) -> None:
    keys = PreferenceKeys(margin="m", weight="w")
    row = {**PAIR, "m": 0, "w": 1}
    changes = [{}, {"prompt": "2+2?"}, {"chosen": "x"}, {"rejected": "x"}, {"m": 1}, {"w": 2}]
    hashes = [read(tmp_path, {**row, **change}, keys=keys).content_hash for change in changes]
    assert len(set(hashes)) == len(changes)
    assert hashes[0] == pairs_hash(read(tmp_path, row, keys=keys).pairs)


@pytest.mark.parametrize(
    ("change", "field", "what"),
    [
        ({"chosen": None}, "chosen", "None"),
        ({"rejected": ""}, "rejected", "an empty response"),
        ({"m": "much"}, "m", "str 'much'"),
        ({"m": True}, "m", "bool True"),
        ({"w": 0}, "w", "0"),
    ],
)
def test_errors_name_file_line_and_column(tmp_path: Path, change: dict[str, Any], field: str, what: str) -> None:
    keys = PreferenceKeys(margin="m", weight="w")
    good = {**PAIR, "m": 1, "w": 1}
    with pytest.raises(DataError) as raised:
        read(tmp_path, good, {**good, **change}, keys=keys)
    assert raised.value.problem.where == f"{tmp_path / 'p.jsonl'}:2:{field}"
    assert raised.value.problem.what == what


def test_a_missing_column_is_told_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        read(tmp_path, {"prompt": "a", "chosen": "b", "worse": "c"})
    assert "--rejected_key" in raised.value.problem.why
    with pytest.raises(DataError) as raised:
        read(tmp_path, PAIR, keys=PreferenceKeys(margin="margin"))
    assert "--margin_key" in raised.value.problem.why


def test_a_skipped_row_leaves_the_ids_of_the_others(tmp_path: Path) -> None:
    skips = SkipLog(limit=1)
    loaded = read(tmp_path, {**PAIR, "chosen": 1.5, "rejected": []}, PAIR, skips=skips)
    assert [pair.pair_id for pair in loaded.pairs] == ["p:1"]
    assert len(skips.problems) == 1


def test_images_belong_to_the_prompt(tmp_path: Path) -> None:
    # the smallest PNG that has a header
    (tmp_path / "a.png").write_bytes(
        bytes.fromhex("89504e470d0a1a0a0000000d4948445200000002000000020802000000fdd49a73")
    )
    loaded = read(tmp_path, {**PAIR, "image": "a.png"}, images=ImageColumn("image"))
    assert len(loaded.pairs[0].prompt.images) == 1
    assert loaded.unused == ()


@pytest.mark.parametrize(
    ("label", "expected"),
    [(True, True), (False, False), (1, True), (0, False), (-1, False), (1.0, True), ("desirable", True), ("-1", False)],
)
def test_labels_are_booleans_numbers_or_words(tmp_path: Path, label: object, expected: bool) -> None:
    loaded = read_labels(tmp_path, {"prompt": "1+1?", "completion": " 2", "label": label})
    (response,) = loaded.responses
    assert (response.prompt.text, response.response, response.desirable) == ("1+1?", " 2", expected)


def test_a_label_that_is_neither_good_nor_bad_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        read_labels(tmp_path, {"prompt": "a", "completion": "b", "label": "maybe"})
    assert raised.value.problem.where == f"{tmp_path / 'p.jsonl'}:1:label"


def test_labelled_responses_may_be_messages(tmp_path: Path) -> None:
    asked, reply = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
    loaded = read_labels(tmp_path, {"prompt": [asked], "completion": [reply], "label": True})
    (response,) = loaded.responses
    assert [m.as_dict() for m in response.prompt.messages or ()] == [asked]
    assert response.response == "ho"


def test_pairs_become_labelled_responses(tmp_path: Path) -> None:
    found = labelled(read(tmp_path, PAIR).pairs)
    assert [(r.response, r.desirable) for r in found] == [(" 2", True), (" 3", False)]
