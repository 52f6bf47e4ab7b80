"""Write the pages of docs/ that follow from the code; with --check, say which of them are out of date.

docs/reference/COMMAND.md come whole from the settings dataclasses. In other pages, what stands between
`<!-- generated: NAME -->` and `<!-- end: NAME -->` is replaced.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

sys.path.insert(0, str(Path(__file__).parent))

import pictures
import public_names
import scaling_tables
import troubleshooting
from keyword_types import keyword_types
from module_tables import module_table, room_list
from names import CONCEPTS

from rft.config.commands import load, typed
from rft.config.errors import SettingsError
from rft.config.names import ALIASES, OPPOSITES
from rft.config.schema import Required, Setting, flat_name, schema
from rft.config.values import allowed, as_text
from rft_algos.algorithms.published import ALIASES as ALGORITHM_ALIASES
from rft_algos.algorithms.published import PUBLISHED
from rft_cli.config.meanings import meanings
from rft_cli.config.resolve import resolve
from rft_cli.pages.run_plan_algorithm import component_text
from rft_cli.pretrainer.fields import FIELDS
from rft_cli.pretrainer.pages import own_default
from rft_cli.records.discovery import find_command, with_settings
from rft_core.errors import ExitCode
from rft_dist.launch.environment import REPORTED, environment_report
from rft_trainer.health.detectors import DETECTORS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FLAGS_FILE = Path(__file__).with_name("lightrft_flags.txt")
ALGORITHMS_ZH = Path(__file__).with_name("algorithms_zh.json")
"""What each algorithm is, in Chinese: one text a name."""


def pages() -> dict[Path, str]:
    """Every generated page with the text that it should have."""
    found = {DOCS / "reference" / f"{command}.md": reference(command) for command in with_settings()}
    found |= keyword_types()
    found |= public_names.pages() | pictures.pages()
    for path in sorted([*DOCS.glob("*.md"), *DOCS.glob("zh/*.md")]):
        text = path.read_text()
        if "<!-- generated:" in text:
            found[path] = filled(text)
    for path in [*ROOT.glob("packages/*/README.md"), ROOT / "kernels" / "README.md"]:
        (source,) = (path.parent / "src").glob("rft*")
        found[path] = filled(path.read_text(), {"modules": partial(module_table, source)})
    return found | troubleshooting.pages()


def filled(text: str, parts: Mapping[str, Callable[[], str]] | None = None) -> str:
    """The page with every generated part written anew."""
    by_name = PARTS | dict(parts or {})

    def part(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- generated: {name} -->\n{by_name[name]()}\n<!-- end: {name} -->"

    return re.sub(r"<!-- generated: ([\w-]+) -->.*?<!-- end: \1 -->", part, text, flags=re.S)


def reference(command: str) -> str:
    """One table a group: flag, value, default, meaning."""
    owner: Any = load(find_command(command).settings)
    lines = [
        f"# Settings of `rft-train {typed(command)}`",
        "",
        f"{inspect.getdoc(owner)} Generated from the code by `ci/generate_reference.py`.",
        "",
        "A flag, a key of a `--config` file and a row have one name. See [configuration](../configuration.md).",
    ]
    kinds = get_type_hints(owner)
    table = schema(command)
    for group in fields(owner):
        kind = kinds[group.name]
        texts = meanings(kind)
        lines += ["", f"## {group.name}", "", str(inspect.getdoc(kind)), ""]
        lines += ["| flag | takes | default | meaning |", "|---|---|---|---|"]
        for item in fields(kind):
            setting = table[flat_name(group, item.name)]
            lines.append(f"| `--{setting.name}` | {takes(setting)} | {default(setting)} | {cell(texts[item.name])} |")
    return "\n".join(lines) + "\n"


def takes(setting: Setting) -> str:
    """What a value may be."""
    if setting.is_switch:
        return "a switch"
    text = allowed(setting)
    return f"{text}; bare: `{setting.metadata['bare']}`" if "bare" in setting.metadata else text


def default(setting: Setting) -> str:
    """The default as it would be written."""
    if isinstance(setting.default, Required):
        return "required"
    return f"`{as_text(setting.default)}`" if as_text(setting.default) else "empty"


def cell(text: str) -> str:
    """A text that does not end a cell of a table."""
    return text.replace("|", "\\|")


def lightrft_flags() -> str:
    """Each flag of LightRFT's guides, with the value that the guides show: works, or why not and what instead."""
    lines = ["| flag | here | |", "|---|---|---|"]
    for words in FLAGS_FILE.read_text().splitlines():
        name, *value = words.split()
        given = [f"{name}={value[0]}"] if value else [name]
        try:
            resolve("rl", ["--pretrain", "MODEL", *(given if name != "--pretrain" else [])])
        except SettingsError as error:
            problem = error.problem
            reason = problem.what.partition("cannot be used: ")[2] or f"{problem.what}: {problem.why}"
            lines.append(f"| `{words}` | refused | {cell(reason)}. Instead: `{cell(problem.do)}` |")
        else:
            lines.append(f"| `{words}` | works | {cell(meaning_of(name.removeprefix('--')))} |")
    return "\n".join(lines)


def pretrainer_fields() -> str:
    """Each field of the pre-trainer's guide: the setting with its meaning, both defaults, and what becomes of it."""
    lines = ["| field | here | its default | ours | |", "|---|---|---|---|---|"]
    for row in FIELDS:
        own = own_default(row)
        place = f"`--{row.to}`" if own else ""
        lines.append(f"| `{row.group}.{row.name}` | {place} | {cell(row.default)} | {cell(own)} | {cell(row.about)} |")
    return "\n".join(lines)


def meaning_of(name: str) -> str:
    """What the flag of this name does in `rft-train rl`."""
    if name in OPPOSITES:
        return f"The contrary of `--{OPPOSITES[name]}`."
    setting = schema("rl")[ALIASES.get(name, name)]
    owner: Any = load(find_command("rl").settings)
    return meanings(get_type_hints(owner)[setting.group])[setting.name]


def algorithms() -> str:
    """One row a published algorithm, from its record."""
    lines = ["| name | what it is | advantage | surrogate | divergence | mean |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_algorithm_row, PUBLISHED)])


def algorithms_in_chinese() -> str:
    """The same rows, with what each algorithm is in Chinese."""
    about = json.loads(ALGORITHMS_ZH.read_text())
    lines = ["| 名称 | 说明 | 优势 | 代理目标 | 散度 | 平均方式 |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(_algorithm_row(kind, about[kind.name]) for kind in PUBLISHED)])


def _algorithm_row(kind: Any, about: str = "") -> str:
    """Names, text and parts of a record; `about` takes the place of its docstring."""
    aliases: dict[str, list[str]] = {}
    for alias, target in ALGORITHM_ALIASES.items():
        aliases.setdefault(target, []).append(alias)
    record = kind(max_tokens=1) if kind.name == "dr_grpo" else kind()
    divergence = (
        f"{record.kl_estimator} x {record.kl_coef:g} in the {record.kl_place}" if record.needs_reference else ""
    )
    if record.drift_coef:
        divergence = f"drift x {record.drift_coef:g} in the loss"
    names = ", ".join(f"`{name}`" for name in (kind.name, *aliases.get(kind.name, ())))
    over_batch = ", normalised over the batch" if record.normalise_advantages else ""
    correction = f", {component_text(record.correction)}" if record.correction.is_active else ""
    parts = (
        names,
        cell(about or " ".join(str(inspect.getdoc(kind)).split())),
        component_text(record.advantage) + over_batch,
        component_text(record.surrogate) + correction,
        divergence,
        record.aggregation.replace("_", " "),
    )
    return f"| {' | '.join(parts)} |"


def names_elsewhere() -> str:
    """One row a concept."""
    lines = ["| meaning | flag here | in code here | TRL | verl | OpenRLHF |", "|---|---|---|---|---|---|"]
    for c in CONCEPTS:
        flag = f"`--{c.flag}`" if c.flag else ""
        lines.append(f"| {c.meaning} | {flag} | `{c.code}` | {c.trl} | {c.verl} | {c.openrlhf} |")
    return "\n".join(lines)


EXIT_MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.OPTIONS: "a flag, a setting or a combination of them cannot be used",
    ExitCode.PREFLIGHT: "the machine, the environment or the installation lacks what the run needs",
    ExitCode.DATA: "a data file, a model directory or another artefact is absent, damaged or of another kind",
    ExitCode.NO_CHECKPOINT: "no usable checkpoint where one was asked for, or nothing left to resume",
    ExitCode.STORAGE: "the disk refused: full, read-only, quota, input/output error",
    ExitCode.NUMERICS: "non-finite gradients reached their limit",
    ExitCode.SERVICE: "a reward, an inference engine or the Hugging Face Hub is unavailable or answers wrongly",
    ExitCode.PEER: "another rank failed or did not arrive",
    ExitCode.ALARM: "an alarm of the run's health, with `--on_alarm stop`; saved, and not to be started again unseen",
    ExitCode.SAVED_AFTER_SIGNAL: "saved after a signal, or after an alarm with `--on_alarm pause`: start me again",
    ExitCode.OUTAGE: "a reward server or a judge was away for longer than `--reward_wait`; saved: start me again",
    ExitCode.NO_PROGRESS: "a job was started again three times and came to no newer checkpoint: do not start it again",
}


def exit_codes() -> str:
    """One row a code."""
    lines = ["| code | name | meaning |", "|---|---|---|"]
    return "\n".join(lines + [f"| {int(code)} | {code.name} | {EXIT_MEANINGS[code]} |" for code in ExitCode])


def detectors() -> str:
    """One row a detector."""
    lines = [
        "| detector | level | steps | threshold | metrics | true when | setting |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in DETECTORS:
        metrics = ", ".join(f"`{name}`" for name in one.metrics.split())
        threshold = f"{one.threshold:g}" if one.threshold else ""
        row = (f"`{one.name}`", one.level, str(one.window), threshold, metrics, one.when, f"`--{one.setting}`")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def environment() -> str:
    """One row a variable."""
    lines = ["| variable | effect |", "|---|---|"]
    rows = environment_report(dict.fromkeys(REPORTED, "1") | {"NCCL_BACKEND": "nccl"})
    return "\n".join(lines + [f"| `{name}` | {effect.rpartition('; set by')[0]} |" for name, _, effect in rows])


LAYERS = ("core", "algos", "models", "dist", "engine", "trainer", "", "genrec", "cli", "kernels")
"""Packages from the bottom to the top, the kernels last."""


def all_rooms() -> str:
    """The rooms of every package."""
    names = [f"rft_{layer}".rstrip("_") for layer in LAYERS]
    sources = {path.name: path for path in [*ROOT.glob("packages/*/src/rft*"), *ROOT.glob("kernels/src/rft*")]}
    assert sources.keys() == set(names), "a package is missing in LAYERS"
    return room_list(sources[name] for name in names)


PARTS: dict[str, Callable[[], str]] = {
    "algorithms": algorithms,
    "algorithms-zh": algorithms_in_chinese,
    "lightrft-flags": lightrft_flags,
    "pretrainer-fields": pretrainer_fields,
    "names": names_elsewhere,
    "exit-codes": exit_codes,
    "detectors": detectors,
    "environment": environment,
    "rooms": all_rooms,
    **scaling_tables.PARTS,
}


def main(argv: list[str]) -> int:
    """Write, or with --check report; 1 where a page was out of date."""
    stale = [path for path, text in pages().items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        print(f"{'out of date' if '--check' in argv else 'written'}: {path.relative_to(ROOT)}")
        if "--check" not in argv:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages()[path])
    return int(bool(stale) and "--check" in argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
