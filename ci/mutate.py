"""Mutation test: small faults, one at a time, each of which the tests of its package must notice.

    python ci/mutate.py --list                       every mutant's id and line, of the equations (rft-algos)
    python ci/mutate.py --sample 60 --seed 7         60 of them, drawn by the seed
    python ci/mutate.py --module surrogates.ppo      those of one module
    python ci/mutate.py --jobs 2                     all, two at a time
    python ci/mutate.py --package rft-trainer --sample 40 --seed 7     of another package
    python ci/mutate.py --package rft --sample 20 --whole_runs         what survives meets all that reaches it

Ends with 1 if fewer are noticed than --required says, and with 2 if the run says nothing: tests of the
equations that fail without a mutant, or an entry of ci/mutation_equivalents.json that is no mutant.
docs/mutation.md says more.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a fork copies no threads
sys.path.insert(0, str(Path(__file__).parent))

import torch
from mutation import running, tree
from mutation.operators import Mutant
from mutation.running import Change, Job, Report
from mutation.whole_runs import WholeRuns

REPOSITORY = Path(__file__).parents[1]
REQUIRED = 0.95
"""Share of mutants that must be killed; those proved equivalent are not counted."""
MOST_EQUIVALENT = 0.02
"""Share of all mutants that may be called equivalent."""
LEAST_TIME, TIME_FACTOR = 3.0, 10.0
"""A run of tests is ended after this many seconds and this many times what it takes without a mutant."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant."""

    id: str
    verdict: str
    """killed, survived, timeout (killed too) or equivalent."""
    killer: str
    before: str
    after: str
    seconds: float


def words() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", default=tree.EQUATIONS, choices=(tree.EQUATIONS, *tree.OTHERS))
    parser.add_argument("--module", action="append", help="below the package, such as surrogates.ppo; may be repeated")
    parser.add_argument("--sample", type=int, help="how many mutants, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="children at a time")
    parser.add_argument("--whole_runs", action="store_true", help="survivors meet every test that reaches their line")
    parser.add_argument("--reach", type=Path, help="folder that keeps which test reaches which line (an empty one)")
    parser.add_argument("--lenient", action="store_true", help="leave out tests that fail without a mutant")
    parser.add_argument("--required", type=float, default=REQUIRED, help="share that must be noticed, from 0 to 1")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, help="write every outcome there, a line each")
    return parser.parse_args()


def chosen(arguments: argparse.Namespace, found: dict[str, list[Mutant]], proofs: dict[str, str]) -> list[Mutant]:
    """The mutants to run, in the order of modules and places."""
    modules = arguments.module or list(found)
    unknown = [name for name in modules if name not in found]
    if unknown:
        raise tree.Refused(f"no such module: {', '.join(unknown)}; there are {', '.join(found)}")
    mutants = [mutant for name in modules for mutant in found[name]]
    if arguments.sample is None:
        return mutants
    candidates = [mutant for mutant in mutants if mutant.id not in proofs]
    drawn = {mutant.id for mutant in sorted(candidates, key=_lot(arguments.seed))[: arguments.sample]}
    return [mutant for mutant in candidates if mutant.id in drawn]


def _lot(seed: int) -> Callable[[Mutant], bytes]:
    """A mutant's place in the draw: of itself alone, so that a change elsewhere does not draw other mutants."""
    met: Counter[tuple[object, ...]] = Counter()

    def lot(mutant: Mutant) -> bytes:
        met[mutant.unplaced] += 1
        words = (seed, *mutant.unplaced, mutant.replacement, met[mutant.unplaced])
        return hashlib.sha256("\0".join(map(str, words)).encode()).digest()

    return lot


def unmutated(files: Iterable[Path], lenient: bool) -> dict[str, float]:
    """Seconds of every test of these files, without a mutant; all must pass, or they are left out."""
    reports: list[Report] = []
    job = Job(None, sorted(set(files)), 1800)
    running.run_all(iter([(job, lambda report: reports.append(report))]), 1)
    [report] = reports
    if not report.passed and not (lenient and report.durations):
        raise tree.Refused(f"without any mutant: {', '.join(report.failures) or report.failure}")
    if report.failures:
        print("left out, because they fail without a mutant:", *report.failures, sep="\n  ")
    for name in report.modules:  # what every child would import again
        if _is_shared(name.partition(".")[0]):
            # what another test brought under a name of its own is no module to import
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    return report.durations


def _is_shared(name: str) -> bool:
    """Whether a library may be imported once for all children: it starts no thread and knows nothing of the package."""
    if name in sys.stdlib_module_names | {"torch", "hypothesis", "_pytest", "numpy"}:
        return True
    return tree.is_wider() and name in {"transformers", "tokenizers", "safetensors", "yaml", "regex", "huggingface_hub"}


def groups_of(module: str) -> list[list[Path]]:
    """Files of tests in the order in which a mutant meets them."""
    files = tree.tests_of(module)
    return [group for group in (files.by_name, files.others) if group]


def in_stages(mutants: list[Mutant], arguments: argparse.Namespace, tell: Callable[[Outcome], None]) -> list[Outcome]:
    """Outside of the equations: every mutant against the file of its module, then what survives against the others.

    Those others are run without a mutant only where there is a survivor, since they take minutes. With --whole_runs
    what survives them too meets the tests that cross packages.
    """
    outcomes: list[Outcome] = []
    by_id = {mutant.id: mutant for mutant in mutants}
    for number in range(2):
        groups = {module: _stage(module, number) for module in {mutant.module for mutant in mutants}}
        durations = unmutated((path for files in groups.values() for path in files), lenient=True)
        told = run(mutants, durations, arguments.jobs, lambda outcome: None, partial(_group_of, groups))
        survivors = {outcome.id for outcome in told if outcome.verdict == "survived"}
        again = {mutant.id for mutant in mutants if mutant.id in survivors and _stage(mutant.module, 1)}
        final = [outcome for outcome in told if number or outcome.id not in again]
        for outcome in final:
            if outcome.verdict != "survived" or not arguments.whole_runs:
                tell(outcome)
        outcomes += final
        mutants = [mutant for mutant in mutants if not number and mutant.id in again]
        if not mutants:
            break
    return in_whole_runs(outcomes, by_id, arguments, tell) if arguments.whole_runs else outcomes


def in_whole_runs(
    outcomes: list[Outcome], mutants: dict[str, Mutant], arguments: argparse.Namespace, tell: Callable[[Outcome], None]
) -> list[Outcome]:
    """Every survivor against every test of tier 1 that reaches its line; one that they notice is no survivor."""
    if not any(outcome.verdict == "survived" for outcome in outcomes):
        return outcomes
    final: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="rft-whole-runs-") as folder:
        runs = WholeRuns(REPOSITORY, arguments.reach or Path(folder) / "reach", arguments.jobs)
        if runs.reach.failing:
            print("left out, because they fail without a mutant:", *runs.reach.failing, sep="\n  ")
        for outcome in outcomes:
            if outcome.verdict == "survived":
                begin = time.monotonic()
                mutant = mutants[outcome.id]
                path = tree.mutated_modules()[mutant.module]
                killer = runs.killer(path.relative_to(tree.ROOT), mutant.line, mutant.applied(path.read_bytes()))
                if killer is not None:
                    verdict = "timeout" if killer == "timeout" else "killed"
                    outcome = replace(outcome, verdict=verdict, killer=killer)
                outcome = replace(outcome, seconds=round(outcome.seconds + time.monotonic() - begin, 2))
                tell(outcome)
            final.append(outcome)
    return final


def _group_of(groups: dict[str, list[Path]], module: str) -> list[list[Path]]:
    return [groups[module]]


def _stage(module: str, number: int) -> list[Path]:
    files = tree.tests_of(module)
    return files.others if number else files.by_name


def run(
    mutants: list[Mutant],
    durations: dict[str, float],
    processes: int,
    tell: Callable[[Outcome], None],
    groups: Callable[[str], list[list[Path]]] = groups_of,
) -> list[Outcome]:
    """Every mutant against the groups of tests of its module, one after another until one notices it."""
    outcomes: list[Outcome] = []

    def jobs() -> Iterator[tuple[Job, Callable[[Report], Job | None]]]:
        for mutant in mutants:
            path = tree.mutated_modules()[mutant.module]
            source = path.read_bytes()
            change = Change(mutant.module, path, mutant.applied(source))
            waiting = [_job(change, group, durations) for group in groups(mutant.module)]
            if tree.is_wider():  # of a group without a test that passes and is quick enough nothing is left to run
                waiting = [job for job in waiting if job.first]
            if not waiting:
                outcomes.append(Outcome(mutant.id, "survived", "no test of it is run", *mutant.lines(source), 0.0))
                tell(outcomes[-1])
                continue
            yield waiting.pop(0), _judge(mutant, source, waiting, lambda o: (outcomes.append(o), tell(o)))

    running.run_all(jobs(), processes)
    return outcomes


def _job(change: Change, files: list[Path], durations: dict[str, float]) -> Job:
    names = {path.relative_to(tree.ROOT).as_posix() for path in files}
    own = {test: seconds for test, seconds in durations.items() if test.partition("::")[0] in names}
    return Job(change, files, math.ceil(LEAST_TIME + TIME_FACTOR * sum(own.values())), own)


def _judge(
    mutant: Mutant, source: bytes, waiting: list[Job], tell: Callable[[Outcome], object]
) -> Callable[[Report], Job | None]:
    begin = time.monotonic()

    def done(report: Report) -> Job | None:
        if report.passed and waiting:
            return waiting.pop(0)
        verdict = "survived" if report.passed else "timeout" if report.failure == "timeout" else "killed"
        seconds = round(time.monotonic() - begin, 2)
        tell(Outcome(mutant.id, verdict, report.failure, *mutant.lines(source), seconds))
        return None

    return done


def table(outcomes: list[Outcome]) -> str:
    """Markdown: a row a module, and all together."""
    verdicts = ("killed", "timeout", "survived", "equivalent")
    rows: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        for name in (outcome.id.partition(":")[0], "all"):
            row = rows.setdefault(name, dict.fromkeys(verdicts, 0))
            row[outcome.verdict] += 1
    rows["all"] = rows.pop("all", dict.fromkeys(verdicts, 0))
    lines = [
        "| module | mutants | killed | survived | equivalent | share |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in rows.items():
        killed, counted = row["killed"] + row["timeout"], sum(row.values()) - row["equivalent"]
        share = f"{100 * killed / counted:.1f} %" if counted else ""
        lines.append(f"| {name} | {sum(row.values())} | {killed} | {row['survived']} | {row['equivalent']} | {share} |")
    return "\n".join(lines)


def report(outcomes: list[Outcome], seconds: float, required: float) -> int:
    """Print what was found, and give the exit code."""
    survivors = [outcome for outcome in outcomes if outcome.verdict == "survived"]
    counted = [outcome for outcome in outcomes if outcome.verdict != "equivalent"]
    timeouts = sum(outcome.verdict == "timeout" for outcome in outcomes)
    print(table(outcomes))
    print(f"\n{timeouts} ended by the clock; {seconds:.0f} s, {seconds / max(1, len(counted)):.2f} s a mutant")
    for outcome in survivors:
        print(f"\nsurvived {outcome.id}\n  - {outcome.before}\n  + {outcome.after}")
    enough = len(counted) - len(survivors) >= required * len(counted)
    if not enough:
        print(f"\nless than {required:.0%} were killed")
    return 0 if enough else 1


def main() -> int:
    """Carry out the command line."""
    arguments = words()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # children end with it
    tree.select(arguments.package)
    with contextlib.ExitStack() as stack:
        running.prepare(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rft-mutants-"))))
        found = tree.all_mutants()
        proofs = {} if tree.is_wider() else tree.equivalents(found)
        total = sum(map(len, found.values()))
        if len(proofs) > MOST_EQUIVALENT * total:
            raise tree.Refused(f"{len(proofs)} of {total} mutants are called equivalent, above {MOST_EQUIVALENT:.0%}")
        mutants = chosen(arguments, found, proofs)
        if arguments.list:
            show(mutants)
            return 0
        file = stack.enter_context(arguments.json.open("w")) if arguments.json else None
        return carry_out(mutants, proofs, arguments, file)


def show(mutants: list[Mutant]) -> None:
    """Every id with its line as it is and as the fault makes it."""
    sources = {name: path.read_bytes() for name, path in tree.mutated_modules().items()}
    for mutant in mutants:
        before, after = mutant.lines(sources[mutant.module])
        print(f"{mutant.id}\n  - {before}\n  + {after}")


def carry_out(mutants: list[Mutant], proofs: dict[str, str], arguments: argparse.Namespace, file: TextIO | None) -> int:
    """Run the mutants that are not proved equivalent, and report on all."""
    begin = time.monotonic()
    sources = {name: path.read_bytes() for name, path in tree.mutated_modules().items()}
    equal = [
        Outcome(mutant.id, "equivalent", proofs[mutant.id], *mutant.lines(sources[mutant.module]), 0.0)
        for mutant in mutants
        if mutant.id in proofs
    ]
    unproved = [mutant for mutant in mutants if mutant.id not in proofs]
    tell = Teller(len(unproved), file).tell
    if tree.is_wider():
        outcomes = in_stages(unproved, arguments, tell)
    else:
        files = (path for module in {m.module for m in unproved} for group in groups_of(module) for path in group)
        outcomes = run(unproved, unmutated(files, arguments.lenient), arguments.jobs, tell)
    order = {mutant.id: number for number, mutant in enumerate(mutants)}
    outcomes = sorted(outcomes + equal, key=lambda outcome: order[outcome.id])
    return report(outcomes, time.monotonic() - begin, arguments.required)


@dataclass(slots=True)
class Teller:
    """Tells of every mutant: to a file, and on stderr where a person watches."""

    total: int
    file: TextIO | None
    done: int = 0

    def tell(self, outcome: Outcome) -> None:
        """One is finished."""
        self.done += 1
        if self.file is not None:
            print(json.dumps(asdict(outcome)), file=self.file, flush=True)
        if sys.stderr.isatty():
            print(f"{self.done} of {self.total}: {outcome.verdict} {outcome.id} {outcome.seconds} s", file=sys.stderr)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except tree.Refused as refused:
        print(refused, file=sys.stderr)
        sys.exit(2)
