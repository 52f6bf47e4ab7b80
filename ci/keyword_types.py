"""The settings of the library's commands as typed keyword arguments, for `rft/library/keywords.py`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from rft.config.schema import Setting, schema
from rft_algos.algorithms.preference import PreferenceLossType

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
POLICIES = ("RlKeywords", "SftKeywords", "DpoKeywords")
TRAINING = (*POLICIES, "RmKeywords")
SCORING = ("RlKeywords", "EvalKeywords", "ServeRewardKeywords")
ANSWERING = ("RlKeywords", "EvalKeywords", "GenerateKeywords")
"""Classes of commands that train a policy, that train, that score and that sample: what all have is written once."""

HEADER = '''"""Keyword arguments of the calls of `rft` that train, evaluate, generate and serve: settings by name.

Generated from the code by `ci/generate_reference.py`; what each means is in docs/reference.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from rft_algos.algorithms.preference import PreferenceLossType
'''


def keyword_types() -> str:
    """The text of the module."""
    tables = {name: _annotations(command) for name, command in CLASSES.items()}
    rl = tables["RlKeywords"]

    def common(names: Iterable[str], but: Iterable[str] = ()) -> dict[str, str]:
        return {
            key: kind
            for key, kind in rl.items()
            if key not in but and all(tables[name].get(key) == kind for name in names)
        }

    shared = common(TRAINING)
    of_policies = common(POLICIES, but=shared)
    rewards = common(SCORING, but={*shared, *of_policies})
    sampled = common(ANSWERING, but={*shared, *of_policies, *rewards})
    bases = {
        "TrainingKeywords": ("Settings of every training.", "TypedDict", shared),
        "PolicyKeywords": ("Settings of a policy's training.", "TrainingKeywords", of_policies),
        "RewardKeywords": ("Settings of everything that scores responses.", "TypedDict", rewards),
        "AnswerKeywords": ("Settings of everything that samples responses.", "TypedDict", sampled),
    }
    parts = [HEADER, *(_class(name, f"{base}, total=False", why, keys) for name, (why, base, keys) in bases.items())]
    for name, table in tables.items():
        names = ["PolicyKeywords"] if name in POLICIES else ["TrainingKeywords"] if name in TRAINING else []
        names += ["RewardKeywords"] if name in SCORING else []
        names += ["AnswerKeywords"] if name in ANSWERING else []
        known = {
            **(of_policies if name in POLICIES else {}),
            **(shared if name in TRAINING else {}),
            **(rewards if name in SCORING else {}),
            **(sampled if name in ANSWERING else {}),
        }
        own = {key: kind for key, kind in table.items() if key not in known}
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
    if kind == PreferenceLossType:
        return "PreferenceLossType"  # a line each name would make the module too long
    if origin is Literal:
        names = ", ".join(f'"{name}"' for name in get_args(kind))
        return f"Literal[{names}]"
    if origin is tuple:
        return f"tuple[{', '.join(map(_kind, get_args(kind)))}]"
    return str(kind.__name__)
