"""A command of `rft-train` as one record: what it is called, what its flags are, and what other commands ask of it.

`check`, `plan`, `resume` and `recipes` read the record of a command; none of them knows a command by name. The
program's own records are in `rft_cli.commands.table`. A package of its own adds one by an entry point of the group
`rft.commands`, whose value names the record:

    [project.entry-points."rft.commands"]
    distill = "my_package.commands:DISTILL"

A record names functions as texts, "module:function", which are imported when they are called: pages need no torch.
A command of two words, such as `rft-train genrec data`, is one whose name joins them: `genrec-data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

RecordT = TypeVar("RecordT")
StageResult = Literal["run", "output", "model", "tokenizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A number of runs as the pages show it."""

    name: str
    """A metric of metrics.jsonl, or what evals.jsonl has as `eval/NAME`."""
    label: str = ""
    """Head of its column; empty for what has none of its own."""
    is_share: bool = False
    """Shown in per cent."""
    less_is_better: bool = False
    """Whether a fall of it is an improvement."""
    digits: int = 3
    """Digits after the point in the plain line of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """Training of a command that makes runs: each field is the name of a function or an object.

    A command that `extends` another leaves empty what is the other's; all others fill every field without a default
    that is said to be one.
    """

    purpose: str = ""
    """What it does with a model, as a line of a page proposes it: `train it on demonstrations`."""
    train: str = ""
    """`(resolved, words, *, in_place, front) -> rft.run_lifecycle.TrainedRun`: train to the end of the run."""
    check: str = ""
    """`(settings, world_size) -> rft.check.Checked`: read data and reward as the start would, without weights."""
    workload: str = ""
    """`rft.planning.workload.Workload`: what a rank holds and does beside training, by formula."""
    plan_lines: str = ""
    """`(resolved, data) -> [(title, lines)]`: the plan page of a run, machine and notes apart."""
    models: str = ""
    """`(resolved, machine) -> [(title, lines)]`: the plan page's lines on the models that are held."""
    next_commands: str = ""
    """`(run directory) -> [(command, purpose)]`: what the end page proposes."""
    measure: Measure = Measure(name="")
    """The metric that is its column in the table of runs."""
    held_out: Measure = Measure(name="")
    """The number of its evaluations."""
    prepare: str = ""
    """`(resolved) -> resolved`: make what the settings describe and do not name, such as a new model, and name it."""
    fit: str = ""
    """`(resolved, machine) -> resolved`: choose what follows from the memory of the machine; empty = nothing does."""
    line: tuple[Measure, ...] = ()
    """What the line of a step and the live panel show beside `measure`, where the step has it."""
    curves: str = ""
    """Names of the metrics that are drawn for one run, where it has them, divided by spaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One verb of `rft-train`."""

    name: str
    summary: str
    """One line of `rft-train --help`."""
    two_words: bool = False
    """Whether people type the name as two words: `genrec-data` is `rft-train genrec data`."""
    run: str = ""
    """`(argv) -> exit code`; empty for a command that trains, which is run by its `training`, or that acts."""
    act: str = ""
    """`(resolved) -> lines`: do what the settings ask, and yield the lines that are shown, as they come; for a command
    with settings that trains nothing."""
    extends: str = ""
    """Command whose record stands in for the fields that this one leaves empty, those of its training too."""
    settings: str = ""
    """Class of its settings, from which flags, files, help and reference page follow; empty if it has none."""
    rules: str = ""
    """`(SourcedValues) -> problems`: contradictions between its settings, beside those that every command has."""
    notes: str = ""
    """`(SourcedValues, defaults) -> lines`: settings of its own that have no effect beside the others."""
    derive: str = ""
    """`(SourcedValues) -> rft.config.spellings.Derived`: settings that follow from others; empty = none do."""
    makes: str = ""
    """Names of the settings that `prepare` fills, divided by spaces: what needs one of them is not idle without it."""
    spellings: str = ""
    """`() -> rft.config.spellings.Spellings`: names of another program that it takes beside its own; empty = none."""
    nodes: str = ""
    """`(argv) -> rft_dist.launch.spawn.Nodes | None`: the machines that start ranks of one run, each with this command;
    empty = ranks of several machines are started by a launcher."""
    essential: str = ""
    """Names of the settings that `--help` shows, divided by spaces: those which most runs choose; empty = all."""
    help_tables: str = ""
    """`() -> [(title, {name: line})]`: what the help has below the settings."""
    training: TrainingRecord | None = None
    is_default: bool = False
    """Whether it is meant where a page or a recipe names no command; one command is."""
    trains: bool = False
    """Whether it starts runs of other commands, which go on without their terminal."""
    switches: tuple[tuple[str, str], ...] = ()
    """(flag, command): with the flag it is that other command, with the settings of that one."""
    takes_run: bool = False
    """Whether a run may stand in place of the model, as in `rft-train eval RUN`."""
    first_word: str = ""
    """Setting whose flag may be left out before a first word, as in `rft-train report RUN`; empty = none."""
    takes_words: bool = False
    """Whether further words belong to `first_word`, joined by commas, as in `rft-train dashboard FOLDER FOLDER`."""
    stage_result: StageResult | None = None
    """By what a stage of a recipe is found to be finished: the summary of a run, an output file, a model or a
    tokenizer; None where no stage can run it."""
    fault: str = ""
    """Why the record of another package cannot be used; empty for every command that works."""

    def completed(self, base: Command) -> Command:
        """Return this record with what it leaves empty from the record of the command that it extends."""
        training = self.training
        if training is not None and base.training is not None:
            training = _filled(training, base.training)
        return replace(_filled(self, base), training=training, is_default=False, name=self.name)

    def with_flag(self, argv: Sequence[str]) -> list[str]:
        """Return the words with the flag of `first_word` where it was left out."""
        bare = 0
        while self.first_word and bare < len(argv) and not argv[bare].startswith("-"):
            bare += 1
            if not self.takes_words:
                break
        return [f"--{self.first_word}", ",".join(argv[:bare]), *argv[bare:]] if bare else list(argv)

    @property
    def makes_runs(self) -> bool:
        """True for a command that trains, by itself or by starting commands that do."""
        return self.trains or self.training is not None


def _filled(record: RecordT, base: RecordT) -> RecordT:
    """Return a record whose fields without a value have those of another."""
    copied: Any = record
    names = [field.name for field in fields(copied)]
    empty = [name for name in names if not (value := getattr(record, name)) or value == Measure(name="")]
    return replace(copied, **{name: getattr(base, name) for name in empty})
