"""A new model from texts: which texts, which sizes, and a directory that is written whole or not at all."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.settings import BuildModelSettings, BuildOutputSettings
from rft.tiny_models import new_model
from rft_core.errors import DataError, OptionsError
from rft_models.settings import BuildSettings
from rft_trainer.settings.data import BuildDataSettings


def settings(target: Path | str, texts: str = "", **sizes: Any) -> BuildModelSettings:
    return BuildModelSettings(
        data=BuildDataSettings(texts=texts, text_keys="input"),
        output=BuildOutputSettings(save_path=str(target), seed=5),
        model=replace(BuildSettings(), **sizes),
    )


def test_texts_are_lines_and_columns_of_the_files_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\u00e4\n", encoding="utf-8")
    rows = [{"x": "1", "y": "2", "z": "3"}, {"x": "4", "y": "5", "z": "6"}]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = f"{tmp_path / 'b.jsonl'}, {tmp_path / 'a.txt'},"
    assert list(new_model.read_texts(files, "y, x,")) == ["2", "1", "5", "4", "one\n", "\u00e4\n"]


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("a.txt", b"", "build.no_texts"),
        ("a.txt", b"\xff\xfe", "build.unreadable"),
        ("b.jsonl", b'{"input": [{"role": "user", "content": "x"}]}\n', "build.not_text"),
    ],
)
def test_files_without_plain_texts_are_refused(tmp_path: Path, name: str, data: bytes, code: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError) as caught:
        list(new_model.read_texts(str(tmp_path / name), "input"))
    assert caught.value.problem.code == code


def test_a_missing_file_or_column_is_told_by_the_flags_of_this_command(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        list(new_model.read_texts(str(tmp_path / "none.txt"), "input"))
    assert caught.value.problem.code == "build.unreadable"
    (tmp_path / "b.jsonl").write_text('{"x": "1"}\n')
    for file, keys, do in (
        (tmp_path / "b.jsonl", "y", "--text_keys with the field that holds it, or give the rows the field y"),
        (tmp_path / "none.jsonl", "x", f"ls {tmp_path}"),
    ):
        with pytest.raises(DataError) as caught:
            list(new_model.read_texts(str(file), keys))
        problem = caught.value.problem
        assert problem.code not in ("build.no_texts", "build.unreadable")
        assert not {"--prompt_data", "--input_key"} & set(f"{problem.why} {problem.do}".split())
        assert problem.do == do


ROWS = {"prompt": "reverse: ab", "answer": "ba"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (ROWS, ["reverse: ab", "ba"]),
        ({"input": "1+1", "output": "2", "other": "x"}, ["1+1", "2"]),
        ({"input": "1+1", "label": "2"}, ["1+1", "2"]),
        ({"input": "1+1", "output": "3", "label": "2"}, ["1+1", "3"]),
        ({"input": "1+1", "label": 2}, ["1+1"]),
        ({"input": "1+1"}, ["1+1"]),
        ({"text": "as it is", **ROWS}, ["as it is"]),
    ],
)
def test_rows_without_a_column_text_give_the_columns_that_training_reads(
    tmp_path: Path, row: dict[str, str], expected: list[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    assert list(new_model.read_texts(str(file), BuildDataSettings.text_keys)) == expected
    with pytest.raises(DataError):
        list(new_model.read_texts(str(file), "words"))


def test_rows_of_no_known_form_are_refused_by_the_column_that_they_lack(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"x": "1"}\n')
    with pytest.raises(DataError, match="no field 'text'"):
        list(new_model.read_texts(str(file), BuildDataSettings.text_keys))


def test_few_texts_give_no_merges() -> None:
    assert new_model.vocabulary_of(["x" * 99_999]) == 258
    assert new_model.vocabulary_of(["x" * 60_000, "y" * 40_000]) == 2048


@pytest.mark.parametrize(("given", "kv_heads", "ffn"), [({}, 4, 48), ({"kv_heads": 2, "ffn": 7}, 2, 7)])
def test_a_decoder_has_the_sizes_of_the_settings(
    calls: Any, tmp_path: Path, given: dict[str, int], kv_heads: int, ffn: int
) -> None:
    target = tmp_path / "model"
    staging = tmp_path / f".model-{os.getpid()}"
    staging.mkdir()
    calls.put(new_model, "build_decoder", build_bpe_tokenizer="tokenizer")
    sizes: dict[str, Any] = {
        "hidden": 16,
        "layers": 3,
        "heads": 4,
        "kv_heads": 0,
        "ffn": 0,
        "max_positions": 99,
        "vocab_size": 300,
    }
    new_model.build(settings(target, "", **sizes | given), ["a"], target)
    assert calls.taken() == [
        "build_bpe_tokenizer(['a'], 300)",
        f"build_decoder({staging!r}, 'tokenizer', ffn={ffn}, heads=4, hidden=16, kv_heads={kv_heads}, layers=3, "
        "max_positions=99, seed=5)",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_was_not_finished_is_taken_away(calls: Any, tmp_path: Path) -> None:
    def fails(staging: Path, *parts: Any, **sizes: Any) -> None:
        staging.mkdir()
        raise MemoryError

    calls.replace(new_model, build_decoder=fails, build_bpe_tokenizer=lambda texts, size: "tokenizer")
    with pytest.raises(MemoryError):
        new_model.build(settings(tmp_path / "model"), ["a"], tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_sizes_are_those_of_the_directory_that_was_read_back(calls: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo words\n")
    target = tmp_path / "model"
    tokenizer = SimpleNamespace(encode=str.split, vocab_size=300)
    policy = SimpleNamespace(tokenizer=tokenizer, num_parameters=77)
    calls.put(new_model, "build", load_policy=policy)
    given = settings(target, str(tmp_path / "a.txt"))
    assert new_model.new_model(given) == new_model.NewModel(target, 2, 14, 3, 300, 77)
    assert calls.taken() == [f"build({given!r}, ['one\\n', 'two words\\n'], {target!r})", f"load_policy({target!r})"]
    target.mkdir()
    with pytest.raises(OptionsError) as caught:
        new_model.new_model(given)
    assert caught.value.problem.code == "build.exists"
    assert caught.value.problem.do == f"--save_path {target}-2"
    assert calls.taken() == []


def test_a_home_directory_is_written_out(calls: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("one\n")
    policy = SimpleNamespace(tokenizer=SimpleNamespace(encode=str.split, vocab_size=3), num_parameters=7)
    calls.put(new_model, "build", load_policy=policy)
    assert new_model.new_model(settings("~/model", "~/a.txt")).directory == tmp_path / "model"
