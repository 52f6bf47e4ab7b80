"""`rft-train export`: what is written from where, and what is refused before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.checkpoints import export as exports
from rft.checkpoints import export_lora
from rft.hub import upload
from rft_cli.commands import export
from rft_core.errors import OptionsError

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What would be exported; each export tells two lines."""
    told: Calls = []

    def whole(source: Path, target: Path, dtype: str, *, averages: bool) -> list[str]:
        told.append(("model", source, target, dtype, averages))
        return ["one", "two"]

    def adapters(kind: str) -> Any:
        def write(source: Path, target: Path) -> list[str]:
            told.append((kind, source, target))
            return ["one", "two"]

        return write

    monkeypatch.setattr(exports, "export", whole)
    monkeypatch.setattr(export_lora, "export_adapter", adapters("adapter"))
    monkeypatch.setattr(export_lora, "export_merged", adapters("merged"))
    return told


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ([], ("model", Path("run"), Path("new"), "", False)),
        (["--ema"], ("model", Path("run"), Path("new"), "", True)),
        (["--dtype", "bfloat16"], ("model", Path("run"), Path("new"), "bfloat16", False)),
        (["--dtype=float16", "--ema"], ("model", Path("run"), Path("new"), "float16", True)),
        (["--adapter"], ("adapter", Path("run"), Path("new"))),
    ],
)
def test_a_checkpoint_is_written_as_it_is_asked_for(
    words: list[str], call: tuple[Any, ...], calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.run(["run", "new", *words]) == 0
    assert calls == [call]
    shown = capsys.readouterr().out
    assert shown.startswith("one\ntwo\n")
    # adapters alone are no model that a command trains on
    assert ("--pretrain new" in shown) == (call[0] == "model")


def test_a_directory_of_adapters_is_merged_or_copied(calls: Calls) -> None:
    Path("run").mkdir()
    Path("run/adapter_config.json").write_text("{}")
    assert export.run(["run", "new"]) == 0
    assert export.run(["--adapter", "run", "new"]) == 0
    assert calls == [("merged", Path("run"), Path("new")), ("adapter", Path("run"), Path("new"))]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["run"], "export.no_target"),
        (["run", "new", "more"], "option.stray"),
        (["run", "new", "--dtype", "int8"], "export.dtype"),
        (["run", "new", "--adapter", "--ema"], "export.adapter_as_it_is"),
        (["run", "new", "--adapter", "--dtype", "float32"], "export.adapter_as_it_is"),
        (["run", "file"], "export.exists"),
        (["run", "full"], "export.exists"),
    ],
)
def test_what_cannot_be_written_is_refused_at_once(words: list[str], code: str, calls: Calls) -> None:
    Path("file").write_text("")
    Path("full").mkdir()
    Path("full/precious").write_text("")
    with pytest.raises(OptionsError) as caught:
        export.run(words)
    assert caught.value.problem.code == code
    if code == "export.exists":
        assert caught.value.problem.do == f"rft-train export run {words[1]}-2"
    assert calls == []


def test_an_empty_directory_is_taken(calls: Calls) -> None:
    Path("new").mkdir()
    assert export.run(["run", "new"]) == 0
    assert len(calls) == 1


def test_a_home_directory_may_be_written_short(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert export.run(["~/run", "~/new"]) == 0
    assert calls == [("model", Path.cwd() / "run", Path.cwd() / "new", "", False)]


@pytest.mark.parametrize("words", [[], ["-h"], ["run", "--help"]])
def test_help_exports_nothing(words: list[str], calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.run(words) == 0
    assert capsys.readouterr().out.startswith("usage: rft-train export")
    assert calls == []


def test_an_export_is_uploaded_where_it_is_asked_for(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def pushed(folder: Path, repo: str, *, private: bool) -> list[str]:
        calls.append(("push", folder, repo, private))
        return ["uploaded"]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(upload, "push", pushed)
    monkeypatch.setattr(upload, "refuse_target", lambda repo: calls.append(("refuse", repo)))
    assert export.run(["run", "new", "--push_to_hub", "me/new"]) == 0
    assert export.run(["run", "other", "--adapter", "--push_to_hub=me/other", "--hub_public"]) == 0
    assert [call for call in calls if call[0] in ("push", "refuse")] == [
        ("refuse", "me/new"),
        ("push", Path("new"), "me/new", True),
        ("refuse", "me/other"),
        ("push", Path("other"), "me/other", False),
    ]
    assert capsys.readouterr().out.count("uploaded") == 2


def test_an_upload_that_cannot_be_is_refused_before_the_export(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    for words, code in (
        (["--hub_public"], "export.no_upload"),
        (["--push_to_hub", "me/new"], "hub.push_target"),
        (["--push_to_hub", "new"], "hub.push_target"),
    ):
        with pytest.raises(OptionsError) as caught:
            export.run(["run", "new", *words])
        assert caught.value.problem.code == code
    assert calls == []
