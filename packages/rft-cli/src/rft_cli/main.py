"""Entry point of `rft-train`: find the verb, run it, and show every error in one way.

Only what a verb needs is imported, and help needs no torch.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rft.config.command_record import Command
from rft.config.commands import GROUP, load, typed
from rft.process import garbage_collection
from rft.process.detached import INTERRUPTED, open_standard_streams
from rft_cli.diagnostics import debug_mode
from rft_cli.records.discovery import command_of_words, commands, run_command
from rft_core.errors import OptionsError, Problem, RftError, StorageError
from rft_core.terminal_text import visible
from rft_trainer.installed_tasks.discovery import listed_tasks

if TYPE_CHECKING:
    from rft.resolved import Resolved

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], None]

UNEXPECTED = 1
_HELP = ("-h", "--help")
_HELP_ALL = ("--help-all", "--help_all")
_PRINT_CONFIG = ("--print_config", "--print-config")


def main(argv: list[str] | None = None) -> int:
    """Run `rft-train ARGV...` and return its exit code (`rft_core.errors.ExitCode`, 1, or 130)."""
    open_standard_streams()
    if argv is None:
        # whatever the umask says, nobody but owner and group can write what is made: a resume runs what it names
        os.umask(os.umask(0) | stat.S_IWOTH)
        garbage_collection.pause()
    words = list(sys.argv[1:] if argv is None else argv)
    from rft_cli.diagnostics import problems

    as_json = problems.wants_json(words)
    # for errors that pass all blocks below; their traceback goes into a file
    sys.excepthook = _last_resort(words, as_json=as_json)
    try:
        with _lasting(words, for_good=argv is None):
            code = _run(words)
        # here, so that a closed pipe raises inside this block and not at the exit
        sys.stdout.flush()
        return code
    except RftError as error:
        problems.show(_with_bundle(error, words), as_json=as_json)
        return int(error.exit_code)
    except KeyboardInterrupt:
        from rft_cli.diagnostics import bundle

        print(f"interrupted{bundle.what_an_interrupt_leaves()}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the interpreter flushes stdout at its exit: into the closed pipe it would raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        refused = _output_refused(error)
        problems.show(refused, as_json=as_json)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(refused.exit_code)


def _output_refused(error: OSError) -> StorageError:
    """The error of a command whose output does not fit; one that trains goes on instead."""
    return StorageError(
        code="storage.output",
        what=f"cannot write what this command prints: ENOSPC ({error.strerror})",
        where="standard output",
        why="the file system of that file is full",
        state="what was to be shown is not complete; nothing else was changed",
        do="df -h, then the same command with its output somewhere else",
    )


def _lasting(words: list[str], *, for_good: bool) -> AbstractContextManager[None]:
    """A command that trains goes on without its terminal; any other ends when nobody reads what it prints."""
    command = commands().get(command_of_words(words)[0]) if words else None
    if command is None or not command.makes_runs:
        return nullcontext()
    from rft.process.detached import outliving_terminal

    return outliving_terminal(for_good=for_good)


def overview() -> str:
    """The page of `rft-train --help`."""
    lines = ["usage: rft-train COMMAND [OPTIONS]", "", "Reinforcement fine-tuning of language models.", "", "commands:"]
    lines += [f"  {typed(command.name):<12} {command.summary}" for command in commands().values()]
    tasks = listed_tasks()
    lines += (
        ["", "tasks of installed packages (--prompt_data NAME:..., --reward NAME, --constraint NAME):"] if tasks else []
    )
    lines += [f"  {name:<12} {about}" for name, about in tasks]
    lines += ["", "rft-train COMMAND --help lists the options of a command.", "Start with: rft-train quickstart"]
    return "\n".join(lines)


def _run(words: list[str]) -> int:
    if not words or words[0] in (*_HELP, "help"):
        print(overview())
        return 0
    if words[0] == "--version":
        print(f"rft-train {version('rft-cli')}")
        return 0
    name, argv = command_of_words(words)
    command = commands().get(name)
    if command is None:
        raise _unknown(name)
    argv = command.with_flag(argv)
    for flag, other in command.switches:
        if flag in argv:
            argv.remove(flag)
            name, command = other, commands()[other]
    if command.fault:
        raise _unusable(command)
    # before torch is imported, because some of these variables are read only then
    if debug_mode.asked(argv):
        debug_mode.switch_on(os.environ)
    if command.settings and any(word in (*_HELP, *_HELP_ALL) for word in argv):
        from rft_cli.config.help import print_help

        print_help(command.name, argv)
        return 0
    if command.settings and any(word in _PRINT_CONFIG for word in argv):
        return _print_config(command, argv)
    if command.settings:
        # a process that starts ranks imports no torch itself
        code = _started_as_ranks(command, argv, _refuse_early(command, argv))
        if code is not None:
            return code
    from rft_cli.diagnostics import fault_injection, notices

    debug_mode.show_crashes()
    fault_injection.install_from(os.environ)
    notices.show_notices()
    _collect_garbage(command)
    return run_command(command, argv)


def _collect_garbage(command: Command) -> None:
    """Have the collector go on, unless the command is short or trains: then it does at the first step."""
    if not (command.makes_runs or command.name == "check"):
        garbage_collection.go_on()


def _refuse_early(command: Command, argv: list[str]) -> Resolved[Any]:
    """Resolve the settings before the command's own module is imported, which takes seconds for torch."""
    from rft_cli.config.resolve import resolve

    # the run stands in the place of the model; its own settings are read later
    return resolve(command.name, ["--pretrain", *argv] if _starts_with_run(command, argv) else argv)


def _started_as_ranks(command: Command, argv: list[str], resolved: Resolved[Any]) -> int | None:
    """Return the exit code of the processes that `--nproc` and `--restarts` ask for; None in one of them."""
    nodes = load(command.nodes)(argv) if command.nodes else None
    if not resolved.values.get("nproc") and not resolved.values.get("restarts") and nodes is None:
        return None
    from rft.process.detached import run_has_begun
    from rft.process.launching import spawned

    code = spawned(resolved, [sys.executable, "-m", "rft_cli.main", command.name, *argv], nodes=nodes)
    if code is not None:
        run_has_begun()  # and has ended: a further signal must not change the exit code
    return code


def _starts_with_run(command: Command, argv: list[str]) -> bool:
    """Return True when the first word is a run in place of the model, as in `rft-train eval RUN`."""
    return command.takes_run and bool(argv) and not argv[0].startswith("-")


def _print_config(command: Command, argv: list[str]) -> int:
    from rft_cli.config.resolve import resolve

    words = [word for word in argv if word not in _PRINT_CONFIG]
    if _starts_with_run(command, words):
        from rft_cli.config.stored_run import with_run

        words = with_run(words, command.name)
    resolved = resolve(command.name, words)
    print(visible(resolved.config_yaml), end="")
    for note in resolved.notes:
        print(visible(f"# note: {note}"))
    return 0


def _unknown(name: str) -> OptionsError:
    from rft_cli.commands import table
    from rft_cli.commands.arguments import unknown_command
    from rft_core.nearest_names import nearest_names

    refusal = table.REFUSED_COMMANDS.get(name)
    # a second word alone, as `run` of `genrec run`, is nearer to a whole command than to its own
    near = nearest_names(name, [command for command in commands() if f"-{name}" not in command])
    group = [command for command in commands() if command.startswith(f"{name}-")]
    if group:
        words = [command.removeprefix(f"{name}-") for command in group]
        what, why, do = (
            f"rft-train {name} needs a second word",
            f"its commands: {', '.join(words)}",
            f"rft-train {name} {words[0]} --help",
        )
    elif refusal:
        what, why, do = (
            f"rft-train {name} cannot be used: {refusal.reason}",
            "a command works or is refused",
            refusal.do,
        )
    else:
        what = f"unknown command {name}" if not name.startswith("-") else f"{name} stands before the command"
        why = f"nearest: {', '.join(map(typed, near))}" if near else f"commands: {', '.join(map(typed, commands()))}"
        do = f"rft-train {typed(near[0])}" if near else "rft-train --help"
    return unknown_command(what, why, do)


def _unusable(command: Command) -> OptionsError:
    return OptionsError(
        code="command.unusable",
        what=f"rft-train {typed(command.name)} cannot be used",
        where=f"entry points of the group {GROUP}",
        why=command.fault,
        do="mend or uninstall that package; all other commands work",
    )


def _with_bundle(error: RftError, words: list[str]) -> RftError:
    """Write a diagnostics bundle into the run's directory, and return the error with its path."""
    from rft_cli.diagnostics import bundle

    if not bundle.has_run_directory() or error.problem.bundle:
        return error
    path = bundle.write(error, words, error.problem)
    return error.with_bundle(str(path)) if path else error


def _last_resort(words: list[str], *, as_json: bool) -> ExceptHook:
    """Return the handler of unexpected errors: traceback to a file, a few lines to the person; exit code 1."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from rft_cli.diagnostics import problems

        problems.show_problem(_unexpected(error, words), UNEXPECTED, as_json=as_json)

    return hook


def _unexpected(error: BaseException, words: list[str]) -> Problem:
    import traceback

    from rft_cli.diagnostics import bundle
    from rft_core.secrets import scrub_text

    path = bundle.write(error, words)
    frames = traceback.extract_tb(error.__traceback__)
    # the whole message is in the file
    message = str(error).partition("\n")[0]
    return Problem(
        code="program.unexpected",
        what=scrub_text(f"unexpected {type(error).__name__}: {message}"),
        where=f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else "unknown",
        why="this is a defect of the program, or of code that it was given",
        state="the run's last checkpoint is untouched" if bundle.has_run_directory() else "nothing was saved",
        do=f"read the traceback in {path}, which is also all that a report needs"
        if path
        else "free disk space, so that the traceback can be written",
        bundle=str(path or ""),
    )


if __name__ == "__main__":
    sys.exit(main())
