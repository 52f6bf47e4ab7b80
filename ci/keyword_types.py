"""The settings of the library's commands as typed keyword arguments, for `rft/library/keywords.py`."""

from __future__ import annotations

from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from rft.config.schema import Setting, schema

FILE = Path(__file__).parents[1] / "packages/rft/src/rft/library/keywords.py"
CLASSES = {
    "RlKeywords": "rl",
    "SftKeywords": "sft",
    "DpoKeywords": "dpo",
    "RmKeywords": "rm",
    "EvalKeywords": "eval",
    "GenerateKeywords": "generate",
    "ServeRewardKeywords": "serve-reward",
}
TRAINING = ("RlKeywords", "SftKeywords", "DpoKeywords")
"""Commands that train: what all of them have is written once."""
ARGUMENTS = {"pretrain", "prompt_data", "reward"}
"""Settings that are arguments of their own."""
OWN_ARGUMENTS = {
    "rl": {"eval_data"},
    "sft": {"eval_data"},
    "rm": {"eval_data"},
    "dpo": {"eval_data"},
    "eval": {"eval_data", "compare"},
    "generate": {"prompt"},
    "serve-reward": set(),
}

HEADER = '''"""Keyword arguments of the calls of `rft` that train, evaluate, generate and serve: settings by name.

Generated from the code by `ci/generate_reference.py`; what each means is in docs/reference.
"""

from __future__ import annotations

from typing import Literal, TypedDict
'''


def keyword_types() -> str:
    """The text of the module."""
    tables = {name: _annotations(command) for name, command in CLASSES.items()}
    policies = ("RlKeywords", "SftKeywords", "DpoKeywords")
    of_policies = {
        name: kind
        for name, kind in tables["RlKeywords"].items()
        if all(tables[other].get(name) == kind for other in policies)
    }
    shared = {name: kind for name, kind in of_policies.items() if tables["RmKeywords"].get(name) == kind}
    of_policies = {name: kind for name, kind in of_policies.items() if name not in shared}
    parts = [
        HEADER,
        _class("TrainingKeywords", "TypedDict, total=False", "Settings of every training.", shared),
        _class("PolicyKeywords", "TrainingKeywords, total=False", "Settings of a policy's training.", of_policies),
    ]
    bases = dict.fromkeys(policies, "PolicyKeywords") | {"RmKeywords": "TrainingKeywords"}
    for name, table in tables.items():
        base = f"{bases.get(name, 'TypedDict')}, total=False"
        known = {} if name not in bases else shared if name == "RmKeywords" else shared | of_policies
        own = {key: kind for key, kind in table.items() if key not in known}
        parts.append(_class(name, base, f"Settings of `rft-train {CLASSES[name]}`.", own))
    return "\n\n".join(parts)


def _class(name: str, base: str, meaning: str, table: dict[str, str]) -> str:
    rows = "\n".join(_row(key, kind) for key, kind in table.items())
    return f'class {name}({base}):\n    """{meaning}"""\n\n{rows}\n'


def _row(key: str, kind: str) -> str:
    line = f"    {key}: {kind}"
    if len(line) <= 120 or "Literal[" not in kind:
        return line
    # as the formatter breaks it
    names, _, rest = kind.removeprefix("Literal[").partition("]")
    inner = "".join(f"        {name.strip()},\n" for name in names.split(","))
    if rest:
        inner = "".join(f"            {name.strip()},\n" for name in names.split(","))
        return f"    {key}: (\n        Literal[\n{inner}        ]\n        {rest.strip()}\n    )"
    return f"    {key}: Literal[\n{inner}    ]"


def _annotations(command: str) -> dict[str, str]:
    left_out = ARGUMENTS | OWN_ARGUMENTS[command]
    return {name: _annotation(row) for name, row in schema(command).items() if name not in left_out}


def _annotation(setting: Setting) -> str:
    text = _kind(setting.kind)
    return f"{text} | bool" if "bare" in setting.metadata and "bool" not in text else text


def _kind(kind: Any) -> str:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        parts = [part for part in get_args(kind) if part is not NoneType]
        return " | ".join([*map(_kind, parts), "None"])
    if origin is Literal:
        names = ", ".join(f'"{name}"' for name in get_args(kind))
        return f"Literal[{names}]"
    if origin is tuple:
        return f"tuple[{', '.join(map(_kind, get_args(kind)))}]"
    return str(kind.__name__)
