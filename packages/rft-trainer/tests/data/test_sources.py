"""Sources as the command line names them, and the prompts they give in global order."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft_core.errors import DataError, OptionsError
from rft_trainer.data.images import ImageColumn
from rft_trainer.data.readers.rows import SkipLog
from rft_trainer.data.sources import SourceSpec, load_prompts, parse_sources, source_sizes
from rft_trainer.tasks.drawn_images import drawings


def write(path: Path, *rows: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_sources_and_probabilities_are_paired() -> None:
    assert parse_sources("d/a.jsonl, b.parquet", "0.7,0.3") == (
        SourceSpec("d/a.jsonl", "a", 0.7),
        SourceSpec("b.parquet", "b", 0.3),
    )
    assert parse_sources("a.jsonl,b.jsonl") == (SourceSpec("a.jsonl", "a", None), SourceSpec("b.jsonl", "b", None))
    assert parse_sources("a.jsonl", "1.0") == (SourceSpec("a.jsonl", "a", None),)


def test_names_get_longer_until_they_differ() -> None:
    names = [spec.name for spec in parse_sources("x/one/train.jsonl,x/two/train.jsonl,test.jsonl")]
    assert names == ["one/train", "two/train", "test"]
    assert [spec.name for spec in parse_sources("a.json,a.csv")] == ["a.json", "a.csv"]


@pytest.mark.parametrize(
    ("prompt_data", "probs", "code"),
    [
        ("", None, "data.prompt_data"),
        (" , ", None, "data.prompt_data"),
        ("a.jsonl,a.jsonl", None, "data.prompt_data"),
        ("a.jsonl,b.jsonl", "half,half", "data.prompt_data_probs"),
        ("a.jsonl,b.jsonl", "1.0", "data.probabilities"),
        ("a.jsonl", "0.9", "data.probabilities"),
    ],
)
def test_lists_that_cannot_be_used_are_refused(prompt_data: str, probs: str | None, code: str) -> None:
    with pytest.raises(OptionsError) as caught:
        parse_sources(prompt_data, probs)
    assert caught.value.problem.code == code
    assert caught.value.problem.do


def test_prompts_of_all_sources_stand_one_after_the_other(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", {"q": "1", "a": 1}, {"q": "2", "a": 2})
    second = write(tmp_path / "b.jsonl", {"q": "3", "a": 3})
    specs = parse_sources(f"{first},{second}")
    loaded = load_prompts(specs, input_key="q", label_key="a")
    assert [(p.prompt_id, p.text, p.label) for p in loaded.prompts] == [
        ("a:0", "1", "1"),
        ("a:1", "2", "2"),
        ("b:0", "3", "3"),
    ]
    assert source_sizes(loaded.prompts, specs) == (2, 1)
    assert loaded.files == (first, second)
    again = load_prompts(specs, input_key="q", label_key="a")
    assert again.content_hash == loaded.content_hash
    write(tmp_path / "b.jsonl", {"q": "3", "a": 4})
    assert load_prompts(specs, input_key="q", label_key="a").content_hash != loaded.content_hash


def test_skips_are_counted_over_reading_and_choosing_fields(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"q": "1"}\nbad\n{"x": 1}\n')
    specs = parse_sources(str(file))
    loaded = load_prompts(specs, input_key="q", skips=SkipLog(limit=2))
    assert len(loaded.prompts) == 1
    assert [error.problem.where for error in loaded.skipped.problems] == [f"{file}:2:1", f"{file}:3:q"]
    with pytest.raises(DataError):
        load_prompts(specs, input_key="q", skips=SkipLog(limit=1))


@pytest.mark.data
def test_gsm8k_reads_as_published(data_dir: Path) -> None:
    train = f"{data_dir}/gsm8k/train.jsonl"
    loaded = load_prompts(parse_sources(train), input_key="question", label_key="answer")
    assert len(loaded.prompts) == 7473
    assert all("####" in (prompt.label or "") for prompt in loaded.prompts)


def test_the_working_directory_is_a_source_of_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums").mkdir()
    monkeypatch.chdir(tmp_path / "sums")
    assert [spec.name for spec in parse_sources(".")] == ["sums"]


@pytest.mark.parametrize(
    ("row", "keys", "whole", "note"),
    [
        ({"input": "a", "label": "b"}, {"label_key": "label"}, False, ()),
        ({"input": "a", "label": "b"}, {}, False, ("rows: not used: label",)),
        (
            {"input": "a", "label": "b", "id": 1, "level": 2},
            {"label_key": "label"},
            False,
            ("rows: not used: id, level",),
        ),
        ({"input": "a", "label": "b", "id": 1}, {"label_key": "label"}, True, ()),
        ({"input": "a", "truth": {"answer": "b"}}, {"label_key": "truth.answer"}, False, ()),
    ],
    ids=["none", "no label", "two", "code of the user has them", "within a column"],
)
def test_columns_that_nothing_reads_are_named_once(
    row: dict[str, object], keys: dict[str, str], whole: bool, note: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    loaded = load_prompts(parse_sources(str(file)), input_key="input", whole_rows=whole, **keys)
    assert (loaded.unused, loaded.notes) == (note, ())


def test_rows_of_geometry3k_have_their_images_as_bytes_and_their_columns_as_published(tmp_path: Path) -> None:
    pictures = [drawing.png for drawing in drawings(0, "test", 3)]
    table = pa.table(
        {
            "images": [[{"bytes": picture, "path": None}] for picture in pictures],
            "problem": [f"<image>Find x, number {number}." for number in range(3)],
            "answer": ["3", "4 \\sqrt { 2 }", "60"],
        }
    )
    pq.write_table(table, tmp_path / "test.parquet")
    (spec,) = parse_sources(str(tmp_path / "test.parquet"))
    loaded = load_prompts([spec], input_key="input", label_key="label", images=ImageColumn("images"))
    assert [prompt.label for prompt in loaded.prompts] == ["3", "4 \\sqrt { 2 }", "60"]
    assert [prompt.text for prompt in loaded.prompts] == table["problem"].to_pylist()
    assert [image.read() for prompt in loaded.prompts for image in prompt.images] == pictures
    assert loaded.notes == ("test: problem is the prompt, answer is the label",)


def test_sets_may_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x=1.jsonl", {"input": "1"})
    found = parse_sources("easy=a/test.jsonl, b/hard.jsonl,x=1.jsonl,data/year=2/c.jsonl", labelled=True)
    assert [(spec.name, spec.path) for spec in found] == [
        ("easy", "a/test.jsonl"),
        ("hard", "b/hard.jsonl"),
        ("x=1", "x=1.jsonl"),
        ("c", "data/year=2/c.jsonl"),
    ]
    assert parse_sources("easy=a.jsonl")[0].path == "easy=a.jsonl", "training data have no names"
    with pytest.raises(OptionsError) as caught:
        parse_sources("one=a.jsonl,one=b.jsonl", labelled=True)
    problem = caught.value.problem
    assert (problem.where, problem.do) == ("--eval_data", "--eval_data with another name for one=")
