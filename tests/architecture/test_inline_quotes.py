"""L4: codes and messages of errors that a page quotes within a sentence are those of the code."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from architecture.source_tree import ROOT, FunctionNode, Sources, planted, real_sources
from architecture.test_error_fields import PAGES
from architecture.test_errors import CODE, code_positions, codes_in

HISTORY = {ROOT / "CHANGELOG.md", ROOT / "docs" / "log.md", *ROOT.glob("packages/*/CHANGELOG.md")}
"""Pages that say what was so at their time."""
FOREIGN = {*ROOT.glob("docs/coming-from-*.md"), *ROOT.glob("docs/migrating-*.md")}
"""Pages with names of settings of other programs, which may look like codes."""
LIVING = [page for page in PAGES if page not in HISTORY]
FILES = ("csv", "html", "json", "jsonl", "md", "py", "sh", "toml", "txt", "yaml", "yml")
OBJECTS = ("model", "policy", "run", "strategy")
"""Areas of codes that are names of objects in examples too."""
LAYERS = {"model.visual", "model.vision_tower"}
"""Names of layers within an architecture."""
EXAMPLES = {"Das ist nicht so."}
"""Quotes of what a model answers."""
PROGRAMS = ("apt-get", "genrec", "git", "hf", "just", "pip", "pytest", "python", "rft-train", "torchrun", "uv", "uvx")
BLOCK = re.compile(r"^```.*?^```", re.M | re.S)
SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:[^`\n]|\n(?!\s*\n))+?)(?<!`)\1(?!`)")
"""Inline code, which may go on in the next line."""
IN_QUOTES = re.compile(r'"([^"\n]+(?:\n[^"\n]+)?)"|“([^”]+)”')
PLAIN = re.compile(r"[a-z]+(?:-[a-z]+)*")
FEWEST_WORDS = 3
"""Plain words in a row from which on a quote is taken for a sentence."""
FILL = "\0"


def spans(text: str) -> list[str]:
    """Inline code of a page, outside its blocks."""
    return [" ".join(match[2].split()) for match in SPAN.finditer(BLOCK.sub("", text))]


# --- codes ---


@functools.cache
def known_codes() -> frozenset[str]:
    """The codes of errors that are written whole."""
    sources = real_sources()
    positions = code_positions(sources)
    return frozenset(code for module in sources.values() for code in codes_in(module, positions))


class Form(NamedTuple):
    """A code that is put together."""

    pattern: re.Pattern[str]
    texts: frozenset[str]
    """What may be filled in: the texts that stand in the package of the call."""

    def makes(self, code: str) -> bool:
        """Whether this form can make a code."""
        found = self.pattern.fullmatch(code)
        return found is not None and self.texts.issuperset(found.groups())


@functools.cache
def forms() -> tuple[Form, ...]:
    """The codes that are put together."""
    texts: dict[str, set[str]] = defaultdict(set)
    patterns: set[tuple[str, str]] = set()
    for module in real_sources().values():
        for node in module.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts[module.package].add(node.value)
            elif isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.JoinedStr):
                parts = ("([a-z0-9_]+)" if part == FILL else re.escape(part) for part in parts_of(node.value))
                patterns.add((module.package, "".join(parts)))
    return tuple(Form(re.compile(pattern), frozenset(texts[package])) for package, pattern in sorted(patterns))


@functools.cache
def names_of_code() -> tuple[frozenset[str], frozenset[str]]:
    """Dotted ends of modules and of what stands at their top; and names of attributes and functions."""
    ends: set[str] = set()
    attributes: set[str] = set()
    for module in real_sources().values():
        tops = [node.name for node in module.tree.body if isinstance(node, FunctionNode | ast.ClassDef)]
        for name in (module.import_name, *(f"{module.import_name}.{top}" for top in tops)):
            parts = name.split(".")
            ends.update(".".join(parts[start:]) for start in range(len(parts)))
        for node in module.nodes:
            if isinstance(node, FunctionNode):
                attributes.add(node.name)
            elif isinstance(node, ast.Attribute):
                attributes.add(node.attr)
    return frozenset(ends), frozenset(attributes)


def unknown_codes(page: Path, text: str) -> list[str]:
    """Inline code of a page that reads as the code of an error, and is none."""
    codes = known_codes()
    areas = {code.partition(".")[0] for code in codes}
    ends, attributes = names_of_code()
    found: list[str] = []
    for span in spans(text):
        area, last = span.partition(".")[0], span.rpartition(".")[2]
        is_other = last in FILES or span in ends or page in FOREIGN or (area in OBJECTS and last in attributes)
        if not CODE.fullmatch(span) or area not in areas or is_other or span in LAYERS:
            continue
        if span not in codes and not any(form.makes(span) for form in forms()):
            found.append(span)
    return found


@pytest.mark.parametrize("page", LIVING, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_code_within_a_sentence_is_one_of_the_code(page: Path) -> None:
    assert unknown_codes(page, page.read_text()) == [], "no error has this code"


def test_a_code_that_no_error_has_is_found() -> None:
    page = ROOT / "docs" / "errors.md"
    other = "`run.json`, `run.metrics`, `a.b`, `engine.sglang.start`, `run.exists`\n```text\n`run.gone_by`\n```\n"
    assert unknown_codes(page, f"`run.existed` and `engine.sglang.strat`, {other}") == [
        "run.existed",
        "engine.sglang.strat",
    ]


# --- messages ---


def parts_of(text: ast.JoinedStr) -> Iterator[str]:
    """The literal parts of a text, and `FILL` for what is filled in."""
    for part in text.values:
        yield part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else FILL


class Texts:
    """The texts of the code that are no docstrings, as words; a word that is filled in, or a part of it, is `FILL`."""

    def __init__(self, sources: Sources) -> None:
        self.by_word: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        for module in sources.values():
            docstrings = {id(node.value) for node in module.nodes if isinstance(node, ast.Expr)}
            for node in module.nodes:
                if isinstance(node, ast.JoinedStr):
                    self._add("".join(parts_of(node)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                    self._add(node.value)

    def _add(self, text: str) -> None:
        words = words_of(text)
        if len(words) > 1:
            for word in words:
                self.by_word[word].add(words)

    def say(self, run: list[str]) -> bool:
        """Whether a run of words stands in one of the texts."""
        # most words of the run must stand there, so that at least one of the rarer half does
        rare = sorted(run, key=lambda word: len(self.by_word.get(word, ())))[: (len(run) + 1) // 2]
        return any(says(words, run) for word in rare for words in self.by_word.get(word, ()))


@functools.cache
def real_texts() -> Texts:
    """The texts of every module that the workspace ships."""
    return Texts(real_sources())


def words_of(text: str) -> tuple[str, ...]:
    """The words of a text, without the marks around them."""
    words = (word.strip(".,;:()\"'`") for word in text.split())
    return tuple(FILL if FILL in word else word for word in words if word)


def runs(quote: str) -> list[list[str]]:
    """Plain words of a quote that stand in a row, at least two of them: what is filled in is mostly none."""
    found: list[list[str]] = [[]]
    for word in quote.split():
        bare = word.strip(".,;:()")
        if PLAIN.fullmatch(bare):
            found[-1].append(bare)
        if not PLAIN.fullmatch(bare) or bare != word:
            found.append([])
    return [run for run in found if len(run) > 1]


def is_sentence(quote: str) -> bool:
    """Whether a quote is one of words, and neither a command nor an expression."""
    longest = max((len(run) for run in runs(quote)), default=0)
    return longest >= FEWEST_WORDS and not quote.startswith(PROGRAMS) and not re.search(r"[={}\[\]|$]|--\w", quote)


def says(words: tuple[str, ...], run: list[str]) -> bool:
    """Whether a run of words stands in a text; what is filled in there is one word of the run."""
    for start in range(len(words) - len(run) + 1):
        pairs = list(zip(words[start:], run, strict=False))
        if all(word in (own, FILL) for word, own in pairs) and sum(word == own for word, own in pairs) > len(run) / 2:
            return True
    return False


def unsaid(quote: str, known: Texts) -> list[str]:
    """The runs of a quote that no text of the code has, nor two of which one is filled into the other."""

    def is_composed(run: list[str]) -> bool:
        halves = ((run[:place], run[place:]) for place in range(2, len(run) - 1))
        return any(
            (known.say([*first, FILL]) and known.say(second)) or (known.say(first) and known.say([FILL, *second]))
            for first, second in halves
        )

    return [" ".join(run) for run in runs(quote) if not known.say(run) and not is_composed(run)]


@functools.cache
def words_of_the_guides() -> frozenset[str]:
    """What the guides of LightRFT call a problem, as our page quotes it."""
    found: set[str] = set()
    for file in (ROOT / "docs" / "troubleshooting").glob("rows_*.json"):
        for row in json.loads(file.read_text()):
            found.update(row["texts"])
    return frozenset(found)


def quotes(text: str) -> list[str]:
    """Sentences that a page quotes: as inline code, or between quotation marks."""
    prose = BLOCK.sub("", text)
    marked = [match[1] or match[2] for match in IN_QUOTES.finditer(SPAN.sub("` `", prose))]
    return [quote for quote in [*spans(text), *marked] if is_sentence(quote)]


@pytest.mark.parametrize("page", LIVING, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_message_within_a_sentence_is_one_of_the_code(page: Path) -> None:
    asked = [quote for quote in quotes(page.read_text()) if quote not in EXAMPLES | words_of_the_guides()]
    wrong = {quote: runs for quote in asked if (runs := unsaid(quote, real_texts()))}
    assert wrong == {}, "no text of the code has these words"


def test_a_message_that_no_code_says_is_found() -> None:
    text = 'It says `rank 1 is gone: it never reached collective #5`, or "rank 2 has left the\nroom 4 for 3 s", `a b`.'
    assert quotes(f"{text}\n```text\nnot a word of this\n```\n") == [
        "rank 1 is gone: it never reached collective #5",
        "rank 2 has left the\nroom 4 for 3 s",
    ]
    assert not any(map(is_sentence, ("rft-train eval of the run", "--seed of a run", "{a of the run}", "two words")))
    known = Texts(
        planted(
            a__one='''
"""rank 1 is gone: it never reached collective #5"""
x = f"rank {rank} is gone: it did not reach collective #{number}"
y = f"{who} has left {_place()} for {seconds} s"
z = f"the room {number}"
'''
        )
    )
    first, second = quotes(text)
    assert unsaid(first, known) == ["it never reached collective"]
    assert unsaid(first.replace("never reached", "did not reach"), known) == []
    assert unsaid(second, known) == []
    assert unsaid(second.replace("left", "gone"), known) == ["has gone the room"]
