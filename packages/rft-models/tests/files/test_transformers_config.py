"""The configuration as transformers reads it: this package's attention, and errors that name the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import DataError, OptionsError
from rft_models.files.transformers_config import hf_config, refusals
from rft_models.files.vision_tower_sizes import tower_sizes


def edited(source: Path, target: Path, **values: Any) -> Path:
    """A copy of a directory with these values in config.json, in its parts too."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    parts = {name: value | values for name, value in config.items() if name in ("text_config", "vision_config")}
    (target / "config.json").write_text(json.dumps(config | parts | values))
    return target


@pytest.mark.parametrize("named", ["someone/kernel", "flash_attention_2", {"": "someone/kernel"}])
def test_no_part_keeps_the_attention_that_its_file_names(
    vision_directory: Callable[[str], Path], tmp_path: Path, named: Any
) -> None:
    path = edited(vision_directory("qwen2_5_vl"), tmp_path / "m", _attn_implementation=named)
    config = hf_config(path, "eager")
    assert {one._attn_implementation for one in (config, config.text_config, config.vision_config)} == {"eager"}
    assert tower_sizes(path) == tower_sizes(vision_directory("qwen2_5_vl"))


def test_what_transformers_refuses_is_an_error_of_the_file(character_directory: Path, tmp_path: Path) -> None:
    path = edited(character_directory, tmp_path / "m", vocab_size=[1])
    with pytest.raises(DataError) as caught:
        hf_config(path)
    problem = caught.value.problem
    assert (problem.code, problem.where) == ("models.config_refused", str(path / "config.json"))
    assert "vocab_size" in problem.what


@pytest.mark.parametrize("error", [KeyError("a"), AssertionError(), ZeroDivisionError("b"), RuntimeError("c")])
def test_errors_of_values_are_named_and_others_pass(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(DataError) as caught, refusals(tmp_path, RuntimeError):
        raise error
    assert type(error).__name__ in caught.value.problem.what
    own = OptionsError(code="x", what="", where="", why="")
    for other in (own, MemoryError()):
        with pytest.raises(type(other)), refusals(tmp_path):
            raise other
