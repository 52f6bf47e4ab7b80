"""Training rows of the tasks that teach a model to recommend: no prompt holds its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rft_genrec.catalogue.records import Catalogue, Sample, SemanticIds
from rft_genrec.prompts.builder import PromptBuilder, PromptQuestion

_TITLE = PromptQuestion("Title:", "Write the title of the item.")
_ID = PromptQuestion("Item:", "Write the item that has this title.")
_NEXT_TITLE = PromptQuestion(
    "Next title:", "These are the items that a person took, oldest first. Write the title of the next item."
)
_TITLE_AFTER_TITLES = PromptQuestion(
    "Next title:", "These are the titles of items that a person took, oldest first. Write the title of the next item."
)
_ID_AFTER_TITLES = PromptQuestion(
    "Next item:", "These are the titles of items that a person took, oldest first. Write the next item."
)


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A demonstration: what the model reads, and what it learns to write."""

    name: str
    """Unique in its task: the id of a sample, or the number of an item."""
    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class TaskInput:
    """Catalogue, builder and samples that rows are made of."""

    catalogue: Catalogue
    builder: PromptBuilder
    samples: Sequence[Sample]

    @property
    def ids(self) -> SemanticIds:
        """The IDs of the items."""
        return self.builder.ids

    def title(self, item: int) -> str:
        """Return the title of an item."""
        return self.catalogue.items[item].title

    def titles(self, history: Sequence[int]) -> str:
        """Return the quoted titles of the newest items of a history."""
        return ", ".join(f'"{self.title(item)}"' for item in self.builder.newest(history))


def _history(given: TaskInput) -> Iterator[TaskRow]:
    for sample in given.samples:
        if sample.history:
            yield TaskRow(sample.sample_id, given.builder.prompt(sample.history), given.builder.response(sample.target))


def _title(given: TaskInput) -> Iterator[TaskRow]:
    # an ID that several items share has one title: that of its first item
    for items in given.ids.items_by_id.values():
        prompt = given.builder.ask(_TITLE, given.ids.text(items[0]))
        yield TaskRow(f"item:{items[0]}", prompt, given.title(items[0]))


def _id(given: TaskInput) -> Iterator[TaskRow]:
    known: set[str] = set()
    for item in range(len(given.catalogue)):
        title = given.title(item)
        if title not in known:  # a second item of the same title would be another answer to the same prompt
            known.add(title)
            yield TaskRow(f"item:{item}", given.builder.ask(_ID, title), given.builder.response(item))


def _fusion(given: TaskInput) -> Iterator[TaskRow]:
    for sample in given.samples:
        if sample.history:
            prompt = given.builder.ask(_NEXT_TITLE, given.builder.history_text(sample.history))
            yield TaskRow(sample.sample_id, prompt, given.title(sample.target))


def _titles(given: TaskInput) -> Iterator[TaskRow]:
    for sample in given.samples:
        if sample.history:
            prompt = given.builder.ask(_TITLE_AFTER_TITLES, given.titles(sample.history))
            yield TaskRow(sample.sample_id, prompt, given.title(sample.target))


def _titles_to_id(given: TaskInput) -> Iterator[TaskRow]:
    for sample in given.samples:
        if sample.history:
            prompt = given.builder.ask(_ID_AFTER_TITLES, given.titles(sample.history))
            yield TaskRow(sample.sample_id, prompt, given.builder.response(sample.target))


TASKS: Mapping[str, Callable[[TaskInput], Iterator[TaskRow]]] = {
    "history": _history,
    "title": _title,
    "id": _id,
    "fusion": _fusion,
    "titles": _titles,
    "titles_to_id": _titles_to_id,
}
"""Makers of rows by the names that `--tasks` takes: IDs to the next ID, an ID to its title, a title to its ID, IDs to
the next title, titles to the next title, titles to the next ID."""


def sequence_rows(builder: PromptBuilder, sequences: Mapping[str, Sequence[int]]) -> Iterator[TaskRow]:
    """Yield rows that learn every item of a person but the first, each once, in windows of `max_history` + 1 items.

    The first window has one item as its prompt; a later one begins with half of a history that was learned before.
    """
    for user, items in sequences.items():
        size = builder.max_history + 1 if builder.max_history else max(len(items), 2)
        kept = max(1, builder.max_history // 2)
        start, behind = 1, size
        while start < len(items):
            prompt = items[max(0, start - kept) : start] if start > 1 else items[:1]
            learned = items[start:behind]
            text = "".join(builder.response(item) for item in learned)
            yield TaskRow(f"{user}:{start}", builder.history_text(prompt), text)
            start, behind = behind, behind + size - kept


def shared_beginnings(ids: SemanticIds) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return an ID that another one begins with, and that other one; None where there is none."""
    known = set(ids.items_by_id)
    for tokens in known:
        for end in range(1, len(tokens)):
            if tokens[:end] in known:
                return tokens[:end], tokens
    return None
