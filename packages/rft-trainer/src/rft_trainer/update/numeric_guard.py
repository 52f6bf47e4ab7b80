"""Guard of optimizer steps: one that is refused is repeated, taken without its bad rows, or ends the run.

    refused      the gradient's norm n is not finite on any rank, or n > k * median(n of the last applied steps)
    repeated     nothing wrong is found when the step is run again: a fault of the machine; once a step
    set aside    rows are found that make it so, and fewer than half: the step is taken as if they were not in the batch
    gone back    the rows set aside would exceed the budget: they are left out from the last checkpoint on, if the run
                 can go back to it (`rft_trainer.runs.rollback`)
    ended        it cannot, or a weight is not finite

No value that is not finite becomes a number: it is refused, or its row is left out and counted.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rft_core.errors import NumericsError
from rft_trainer.batches.memory_use import MemoryUse
from rft_trainer.batches.packing import count
from rft_trainer.batches.units import units_of
from rft_trainer.records.rollouts import Counts, TrainingSample

_LOG = logging.getLogger(__name__)
_WINDOW = 64
"""Applied steps whose norms a new one is compared with."""
_JUMP = "a gradient of a norm above the bound"
_FEWEST = 16
"""Without as many norms nothing is called a spike: the first steps of a run are its largest."""
_MOST_LARGEST = 3
"""Units that are reported as those with the largest gradients."""
_WATCHED_FACTOR, _MOST_NAMED = 50.0, 8
"""Medians above which the rows of an applied step are named, as `gradient_spike` of the health of a run tells it; and
steps of a run of which they are: each costs about as much as a step."""


@dataclass(frozen=True, slots=True)
class RowFault:
    """The first thing of one unit that is not finite, or too large."""

    sample_ids: tuple[str, ...]
    stage: str
    """What it is: an input of the step, the output of a module, the loss, a gradient."""
    rank: int
    low: float | None = None
    """The smallest finite number that went into it; None where there is none."""
    high: float | None = None

    def __str__(self) -> str:
        """Say samples, stage, rank and the range of what went in."""
        into = f", from inputs between {self.low:.4g} and {self.high:.4g}" if self.low is not None else ""
        return f"{' + '.join(self.sample_ids)}: {self.stage} (rank {self.rank}{into})"


@dataclass(frozen=True, slots=True)
class RowNorm:
    """The norm of the gradient of one unit alone, under the denominators of its step."""

    sample_ids: tuple[str, ...]
    norm: float

    def __str__(self) -> str:
        """Say samples and norm."""
        return f"{' + '.join(self.sample_ids)} (norm {self.norm:.4g})"


def largest_norms(norms: Sequence[RowNorm]) -> tuple[RowNorm, ...]:
    """Return the units with the largest gradients, the largest first; none where one is not finite."""
    if not all(math.isfinite(one.norm) for one in norms):
        return ()
    return tuple(sorted(norms, key=lambda one: one.norm, reverse=True)[:_MOST_LARGEST])


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of a trace, the same on every rank."""

    faults: tuple[RowFault, ...] = ()
    largest: tuple[RowNorm, ...] = ()
    """The units with the largest gradients, the largest first, where all gradients are finite."""
    weights: tuple[str, ...] = ()
    """Weights that are not finite: then no row is at fault, and nothing else was looked at."""

    @classmethod
    def joined(cls, found: Sequence[Diagnosis]) -> Diagnosis:
        """Return what was found in the batches of one step, whose weights are finite."""
        faults = tuple(fault for one in found for fault in one.faults)
        return cls(faults, largest_norms([row for one in found for row in one.largest]))


class RowsBeyondBudgetError(NumericsError):
    """More rows are at fault than may be set aside; raised on every rank, before a weight has changed."""

    part: str = "policy"
    """The model whose step it was, as in the names of its metrics."""
    faults: tuple[RowFault, ...] = ()


@dataclass(slots=True, kw_only=True)
class NumericGuard:
    """Guard of the optimizer steps of one model; what it remembers is part of a checkpoint."""

    part: str = "policy"
    """The model, as in the names of its metrics."""
    max_rows: int = 0
    """Rows that may be set aside in a run; 0 = a refused step is skipped whole."""
    spike_factor: float = 0.0
    """Norms above so many medians are refused; 0 = finite ones never are."""
    keeps_out: bool = False
    """Whether a row stays set aside for the whole run; otherwise for the training step, as samples are drawn anew."""
    record: Callable[[Mapping[str, object]], None] | None = None
    """Takes a row of what happened, as JSON; called on every rank."""
    keep_memory: Callable[[MemoryUse], None] | None = None
    """Writes what held the memory where it ran out; called by the rank that it happened to."""
    resume_command: str = ""
    """Continues the run: a command, or a call; what is to change is added to it."""
    record_file: str = ""
    """The file that `record` writes to, for a message."""
    set_aside: dict[str, str] = field(default_factory=dict[str, str])
    """Rows set aside, each with its reason."""
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """Rows left out for the rest of the run, beyond the budget, since it went back past them; each with its reason."""
    num_rows: int = 0
    repeated: int = 0
    spikes: int = 0
    halved: int = 0
    named: int = 0
    """Applied steps with a jump whose rows were named."""
    largest_rows: str = ""
    """The rows with the largest gradients of the present training step, where the norm jumped."""
    _norms: deque[float] = field(default_factory=lambda: deque[float](maxlen=_WINDOW))

    def begin_step(self) -> None:
        """Forget the rows of the step before, where samples are drawn anew in every training step."""
        self.largest_rows = ""
        if not self.keeps_out:
            self.set_aside.clear()

    def without_set_aside(
        self, samples: Sequence[TrainingSample], counts: Counts
    ) -> tuple[Sequence[TrainingSample], Counts]:
        """Return the samples that are left, and the denominators without the others; whole units."""
        if not self.set_aside and not self.left_out:
            return samples, counts
        names = {*self.set_aside, *self.left_out}
        units = [(unit, any(one.sample_id in names for one in unit)) for unit in units_of(samples)]
        left = [one for unit, out in units if not out for one in unit]
        gone = count([one for unit, out in units if out for one in unit])
        return left, Counts(
            counts.num_loss_tokens - gone.num_loss_tokens,
            counts.num_sequences - gone.num_sequences,
            num_units=counts.num_units - gone.num_units,
            loss_weight=_less(counts, gone),
        )

    def largest_norm(self) -> float:
        """Return the norm above which a gradient is refused; infinity where none is."""
        return self._medians(self.spike_factor) if self.spike_factor else math.inf

    def watched_norm(self) -> float:
        """Return the norm above which the rows of an applied step are named; infinity where none are."""
        return self._medians(_WATCHED_FACTOR) if self.named < _MOST_NAMED else math.inf

    def _medians(self, factor: float) -> float:
        return factor * median(self._norms) if len(self._norms) >= _FEWEST else math.inf

    def memory_ran_out(self, use: MemoryUse) -> MemoryUse:
        """Write what held the memory, and return it."""
        if self.keep_memory is not None:
            self.keep_memory(use)
        return use

    def applied(self, norm: float) -> None:
        """Remember the norm of a step that was applied."""
        # a step without signal has a gradient of 0, which says nothing about the size of the others
        if norm > 0:
            self._norms.append(norm)

    def name_rows(self, diagnosis: Diagnosis, norm: float, *, where: str) -> None:
        """Tell the rows with the largest gradients of a step that was applied although its norm jumped."""
        self.named += 1
        self._keep_largest(diagnosis)
        kind = f"gradient norm {norm:.4g}, {norm / median(self._norms):.3g} times the median; the step was applied"
        self._report(where, kind, norm, diagnosis)

    def _keep_largest(self, diagnosis: Diagnosis) -> None:
        self.largest_rows = ", ".join(map(str, diagnosis.largest))

    def decide(self, diagnosis: Diagnosis, norm: float, *, num_units: int, attempt: int, where: str) -> bool:
        """Return whether to take a refused step again; rows at fault are set aside then.

        Args:
            diagnosis: what a trace found, the same on every rank.
            norm: of the refused gradient.
            num_units: units of the step; where most of them are at fault no row is.
            attempt: how often the step was taken, from 0.
            where: the step, for what is recorded.

        Raises:
            RowsBeyondBudgetError: the budget of rows is used up.
            NumericsError: a weight is not finite.
        """
        spike = math.isfinite(norm)
        self.spikes += spike
        kind = "loss or gradient is not finite"
        if spike:
            kind = f"gradient norm {norm:.4g}, above {self.largest_norm():.4g}"
            self._keep_largest(diagnosis)
        if diagnosis.weights:
            raise _bad_weights(diagnosis.weights, where, self.resume_command)
        if not diagnosis.faults:
            # a spike that no row causes alone is the batch's own, and a repetition would give it again
            again = not spike and attempt == 0
            self.repeated += again
            done = "the step is taken again" if again else "the step is skipped"
            self._report(where, f"{kind}; no row is at fault alone: {done}", norm, diagnosis)
            return again
        if 2 * len(diagnosis.faults) > num_units > 1:
            # rows that most others agree with are not at fault
            self._report(
                where,
                f"{kind} for {len(diagnosis.faults)} of {num_units} rows: the model or the learning rate "
                "is at fault, and the step is skipped",
                norm,
                diagnosis,
            )
            return False
        return self._set_aside(diagnosis, kind, norm, where)

    def refuse_scores(self, faults: Sequence[RowFault], *, where: str) -> bool:
        """Return whether samples are left out whose scores, from which advantages are made, are not finite.

        Raises:
            RowsBeyondBudgetError: the budget of rows is used up.
        """
        known = [fault for fault in faults if self.left_out.keys() >= set(fault.sample_ids)]
        if len(known) == len(faults):
            return True
        diagnosis = Diagnosis(tuple(fault for fault in faults if fault not in known))
        return self._set_aside(diagnosis, "a score is not finite", math.nan, where)

    def _set_aside(self, diagnosis: Diagnosis, kind: str, norm: float, where: str) -> bool:
        rows = [name for fault in diagnosis.faults for name in fault.sample_ids]
        if self.num_rows + len(rows) > self.max_rows:
            self._report(where, f"{kind}; {_rows(len(rows))} at fault, more than may be set aside", norm, diagnosis)
            if self.max_rows:
                raise self._too_many(diagnosis, where)
            return False
        verb, them = ("is", "it") if len(rows) == 1 else ("are", "them")
        what = f"{kind}; {_rows(len(rows))} {verb} set aside, the step is taken without {them}"
        self._report(where, what, norm, diagnosis)
        self.num_rows += len(rows)
        self.set_aside |= {name: fault.stage for fault in diagnosis.faults for name in fault.sample_ids}
        return True

    @property
    def metrics(self) -> dict[str, float | str]:
        """Return how often the guard acted since the start of the run, by metric name; without what never happened.

        `largest_rows` are those of the present step, where its gradient norm jumped.
        """
        counted = {
            "rows_set_aside": self.num_rows,
            "rows_left_out": len(self.left_out),
            "updates_repeated": self.repeated,
            "spikes": self.spikes,
            "micro_batch_halvings": self.halved,
        }
        found: dict[str, float | str] = {
            f"{self.part}/{name}": float(number) for name, number in counted.items() if number
        }
        return found | ({f"{self.part}/largest_rows": self.largest_rows} if self.largest_rows else {})

    def resumed_with(self, flags: str) -> str:
        """Return the command or the call that continues the run with other settings, each a flag with its value."""
        if self.resume_command.endswith(")"):  # a loop of a person's own is continued by a call
            switched_off = re.sub(r"--no-(\w+)", r"--\1 False", flags)
            given = (f", {name}={value}" for name, value in re.findall(r"--(\w+) (\S+)", switched_off))
            return f"{self.resume_command[:-1]}{''.join(given)})"
        return f"{self.resume_command} {flags}".strip()

    def state(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        return {
            "set_aside": dict(self.set_aside) if self.keeps_out else {},
            # left out where there is none, so that the bytes of a save do not change
            **({"left_out": dict(self.left_out)} if self.left_out else {}),
            **({"named": self.named} if self.named else {}),
            "num_rows": self.num_rows,
            "repeated": self.repeated,
            "spikes": self.spikes,
            "halved": self.halved,
            "norms": list(self._norms),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state()` returned."""
        self.set_aside, self.left_out = dict(state["set_aside"]), dict(state.get("left_out", {}))
        self.num_rows, self.repeated = int(state["num_rows"]), int(state["repeated"])
        self.spikes, self.halved = int(state["spikes"]), int(state["halved"])
        self.named = int(state.get("named", 0))
        self._norms.clear()
        self._norms.extend(float(norm) for norm in state["norms"])

    def _report(self, where: str, what: str, norm: float, diagnosis: Diagnosis) -> None:
        first = f"; first: {diagnosis.faults[0]}" if diagnosis.faults else ""
        if diagnosis.largest and not diagnosis.faults:
            first = f"; largest gradients: {', '.join(map(str, diagnosis.largest))}"
        _LOG.warning("%s of the %s: %s%s", where, self.part, what, first)
        if self.record is not None:
            faults = [
                {"samples": list(fault.sample_ids), "stage": fault.stage, "rank": fault.rank}
                for fault in diagnosis.faults
            ]
            largest = [{"samples": list(one.sample_ids), "norm": one.norm} for one in diagnosis.largest]
            # as a string where it is no number that JSON has
            shown = norm if math.isfinite(norm) else str(norm)
            row: dict[str, object] = {"where": where, "part": self.part, "what": what, "norm": shown, "faults": faults}
            self.record(row | ({"largest": largest} if largest else {}))

    def _too_many(self, diagnosis: Diagnosis, where: str) -> RowsBeyondBudgetError:
        needed = self.num_rows + sum(len(fault.sample_ids) for fault in diagnosis.faults)
        rows = "; ".join(map(str, diagnosis.faults[:3]))
        error = RowsBeyondBudgetError(
            code="numerics.rows",
            what=f"{needed} rows would be set aside, {self.max_rows} are allowed (--max_rows_set_aside)",
            where=f"{where} of the {self.part}; {rows}",
            why="rows whose loss or gradient is not finite, or jumps, are left out within that budget"
            + self._in_common(diagnosis),
            state="no weight was changed by this step",
            do=self._remedy(needed),
        )
        error.part, error.faults = self.part, diagnosis.faults
        return error

    def _stages(self, diagnosis: Diagnosis) -> Counter[str]:
        """Count the kinds of stages of the rows at fault, with those that this process knows to be set aside."""
        found = [fault.stage for fault in diagnosis.faults for _ in fault.sample_ids]
        return Counter(map(_kind, [*self.set_aside.values(), *found]))

    def _in_common(self, diagnosis: Diagnosis) -> str:
        stages = self._stages(diagnosis)
        stage, number = stages.most_common(1)[0]
        return f"; what was wrong first in {number} of the {_rows(stages.total())} that are known here: {stage}"

    def _remedy(self, needed: int) -> str:
        """Look at the rows; with room for them the step is taken without them, whatever is wrong with each."""
        which = f"the rows that {self.record_file} names" if self.record_file else "these rows"
        return f"look first at {which}, then: {self.resumed_with(f'--max_rows_set_aside {2 * needed}')}"


def _kind(stage: str) -> str:
    """Return a stage without the numbers of its row."""
    return _JUMP if stage.startswith("gradient of norm ") else stage


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{number} rows"


def _bad_weights(names: Sequence[str], where: str, resume_command: str) -> NumericsError:
    return NumericsError(
        code="numerics.model_weights",
        what=f"{len(names)} weights hold values that are not finite: {', '.join(names[:3])}",
        where=where,
        why="no row is at fault: every forward of such a model gives values that are not finite",
        state="no weight was changed by this step, and none of these was saved",
        do=resume_command,
    )


def _less(counts: Counts, gone: Counts) -> float | None:
    """Return the sum of the weights without those of the samples that are gone."""
    if counts.loss_weight is None:
        return None
    return counts.loss_weight - (gone.num_loss_tokens if gone.loss_weight is None else gone.loss_weight)
