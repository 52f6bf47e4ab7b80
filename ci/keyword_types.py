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
    "EvalKeywords": "eval",
    "GenerateKeywords": "generate",
    "ServeRewardKeywords": "serve-reward",
}
ARGUMENTS = {"pretrain", "prompt_data", "reward"}
"""Settings that are arguments of their own."""
OWN_ARGUMENTS = {
    "rl": {"eval_data"},
    "sft": {"eval_data"},
    "eval": {"eval_data"},
    "generate": {"prompt"},
    "serve-reward": set(),
}
SCORING = ("RlKeywords", "EvalKeywords", "ServeRewardKeywords")
BASES = {
    "TrainingKeywords": ("Settings of every training.", ("RlKeywords", "SftKeywords")),
    "RewardKeywords": ("Settings of everything that scores responses.", SCORING),
}
"""Meaning of each class that others share, and those that do."""

HEADER = '''"""Keyword arguments of `rft.rl`, `rft.sft`, `rft.evaluate` and `rft.generate`: settings by name.

Generated from the code by `ci/generate_reference.py`; what each means is in docs/reference.
"""

from __future__ import annotations

from typing import Literal, TypedDict
'''


def keyword_types() -> str:
    """The text of the module."""
    tables = {name: _annotations(command) for name, command in CLASSES.items()}
    shared = {name: kind for name, kind in tables["RlKeywords"].items() if tables["SftKeywords"].get(name) == kind}
    rewards = {
        name: kind
        for name, kind in tables["RlKeywords"].items()
        if name not in shared and all(tables[other].get(name) == kind for other in SCORING)
    }
    bases = {"TrainingKeywords": shared, "RewardKeywords": rewards}
    parts = [HEADER]
    for name, (meaning, _) in BASES.items():
        parts.append(_class(name, "TypedDict, total=False", meaning, bases[name]))
    for name, table in tables.items():
        names = [base for base, (_, members) in BASES.items() if name in members]
        own = {key: kind for key, kind in table.items() if not any(key in bases[base] for base in names)}
        base = f"{', '.join(names or ['TypedDict'])}, total=False"
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
