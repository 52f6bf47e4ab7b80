"""Findings of an examination, and the page that lists them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rft.installation.facts import MachineFact, Verdict

_MARKS: dict[Verdict, str] = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


@dataclass(frozen=True, slots=True)
class Section:
    """Findings on one subject."""

    title: str
    findings: tuple[MachineFact, ...]


def page(sections: Sequence[Section]) -> Iterator[str]:
    """Yield the lines of the page: a line for each fact, and below it why it matters and what mends it."""
    for section in sections:
        yield section.title
        for finding in section.findings:
            yield f"  {_MARKS[finding.verdict]:<8}{finding.subject}: {finding.value}"
            if finding.why:
                yield f"          {finding.why}"
            if finding.do:
                yield f"          do: {finding.do}"
        yield ""
    yield verdict_line(sections)


def verdict_line(sections: Sequence[Section]) -> str:
    """Return the last line: how many facts stand in the way."""
    problems = list(problems_of(sections))
    notes = sum(finding.verdict == "note" for section in sections for finding in section.findings)
    ending = f", {notes} to note" if notes else ""
    if not problems:
        return f"nothing stands in the way of a run{ending}"
    noun = "problem" if len(problems) == 1 else "problems"
    return f"{len(problems)} {noun}{ending}: {', '.join(finding.subject for finding in problems)}"


def problems_of(sections: Iterable[Section]) -> Iterator[MachineFact]:
    """Yield what stands in the way of a run."""
    return (finding for section in sections for finding in section.findings if finding.verdict == "problem")


def as_record(sections: Sequence[Section]) -> dict[str, Any]:
    """Return the findings as plain values, for JSON."""
    return {"sections": [asdict(section) for section in sections], "verdict": verdict_line(sections)}
