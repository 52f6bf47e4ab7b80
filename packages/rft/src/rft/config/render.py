"""A configuration as YAML: one line a setting, in groups, each with a comment that says where it came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import yaml

from rft.config.commands import typed
from rft.config.schema import REQUIRED, schema
from rft.resolved import Origin


def config_yaml(command: str, values: Mapping[str, Any], origins: Mapping[str, Origin], recipe_name: str = "") -> str:
    """Text that `--config` reads back to the same values and the same recipe's name."""
    lines = [
        f"# rft-train {typed(command)}: every setting, with where its value came from",
        "recipe:",
        f"  command: {command}",
        f"  name: {scalar(recipe_name)}",  # empty where no recipe was given: the file does not become one
    ]
    group = ""
    for name, setting in schema(command).items():
        if setting.group != group:
            group = setting.group
            lines += ["", f"# {group}"]
        if values[name] is REQUIRED:
            lines.append(f"# {name}: required, not given")
        else:
            lines.append(f"{f'{name}: {scalar(values[name])}':<48} # {origins[name]}")
    return "\n".join(lines) + "\n"


def scalar(value: object) -> str:
    """One value on one line of YAML."""
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value, ensure_ascii=False)  # a double-quoted YAML text, on one line
    plain = list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=1_000_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
