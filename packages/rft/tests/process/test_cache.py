"""Directories that are made once, and named after what they are made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.process.cache import written_once


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_CACHE", str(tmp_path / "cache"))


def write(text: str, target: Path) -> None:
    target.mkdir()
    (target / "file").write_text(text)


def test_the_same_content_is_made_once_and_another_apart() -> None:
    made: list[str] = []

    def make(name: str, content: object) -> Path:
        def maker(target: Path) -> None:
            made.append(name)
            write(name, target)

        return written_once("models", content, maker)

    first, again, other = make("a", {"n": 1}), make("b", {"n": 1}), make("c", {"n": 2})
    assert made == ["a", "c"]
    assert first == again != other
    assert (first / "file").read_text() == "a"


def test_what_fails_half_way_is_not_there() -> None:
    def fail(target: Path) -> None:
        write("half", target)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        written_once("models", "x", fail)
    target = written_once("models", "x", lambda path: write("whole", path))
    assert (target / "file").read_text() == "whole"
    assert [path.name for path in target.parent.iterdir() if path.is_dir()] == [target.name]
