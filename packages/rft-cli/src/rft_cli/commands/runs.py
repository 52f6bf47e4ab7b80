"""`rft-train runs [DIR]`, `runs show|stacks|profile RUN`: the runs, their outcomes, what they are doing just now."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console

from rft.config import option_problems
from rft.process.profile_request import DEFAULT_STEPS, request_profile
from rft.process.stack_dumps import main_thread_lines, request_stacks
from rft_cli.commands import arguments
from rft_cli.diagnostics.console import SafeConsole
from rft_cli.pages.runs import page_of_run, table_of_runs
from rft_core.errors import DataError, OptionsError
from rft_core.nearest_names import nearest_names
from rft_core.terminal_text import visible
from rft_trainer.runs.reader import is_run, read_run, read_runs

USAGE = """usage: rft-train runs [DIR]        a table of the runs in DIR (default: runs), the newest first
       rft-train runs show RUN     one run: outcome, changed settings, curves, evaluations, files
       rft-train runs stacks RUN   where each rank of a run that goes on is: stacks of all its threads
       rft-train runs profile RUN [--steps 3]
                                   what takes the time of a run that goes on: its next steps are recorded

RUN is a directory, or the name of one in runs/. A run may be going on: its files are read, and `stacks` lets each rank
on this machine write its stacks into logs/stacks_rank_N.txt (signal SIGUSR2), which neither ends nor changes it.
`profile` lets rank 0 record its next steps into profile/ when the one that it is in has ended."""

HOME = Path("runs")
_LINES = 12
"""Of the main thread of a rank on the page; its file has all lines of all threads."""


def run(argv: list[str]) -> int:
    """Show the table or one run."""
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    if argv and argv[0] == "show":
        parsed = arguments.parse("runs show", argv[1:], most=1)
        wide_console().print(page_of_run(read_run(find_run(parsed.word(0)))))
        return 0
    if argv and argv[0] == "stacks":
        parsed = arguments.parse("runs stacks", argv[1:], most=1)
        _print_stacks(find_run(parsed.word(0)))
        return 0
    if argv and argv[0] == "profile":
        parsed = arguments.parse("runs profile", argv[1:], most=1, options=("steps",))
        _ask_for_profile(find_run(parsed.word(0)), parsed.values.get("steps", str(DEFAULT_STEPS)))
        return 0
    parsed = arguments.parse("runs", argv, most=1)
    directory = Path(parsed.word(0, str(HOME)))
    if is_run(directory):
        wide_console().print(page_of_run(read_run(directory)))
        return 0
    if parsed.words and not directory.is_dir():
        raise _no_run(parsed.word(0))
    runs = read_runs(directory)
    if runs:
        wide_console().print(table_of_runs(runs))
    else:
        print(visible(f"no runs in {directory}; start one with: rft-train quickstart"))
    return 0


def wide_console() -> Console:
    """Return a console that does not cut piped output at 80 columns, as programs and files read it."""
    console = SafeConsole(highlight=False)
    return console if console.is_terminal else SafeConsole(highlight=False, width=200)


def _print_stacks(run: Path) -> None:
    """Print where the main thread of each rank is, and the file with the stacks of all threads."""
    found = list(request_stacks(run))
    if not any(rank.text for rank in found):
        why = "; ".join(f"rank {rank.rank}: {rank.missing}" for rank in found)
        raise DataError(
            code="run.no_stacks",
            what=f"no rank of {run} wrote its stacks",
            where=str(run / "logs"),
            why=why or "it has no logs/stacks_rank_N.txt: it has ended, or its first phase has not begun",
            state="nothing was changed",
            do=f"rft-train runs show {shlex.quote(str(run))}",
        )
    for rank in found:
        said = rank.missing or f"{rank.num_threads} threads in {rank.file}; the main one, innermost first:"
        print(visible(f"rank {rank.rank}: {said}"))
        for line in main_thread_lines(rank, _LINES):
            print(visible(f"    {line}"))


def _ask_for_profile(run: Path, steps: str) -> None:
    """Ask for a profile, and print where its page will be."""
    if not steps.isascii() or not steps.isdigit():
        what, why = f"--steps {steps} is no number of steps", "it takes a whole number"
        raise OptionsError.of(option_problems.needs_value(what, why, "rft-train runs profile --help"))
    process = request_profile(run, int(steps))
    print(visible(f"rank 0 (process {process.pid} on {process.host}) records {steps} steps when this one has ended;"))
    print(visible(f"its log names the page, in {run / 'profile'}"))


def find_run(reference: str) -> Path:
    """Return the directory of a run that is named by its path, or by its name in `HOME`; raise `DataError` else."""
    for path in (Path(reference), HOME / reference):
        if reference and is_run(path):
            return path
    raise _no_run(reference)


def _no_run(reference: str) -> DataError:
    known = [run.name for run in read_runs(HOME)]
    near = nearest_names(reference, known) or known[:3]
    what = f"no run is called {reference}" if reference else "the name of a run is missing"
    if reference and Path(reference).exists():
        what = (
            f"{reference} is no run: it is a {'directory without config.yaml' if Path(reference).is_dir() else 'file'}"
        )
    return DataError(
        code="run.unknown_name",
        what=what,
        where="command line",
        why=f"nearest: {', '.join(near)}" if near else "there are no runs in runs/",
        do=f"rft-train runs show {near[0]}" if near else "rft-train quickstart",
    )
