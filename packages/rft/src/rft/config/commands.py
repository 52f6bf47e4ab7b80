"""Commands as far as their settings go: a name, a class of settings, and the rules between them.

The library's own are listed here. Those of other packages are found by the entry points of the group `rft.commands`,
whose values are records with these attributes, and more for the command line (`rft.config.command_record`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

GROUP = "rft.commands"
"""Group of entry points that name records."""
SPELLINGS = "rft.spellings"
"""Group of entry points that name, for a command, `() -> rft.config.spellings.Spellings`."""


class ConfiguredCommand(Protocol):
    """A command whose settings can be given."""

    @property
    def name(self) -> str: ...
    @property
    def settings(self) -> str:
        """Class of its settings as "module:class"; empty if it has none."""
        ...

    @property
    def rules(self) -> str:
        """`(SourcedValues) -> problems`: contradictions between its settings, beside those that every command has."""
        ...

    @property
    def notes(self) -> str:
        """`(SourcedValues, defaults) -> lines`: settings of its own that have no effect beside the others."""
        ...

    @property
    def derive(self) -> str:
        """`(SourcedValues) -> rft.config.spellings.Derived`: settings that follow from others; empty = none do."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSettings:
    """Settings of one of the library's own commands; each field but the name says where an object is."""

    name: str
    settings: str
    rules: str = ""
    notes: str = ""
    derive: str = ""


SFT = CommandSettings(
    name="sft",
    settings="rft.settings:SftSettings",
    rules="rft.config.rules.sft:problems",
    notes="rft.config.rules.sft:idle_settings",
)
PRETRAIN = CommandSettings(
    name="pretrain",
    settings="rft.settings:PretrainSettings",
    rules="rft.config.rules.pretrain:problems",
    notes="rft.config.rules.pretrain:idle_settings",
    derive="rft.config.rules.pretrain_depth:from_depth",
)
DPO = CommandSettings(
    name="dpo",
    settings="rft.settings:DpoSettings",
    rules="rft.config.rules.dpo:problems",
    notes="rft.config.rules.dpo:idle_settings",
)
RM = CommandSettings(
    name="rm",
    settings="rft.settings:RmSettings",
    rules="rft.config.rules.rm:problems",
    notes="rft.config.rules.rm:idle_settings",
)
RM_TEST = CommandSettings(name="rm-test", settings="rft.settings:RmTestSettings")
RL = CommandSettings(
    name="rl",
    settings="rft.settings:RlSettings",
    rules="rft.config.rules.rl:problems",
    notes="rft.config.rules.rl:idle_settings",
)
EVAL = CommandSettings(name="eval", settings="rft.settings:EvalSettings", rules="rft.config.rules.rewards:problems")
SERVE_REWARD = CommandSettings(
    name="serve-reward", settings="rft.settings:ServeRewardSettings", rules="rft.config.rules.rewards:problems"
)
GENERATE = CommandSettings(name="generate", settings="rft.settings:GenerateSettings")
CONFORMANCE = CommandSettings(
    name="conformance",
    settings="rft.settings:ConformanceSettings",
    rules="rft.config.rules.compared_engines:problems",
)
DOCTOR = CommandSettings(name="doctor", settings="rft.settings:DoctorSettings")
REPORT = CommandSettings(name="report", settings="rft.settings:ReportSettings")
DASHBOARD = CommandSettings(name="dashboard", settings="rft.settings:DashboardSettings")
BUILD = CommandSettings(name="build", settings="rft.settings:BuildModelSettings")
PERPLEXITY = CommandSettings(name="perplexity", settings="rft.settings:PerplexitySettings")
TOKENIZER = CommandSettings(name="tokenizer", settings="rft.settings:TrainTokenizerSettings")
OWN = (
    *(SFT, PRETRAIN, DPO, RM, RM_TEST, RL, EVAL, SERVE_REWARD, GENERATE, CONFORMANCE, DOCTOR, BUILD, TOKENIZER),
    *(PERPLEXITY, REPORT, DASHBOARD),
)

_PROGRAMS: list[Callable[[], Mapping[str, ConfiguredCommand]]] = []


def installed_spellings(command: str) -> Any:
    """Return the names of another program that a command takes beside its own; None where no package has any."""
    found = next(iter(entry_points(group=SPELLINGS, name=command)), None)
    return None if found is None else found.load()()


def add_program(commands: Callable[[], Mapping[str, ConfiguredCommand]]) -> None:
    """Let a program add its commands: `commands` returns them by name, each time anew."""
    _PROGRAMS.append(commands)


@dataclass(frozen=True, slots=True)
class PackageRecord:
    """Record of another package, or the reason why it has none that can be used."""

    name: str
    package: str
    record: Any = None
    """None where it cannot be used."""
    fault: str = ""
    """Why it cannot be used."""


def load(name: str) -> Any:
    """Import what a text "module:attribute" names."""
    module, _, attribute = name.partition(":")
    found: Any = import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def package_records() -> Iterator[PackageRecord]:
    """Yield what every entry point of `rft.commands` names, by its name; one that cannot be used says why."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        yield _of_package(entry)


def _of_package(entry: EntryPoint) -> PackageRecord:
    package = entry.dist.name if entry.dist else entry.value
    source = f"{entry.value} of {package}"
    try:
        record = entry.load()
    except Exception as error:  # noqa: BLE001 - whatever a module of another package raises while it is imported
        return PackageRecord(entry.name, package, fault=f"{source}: {type(error).__name__}: {error}")
    if getattr(record, "name", None) != entry.name:
        return PackageRecord(entry.name, package, fault=f"{source} is no record of a command {entry.name}")
    return PackageRecord(entry.name, package, record)


def known() -> dict[str, ConfiguredCommand]:
    """Every command with settings by its name: the library's own, those of programs and of other packages."""
    rows: dict[str, ConfiguredCommand] = {row.name: row for row in OWN}
    others = [row for program in _PROGRAMS for row in program().values()]
    others += [found.record for found in package_records() if found.record is not None]
    for row in others:
        if getattr(row, "settings", ""):
            rows.setdefault(row.name, row)
    return rows


def full_record(name: str) -> Any:
    """Return the record of a command with all that a program says of it; None where no program has added one."""
    return next((row for program in _PROGRAMS for row in program().values() if row.name == name), None)


def configured(name: str) -> ConfiguredCommand:
    """The command of this name, which is known to have settings."""
    # the library's own first: they need no look at what is installed
    return next((row for row in OWN if row.name == name), None) or known()[name]


def typed(name: str) -> str:
    """Return a command as people type it: `genrec-data` is `genrec data`, as its record says."""
    if "-" not in name:
        return name
    return name.replace("-", " ", 1) if getattr(known().get(name), "two_words", False) else name
