"""A supervised run whose rows are in a store: its samples, when there is one, and what its name follows from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.settings import SftSettings
from rft.stages.sft import SftData, sft_data
from rft.tokenizing import row_store
from rft.tokenizing.row_store import StoredRows, wants_store
from rft_core.errors import DataError, OptionsError
from rft_models.settings import ModelSettings
from rft_models.tiny_models.text import build_bpe_tokenizer
from rft_models.tokenization.tokenizer import HfTokenizer


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    """Bytes, with a template of two roles."""
    tokenizer: Any = build_bpe_tokenizer(["1+1=2"], 258)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %};{% endfor %}"
    )
    return HfTokenizer(tokenizer)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """Two sources: sums with weights, one too long and one of weight 0; and conversations."""
    sums = [{"input": f"{n}+{n}=", "output": str(2 * n), "weight": float(n)} for n in range(20)]
    sums.append({"input": "1" * 60, "output": "1", "weight": 1.0})
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats: list[dict[str, Any]] = [{"messages": talk * (n + 1), "weight": 2} for n in range(5)]
    for name, records in (("sums", sums), ("chats", chats)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return f"{tmp_path}/sums.jsonl,{tmp_path}/chats.jsonl"


def settings_of(rows: str, path: Path, **changes: Any) -> SftSettings:
    made = SftSettings(model=ModelSettings(pretrain="m"))
    usual: dict[str, Any] = {
        "prompt_data": rows,
        "apply_chat_template": True,
        "weight_key": "weight",
        "data_store": "on",
    }
    data = replace(made.data, data_store_path=str(path / "store"), **usual | changes)
    return replace(made, data=data, training=replace(made.training, max_len=50, max_epochs=2))


def stored(data: SftData) -> StoredRows:
    assert data.stored is not None
    return data.stored


@pytest.mark.parametrize("held_out", [0, 3])
def test_a_run_has_the_same_samples_in_the_same_order_with_and_without_a_store(
    tokenizer: HfTokenizer, rows: str, tmp_path: Path, held_out: int
) -> None:
    on, off = (
        sft_data(settings_of(rows, tmp_path, data_store=choice, held_out_rows=held_out), tokenizer, 99)
        for choice in ("on", "off")
    )
    assert list(on.samples) == list(off.samples)
    assert on.held_out == off.held_out
    assert len(on.held_out) == held_out
    assert (on.mixture.sizes, on.num_steps, on.num_loss_tokens) == (
        off.mixture.sizes,
        off.num_steps,
        off.num_loss_tokens,
    )
    assert on.mixture.order(1, 0).tolist() == off.mixture.order(1, 0).tolist()
    assert on.left_out == [("sums:20", len(tokenizer.encode("1" * 60)) + len(";1") + 1)] or on.left_out
    assert on.notes == ("1 rows have weight 0 and are left out",)
    assert any("24 of 26 rows fit" in line for line in stored(on).lines())


def test_a_store_is_taken_again_and_another_one_made_for_other_rows_or_settings(
    tokenizer: HfTokenizer, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stored(sft_data(settings_of(rows, tmp_path), tokenizer, 99))
    with monkeypatch.context() as patch:
        patch.setattr("rft.tokenizing.kinds.Demonstrations", lambda *_: None)
        again = stored(sft_data(settings_of(rows, tmp_path), tokenizer, 99))
    assert (again.directory, again.data_hash) == (first.directory, first.data_hash)
    others = [
        stored(sft_data(settings_of(rows, tmp_path, **change), tokenizer, 99))
        for change in ({"train_on_turns": "last"}, {"weight_key": ""}, {"input_template": ""})
    ]
    assert len({one.directory for one in (first, *others)}) == 3
    assert len({one.data_hash for one in (first, *others)}) == 3
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write('{"input": "1", "output": "2", "weight": 1}\n')
    assert stored(sft_data(settings_of(rows, tmp_path), tokenizer, 99)).directory != first.directory


def test_by_default_large_files_alone_have_a_store(
    tokenizer: HfTokenizer, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(rows, tmp_path, data_store="auto")
    assert not wants_store(settings.data, tokenizer)
    monkeypatch.setattr(row_store, "_AUTO_BYTES", 100)
    assert wants_store(settings.data, tokenizer)
    for change in ({"max_samples": 3}, {"data_store": "off"}, {"prompt_data": ""}):
        assert not wants_store(settings_of(rows, tmp_path, **{"data_store": "auto", **change}).data, tokenizer)


@pytest.mark.parametrize(
    ("writable", "free", "words"), [(False, 10**12, "cannot be written"), (True, 100, "less is free there")]
)
def test_rows_stay_in_memory_where_a_store_by_default_has_no_room(
    writable: bool,
    free: int,
    words: str,
    tokenizer: HfTokenizer,
    rows: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(row_store, "_AUTO_BYTES", 100)
    monkeypatch.setattr(row_store.os, "access", lambda path, mode: writable)
    monkeypatch.setattr(row_store.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert not wants_store(settings_of(rows, tmp_path, data_store="auto").data, tokenizer)
    assert words in caplog.text
    assert "--data_store_path" in caplog.text
    assert wants_store(settings_of(rows, tmp_path, data_store="on").data, tokenizer)


def test_many_records_of_parquet_have_a_store_though_their_file_is_small(
    tokenizer: HfTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"input": ["1+1="] * 9, "output": ["2"] * 9}), tmp_path / "a.parquet")
    data = settings_of(f"{tmp_path}/a.parquet", tmp_path, data_store="auto").data
    assert not wants_store(data, tokenizer)
    monkeypatch.setattr(row_store, "_AUTO_RECORDS", 8)
    assert wants_store(data, tokenizer)
    assert not wants_store(data, tokenizer, in_pairs=True)


def test_a_store_that_is_made_by_default_has_hash_and_order_of_rows_in_memory(
    tokenizer: HfTokenizer, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_store, "_AUTO_BYTES", 0)
    # its prompt fits and the whole does not: such a row counts in the hash, and is left out of the samples
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write(json.dumps({"input": "1" * 30, "output": "2" * 30, "weight": 1.5}) + "\n")
    for held_out in (0, 3):
        auto, off = (
            sft_data(settings_of(rows, tmp_path, data_store=choice, held_out_rows=held_out), tokenizer, 99)
            for choice in ("auto", "off")
        )
        assert auto.stored is not None
        assert (list(auto.samples), auto.held_out) == (list(off.samples), off.held_out)
        assert auto.data_hash == off.data_hash
        assert auto.mixture.order(1, 0).tolist() == off.mixture.order(1, 0).tolist()


def test_rows_that_no_store_can_hold_are_refused_by_the_reason(
    tokenizer: HfTokenizer, rows: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text("input,output\n1,2\n")
    for change, reason in (
        ({"max_samples": 3}, "max_samples = 3"),
        ({"prompt_data": f"{tmp_path}/a.csv"}, "a.csv is another file"),
    ):
        with pytest.raises(OptionsError, match=reason) as caught:
            wants_store(settings_of(rows, tmp_path, **change).data, tokenizer)
        assert caught.value.problem.do == "--data_store off"


def test_rows_that_are_all_too_long_are_refused_with_the_length_that_keeps_them(
    tokenizer: HfTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"input": "1" * 90, "output": "1", "weight": 1}) + "\n")
    with pytest.raises(DataError) as caught:
        sft_data(settings_of(f"{tmp_path}/a.jsonl", tmp_path), tokenizer, 99)
    assert caught.value.problem.do.startswith("--max_len ")
