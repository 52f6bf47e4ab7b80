"""Words and switches of the verbs that have no settings: positional words first to last, switches by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rft_algos.errors import OptionsError
from rft_cli.config.nearest import nearest


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was given: positional words, switches that are on, and words left for another parser."""

    words: list[str]
    switches: set[str]
    rest: list[str]

    def word(self, index: int, default: str = "") -> str:
        """The positional word at `index`, or `default`."""
        return self.words[index] if index < len(self.words) else default


def parse(
    verb: str, argv: Sequence[str], *, most: int, switches: Sequence[str] = (), keep_flags: bool = False
) -> Arguments:
    """Split `argv`; with `keep_flags` everything from the first other flag on is left in `rest`.

    Raises:
        OptionsError: an unknown flag, or more than `most` words.
    """
    words: list[str] = []
    found: set[str] = set()
    for index, word in enumerate(argv):
        name = word.removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in switches:
            found.add(name)
        elif word.startswith("-") and keep_flags:
            return _checked(verb, Arguments(words, found, list(argv[index:])), most)
        elif word.startswith("-"):
            near = [f"--{option}" for option in nearest(name, switches)]
            why = f"nearest: {', '.join(near)}" if near else f"rft-train {verb} has no such option"
            raise _refusal(
                "option.unknown", f"unknown option {word}", why, near[0] if near else f"rft-train {verb} --help"
            )
        else:
            words.append(word)
    return _checked(verb, Arguments(words, found, []), most)


def _checked(verb: str, arguments: Arguments, most: int) -> Arguments:
    if len(arguments.words) > most:
        extra = " ".join(arguments.words[most:])
        why = f"rft-train {verb} takes at most {most} words"
        raise _refusal("option.stray", f"unexpected argument {extra!r}", why, f"rft-train {verb} --help")
    return arguments


def _refusal(code: str, what: str, why: str, do: str) -> OptionsError:
    return OptionsError(code=code, what=what, where="command line", why=why, do=do)
