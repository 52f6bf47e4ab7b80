"""The report of semantic IDs as one HTML file: tables and drawings inside, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 560, 120
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; } td, th { padding: .25em .9em; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; } svg { display: block; margin: .4em 0; } .note { color: #666; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } td, th { border-color: #444; } }
"""


def page(name: str, report: Mapping[str, Any]) -> str:
    """Return the page of a report, as `rft_genrec.semantic_ids.give_ids.measured` gives it."""
    parts = [
        f"<h1>Semantic IDs of {escape(name)}</h1>",
        f"<p>{report['items']:,} items, {escape(str(report['method']))}, {report['tokens']:,} tokens, "
        f"{report['longest_id']} in the longest ID.</p>",
        "<h2>Collisions</h2>",
        _table(
            ("", "before", "after"),
            [("items less distinct IDs, of all items", *_percents(report, "collision_rate_before", "collision_rate"))],
        ),
        f"<p class=note>{report['colliding_items']:,} items share an ID with another.</p>",
        "<h2>Use of the codes</h2>",
        _table(
            ("level", "codes", "used", "perplexity", "items of the most frequent"),
            [
                (
                    f"{number}",
                    f"{use['codes']:,}",
                    f"{use['used']:,}",
                    f"{use['perplexity']:.1f}",
                    f"{use['largest']:,}",
                )
                for number, use in enumerate(report["levels"], start=1)
            ],
        ),
    ]
    for number, counts in enumerate(report["histograms"], start=1):
        parts += [f"<p class=note>Items of each code of level {number}, the most frequent first.</p>", bars(counts)]
    parts += ["<h2>What the codes keep</h2>", _kept(report), "<h2>Neighbours</h2>", _neighbours(report)]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Semantic IDs of {escape(name)}</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def bars(values: Sequence[float]) -> str:
    """Return a drawing of one bar a value, as inline SVG."""
    highest = max(values, default=0) or 1
    width = _WIDTH / max(1, len(values))
    drawn = "".join(
        f'<rect x="{place * width:.2f}" y="{_HEIGHT - value / highest * _HEIGHT:.2f}" '
        f'width="{max(width * 0.9, 0.4):.2f}" height="{value / highest * _HEIGHT:.2f}"/>'
        for place, value in enumerate(values)
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 16}" width="{_WIDTH}" fill="#4878a8" role="img" '
        f'aria-label="{len(values)} bars, the highest {highest:g}">{drawn}'
        f'<text x="2" y="11" font-size="11" fill="#888">{highest:g}</text></svg>'
    )


def _kept(report: Mapping[str, Any]) -> str:
    rows = [("all items, by the codes that are written", f"{report['unexplained_share']:.1%}")]
    if "held_out_items" in report:
        rows += [
            (f"{report['held_out_items']:,} items that a fit left out", f"{report['held_out_unexplained_share']:.1%}"),
            ("the items of that fit", f"{report['fitted_unexplained_share']:.1%}"),
        ]
    return _table(("squared distance to what the codes stand for, of the spread around the mean", ""), rows)


def _neighbours(report: Mapping[str, Any]) -> str:
    shares, chances = report["neighbours_share"], report["chance_share"]
    rows = [
        (f"the first {levels} codes" if levels != "1" else "the first code", f"{share:.1%}", f"{chances[levels]:.2%}")
        for levels, share in shares.items()
    ]
    return _table((f"share of the {report['neighbours']} nearest items that have", "", "by chance"), rows) + bars(
        [value for levels, share in shares.items() for value in (share, chances[levels])]
    )


def _percents(report: Mapping[str, Any], *names: str) -> list[str]:
    return [f"{report[name]:.2%}" for name in names]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"<tr>{''.join(f'<th>{escape(one)}</th>' for one in head)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{escape(one)}</td>' for one in row)}</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"
