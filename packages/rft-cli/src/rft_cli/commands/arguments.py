"""Words and switches of the verbs that have no settings: positional words first to last, switches by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rft.config import option_problems
from rft_core.errors import OptionsError
from rft_core.nearest_names import nearest_names


@dataclass(frozen=True, slots=True)
class Arguments:
    """Parsed words: positional words, switches that are on, and words left for another parser."""

    words: list[str]
    switches: set[str]
    rest: list[str]
    values: dict[str, str] = field(default_factory=dict[str, str])
    """Options that take a value, by name."""

    def word(self, index: int, default: str = "") -> str:
        """The positional word at `index`, or `default`."""
        return self.words[index] if index < len(self.words) else default


def parse(
    verb: str,
    argv: Sequence[str],
    *,
    most: int,
    switches: Sequence[str] = (),
    options: Sequence[str] = (),
    keep_flags: bool = False,
) -> Arguments:
    """Split `argv`; with `keep_flags` everything from the first other flag on is left in `rest`.

    Raises:
        OptionsError: an unknown flag, an option of `options` without its value, or more than `most` words.
    """
    words: list[str] = []
    on: set[str] = set()
    values: dict[str, str] = {}
    waiting = ""
    for index, word in enumerate(argv):
        name, equals, inline = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if waiting:
            values[waiting], waiting = word, ""
        elif word.startswith("--") and name in options:
            values |= {name: inline} if equals else {}
            waiting = "" if equals else name
        elif word.startswith("--") and name in switches and not equals:
            on.add(name)
        elif word.startswith("-") and keep_flags:
            # only the other parser knows which of its flags take a value
            return _checked(verb, Arguments(words, on, list(argv[index:])), most)
        elif word.startswith("-"):
            near = [f"--{option}" for option in nearest_names(name, [*switches, *options])]
            why = f"nearest: {', '.join(near)}" if near else f"rft-train {verb} has no such option"
            do = near[0] if near else f"rft-train {verb} --help"
            raise OptionsError.of(option_problems.unknown_option(word, why, do))
        else:
            words.append(word)
    if waiting:
        what, why = f"--{waiting} needs a value", "it does not stand alone"
        raise OptionsError.of(option_problems.needs_value(what, why, f"rft-train {verb} --help"))
    return _checked(verb, Arguments(words, on, [], values), most)


def _checked(verb: str, arguments: Arguments, most: int) -> Arguments:
    if len(arguments.words) > most:
        extra = " ".join(arguments.words[most:])
        why = f"rft-train {verb} takes at most {most} words"
        do = f"rft-train {verb} --help"
        raise OptionsError.of(option_problems.stray_word(f"unexpected argument {extra!r}", why, do))
    return arguments


def unknown_command(what: str, why: str, do: str) -> OptionsError:
    """Return the error of a command, or of a word after it, that does not exist."""
    return OptionsError(code="command.unknown", what=what, where="command line", why=why, do=do)
