"""A configuration as YAML: one line a setting with its origin, which reads back to the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rft.config.origins import DEFAULT
from rft.config.render import config_yaml, scalar
from rft.config.schema import REQUIRED, schema
from rft.resolved import Origin, Resolved, flat, with_choices
from rft.settings import PretrainSettings


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ("", "''"),
        ("true", "'true'"),
        ("a: b # c", "'a: b # c'"),
        ("größer", "größer"),
        ("zwei\nfür", '"zwei\\nfür"'),
        ("word " * 60, f"'{'word ' * 60}'"),
        (4, "4"),
        (0.5, "0.5"),
        (True, "true"),
        (None, "null"),
        ((0.9, 0.95), "[0.9, 0.95]"),
        (tuple(range(50)), str(list(range(50)))),
    ],
)
def test_a_value_is_one_line_that_reads_back(value: Any, text: str) -> None:
    assert scalar(value) == text
    assert yaml.safe_load(text) == (list(value) if isinstance(value, tuple) else value)


def test_settings_stand_in_groups_with_their_origins() -> None:
    table = schema("sft")
    values = {name: row.default for name, row in table.items()} | {"seed": 7}
    origins = dict.fromkeys(table, DEFAULT) | {"seed": Origin("file", "a.yaml", 3)}
    lines = config_yaml("sft", values, origins, "sums: 1").splitlines()
    assert lines[1:4] == ["recipe:", "  command: sft", "  name: 'sums: 1'"]
    groups = list(dict.fromkeys(row.group for row in table.values()))
    found = [index for index, line in enumerate(lines) if line.startswith("# ") and line[2:] in groups]
    assert [lines[index][2:] for index in found] == groups
    assert {lines[index - 1] for index in found} == {""}
    names = [line.partition(":")[0] for line in lines[4:] if ": " in line and not line.startswith("#")]
    required = [name for name, row in table.items() if row.default is REQUIRED]
    assert required == ["pretrain"]
    assert names == [name for name in table if name not in required]
    assert "# pretrain: required, not given" in lines
    assert f"{'seed: 7':<48} # a.yaml:3" in lines
    assert sum(line.endswith("# default") for line in lines) == len(names) - 1


def test_a_configuration_without_a_recipe_names_none() -> None:
    table = schema("sft")
    text = config_yaml("sft", {name: row.default for name, row in table.items()}, dict.fromkeys(table, DEFAULT))
    assert yaml.safe_load(text)["recipe"] == {"command": "sft", "name": ""}
    assert text.endswith("\n")


def test_what_a_start_chose_stands_in_the_text_with_its_origin_and_all_else_stays() -> None:
    settings = PretrainSettings()
    values = flat(settings)
    origins = dict.fromkeys(values, DEFAULT)
    text = config_yaml("pretrain", values, origins)
    asked = Resolved("pretrain", settings, values, origins, "", tuple[Path, ...](), (), text)
    # what is read has directories where what is recorded has names
    local = asked.with_values({"pretrain": "/models/one"})
    chosen = local.with_values({"micro_train_batch_size": 3}, Origin("derived", text="fit: 8 GiB"))
    found = with_choices(asked, local, chosen)
    assert found.settings.training.micro_train_batch_size == 3
    assert found.values["pretrain"] == asked.values["pretrain"]
    lines, before = found.config_yaml.splitlines(), text.splitlines()
    changed = [line for line, old in zip(lines, before, strict=True) if line != old]
    assert [line.split(None, 2) for line in changed] == [["micro_train_batch_size:", "3", "# fit: 8 GiB"]]
    assert with_choices(asked, local, local) is asked
