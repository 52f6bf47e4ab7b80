"""What a user's code raised: its line, its place and its traceback, without frames of this program and of Python."""

from __future__ import annotations

import json
from pathlib import Path

from rft_core.user_code import load_module
from rft_trainer.workers.user_errors import error_line, error_place, user_traceback


def raised(path: Path, source: str) -> ValueError:
    path.write_text(source)
    module = load_module(path, "own_errors")
    try:
        module.f()
    except ValueError as error:
        return error
    raise AssertionError


def test_the_place_is_the_last_line_of_the_user_also_where_a_library_raised(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    error = raised(file, "import json\ndef f():\n    return json.loads('{')\n")
    assert isinstance(error, json.JSONDecodeError)
    assert error_place(error) == f"{file}:3"
    assert error_line(error).startswith("json.decoder.JSONDecodeError: ")
    assert "decoder.py" in user_traceback(error), "frames of a library that the user's code calls are shown"


def test_a_traceback_begins_with_the_first_frame_that_is_not_ours() -> None:
    try:
        exec(compile("1 / 0", error_place.__code__.co_filename, "exec"), {})
    except ZeroDivisionError as error:
        own = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
        assert "ZeroDivisionError" in user_traceback(own), "where all frames are ours they are shown"


def test_a_long_traceback_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    text = user_traceback(raised(tmp_path / "own.py", "def f():\n    raise ValueError('x' * 9000 + 'end')\n"))
    assert text.startswith("Traceback (most recent call last):")
    assert text.endswith("end")
    assert len(text) < 6100


def test_an_error_without_a_frame_has_no_place() -> None:
    assert error_place(SyntaxError("bad", ("own.py", 4, 1, "x ="))) == "own.py:4"
    assert error_place(ValueError()) == "unknown"
    assert error_place(SyntaxError("bad")) == "unknown"
    assert len(error_line(ValueError("x" * 5000))) == 2000
