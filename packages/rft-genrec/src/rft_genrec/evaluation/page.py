"""The table of an evaluation, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rft_algos.statistics import Interval
from rft_genrec.evaluation.measures import LIST_PLACES
from rft_genrec.evaluation.run import MODEL, RankingEvaluation
from rft_genrec.settings.eval import GenrecEvalSettings


def page(found: RankingEvaluation, settings: GenrecEvalSettings) -> Iterator[str]:
    """Yield a table by item, one by ID, what the lists hold, and how a mixture compares with its parts."""
    ks = [k for k in settings.rows.places if k <= settings.beams.num_beams]
    yield (
        f"{found.facts['catalogue']}, {len(found.samples)} samples of {settings.rows.split}, "
        f"{settings.beams.num_beams} places; baselines and popularity from {found.fit_on}"
    )
    for title, level in (("by item (a hit on an ID that n items share counts 1/n)", ""), ("by semantic ID", "id ")):
        names = [f"{name}@{k}" for name in ("HR", "NDCG") for k in ks]
        rows = [[name, *(f"{one.intervals[level + m].estimate:.4f}" for m in names)] for name, one in _methods(found)]
        yield from ("", title)
        yield from _table(["", *names], rows)
    yield from ("", f"95 % intervals of {settings.rows.bootstrap_draws} resamples, and the first {LIST_PLACES} places")
    yield from _table(*_with_intervals(found, max((k for k in ks if k <= LIST_PLACES), default=ks[0])))
    if found.verdict is not None:
        yield ""
        yield from _verdict_lines(found)
    if MODEL in found.seconds:
        took = found.seconds[MODEL]
        yield from ("", f"the model ranked {len(found.samples)} samples in {took:.1f} s")
    if settings.output.output:
        yield f"written: {settings.output.output}/results.json, predictions.jsonl"


def _methods(found: RankingEvaluation) -> list[tuple[str, object]]:
    return list(found.methods.items())


def _with_intervals(found: RankingEvaluation, k: int) -> tuple[list[str], list[list[str]]]:
    lists = list(next(iter(found.methods.values())).lists)
    rows = [
        [
            name,
            *(_interval(one.intervals[f"{measure}@{k}"]) for measure in ("HR", "NDCG")),
            *(f"{one.lists[column]:.3f}" for column in lists),
        ]
        for name, one in found.methods.items()
    ]
    return ["", f"HR@{k}", f"NDCG@{k}", *lists], rows


def _verdict_lines(found: RankingEvaluation) -> Iterator[str]:
    assert found.verdict is not None
    word = "beats both parts by more than chance" if found.verdict.counts else "does not beat both parts beyond chance"
    yield f"mixture with weight {found.verdict.weight:g} {word}:"
    for part, gains in found.verdict.over.items():
        yield f"  over {part}: " + ", ".join(f"{name} {_signed(one)}" for name, one in gains.items())


def _interval(one: Interval) -> str:
    return f"{one.estimate:.4f} [{one.low:.4f}, {one.high:.4f}]"


def _signed(one: Interval) -> str:
    return f"{one.estimate:+.4f} [{one.low:+.4f}, {one.high:+.4f}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        first, *others = (
            cell.ljust(width) if not n else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *others]).rstrip()
