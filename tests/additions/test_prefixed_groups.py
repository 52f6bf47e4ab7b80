"""A command of another package has two groups of one class of settings, told apart by the names of the groups."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from additions.installation import install

from rft_cli.main import main
from rft_cli.records.discovery import commands

SOURCE = Path(__file__).with_name("pair_command.py")
SMALL = ["--student-hidden", "16", "--student-ffn", "16", "--teacher.layers", "2"]


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package as it is after an installation."""
    install(
        monkeypatch, tmp_path, SOURCE, package="pair-command", entry_points="[rft.commands]\npair = pair_command:PAIR\n"
    )
    commands.cache_clear()
    yield
    monkeypatch.undo()
    sys.modules.pop("pair_command", None)
    commands.cache_clear()


def sizes(model: Path) -> tuple[int, int]:
    """Width and number of layers, as the model's own configuration has them."""
    config = json.loads((model / "config.json").read_text())
    return config["hidden_size"], config["num_hidden_layers"]


def test_two_models_are_built_with_the_sizes_of_their_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.txt").write_text("one and one is two\n" * 20)
    small = {"vocab_size": 258, "hidden": 32, "layers": 1, "heads": 2, "ffn": 32, "max_positions": 16}
    file = tmp_path / "sizes.yaml"
    file.write_text(json.dumps({"texts": str(tmp_path / "texts.txt"), "teacher": small, "student": small}))
    assert main(["pair", "--config", str(file), "--save_path", str(tmp_path / "models"), *SMALL]) == 0
    assert sizes(tmp_path / "models" / "teacher") == (32, 2)
    assert sizes(tmp_path / "models" / "student") == (16, 1)
    assert main(["check", "pair", "--config", str(file), "--save_path", "x", *SMALL]) == 0
    page = capsys.readouterr().out
    assert "student_hidden: 16" in page
    assert "teacher_hidden: 32" in page


def test_a_wrong_size_is_refused_by_its_full_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pair", "--texts", "t", "--save_path", "x", "--student-hidden", "1", "--json_errors"]
    assert main(words) == 2
    problem = json.loads(capsys.readouterr().err)["problem"]
    assert (problem["code"], problem["do"]) == ("option.value", "--student_hidden 2")
