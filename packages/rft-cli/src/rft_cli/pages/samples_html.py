"""Sampled answers of several steps, prompt by prompt: a page of its own in the run's directory, for a browser.

The page holds the images of its prompts, each once, so that it can be sent to somebody; larger ones are links to their
files.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rft_cli.pages.pretraining.end_page import curve_section, is_continued, text_section
from rft_core.durable_files import replace_text
from rft_trainer.data.image_headers import media_type
from rft_trainer.runs.image_entries import entries_of, image_path
from rft_trainer.runs.reader import SAMPLES_PAGE, as_object, read_run
from rft_trainer.runs.reader import rows as rows_of

_LARGEST_HELD = 1 << 20
"""Bytes of an image that the page holds; a larger one is a link."""
_MOST_STEPS = 4
_MOST_ROWS = 64
"""Of all steps together."""
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1c2430}
table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.6rem .8rem;
border-bottom:1px solid #d8dee8}td.text{white-space:pre-wrap;overflow-wrap:anywhere}
img{max-width:16rem;max-height:16rem;min-width:6rem;image-rendering:pixelated;border:1px solid #d8dee8}
figure{margin:0 0 .5rem}figcaption,.dim{color:#68748a;font-size:13px;overflow-wrap:anywhere}
@media (prefers-color-scheme:dark){body{background:#12161d;color:#e4e8ef}td,th,img{border-color:#303846}}"""


def write(run: Path) -> Path | None:
    """The page of steps whose rollouts were kept, the last one first; None where none were.

    The steps are spread evenly over the run, the first and the last among them.

    Raises:
        StorageError: the disk refuses.
    """
    read = read_run(run)
    files = read.rollout_files
    count = min(len(files), _MOST_STEPS)
    # the last alone where there is one
    chosen = [files[-1 - round(i * (len(files) - 1) / max(count - 1, 1))] for i in range(count)]
    steps = [(file, rows_of(file)[: _MOST_ROWS // count]) for file in chosen]
    steps = [(file, rows) for file, rows in steps if rows]
    if not steps:
        return None
    file = run / SAMPLES_PAGE
    # answers have rewards; texts that a model continued are shown with its loss
    before = curve_section(read) if is_continued(steps[0][1]) else ""
    replace_text(file, _page(run, steps, before))
    return file


def image_words(row: Mapping[str, Any], directory: Path) -> str:
    """The images of a row on lines: file, size and tokens of each; "" without any."""
    return "\n".join(f"{_named(entry, directory)} {_measures(entry)}" for entry in entries_of(row))


def _named(entry: Mapping[str, Any], directory: Path) -> str:
    file = image_path(entry, directory)
    if file is None:
        return str(entry.get("where", ""))
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def _measures(entry: Mapping[str, Any]) -> str:
    sides = f"{entry['width']} x {entry['height']}" if entry.get("width") else "unknown size"
    return f"({sides}, {entry['tokens']} tokens)" if entry.get("tokens") else f"({sides})"


def _page(run: Path, steps: Sequence[tuple[Path, Sequence[Mapping[str, Any]]]], before: str) -> str:
    name = html.escape(run.resolve().name)
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{name}: samples</title><style>{_STYLE}</style>"
    has_images = any(entries_of(row) for _, rows in steps for row in rows)
    shown: dict[str, str] = {}
    body = "\n".join(_step(file, rows, shown if has_images else None) for file, rows in steps)
    return f"{head}\n<h1>{name}</h1>\n{before}{body}\n</html>\n"


def _step(file: Path, rows: Sequence[Mapping[str, Any]], shown: dict[str, str] | None) -> str:
    """Return the table of a step; `shown` are the images that the page holds so far, None where no prompt has any."""
    if is_continued(rows):
        return text_section(rows, _number(file))
    # rows of an older version have none
    more = ["advantage"] if any("advantage" in row for row in rows) else []
    titles = [*([] if shown is None else ["images"]), "prompt", "wanted", "answer", "reward", *more]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(row.get("prompt_id", row.get("prompt"))), []).append(row)
    body = "\n".join(_group(group, file.parent, shown) for group in groups.values())
    prompts = f"{len(groups)} prompt{'s' if len(groups) > 1 else ''}"
    return (
        f"<h2>step {_number(file)}</h2><p class=dim>{len(rows)} sampled answers to {prompts}; "
        f"all that was kept is in rollouts/{file.name}\n"
        f"<table><tr>{''.join(f'<th>{title}' for title in titles)}\n{body}\n</table>"
    )


def _group(rows: Sequence[Mapping[str, Any]], directory: Path, shown: dict[str, str] | None) -> str:
    """Return the rows of a prompt: its images and text once, then each answer with its reward and its advantage."""
    first, span = rows[0], f" rowspan={len(rows)}" if len(rows) > 1 else ""
    images = ""
    if shown is not None:
        figures = "".join(_figure(entry, directory, shown) for entry in entries_of(first))
        images = f"<td{span}>{figures or '<span class=dim>none</span>'}"
    asked = "".join(f"<td class=text{span}>{_text(first.get(name))}" for name in ("prompt", "label"))
    answers = [f"<td class=text>{_text(row.get('response'))}<td>{_reward(row)}{_advantage(row)}" for row in rows]
    return f"<tr>{images}{asked}" + "\n<tr>".join(answers)


def _reward(row: Mapping[str, Any]) -> str:
    """Return the reward with its parts, or why there is none."""
    reward, parts = row.get("reward"), as_object(row.get("breakdown"))
    if not isinstance(reward, int | float):
        return html.escape(str(row.get("failure") or row.get("status") or ""))
    shares = ", ".join(f"{name} {part:.3g}" for name, part in parts.items() if isinstance(part, int | float))
    return f"{reward:.3g}" + (f"<br><span class=dim>{html.escape(shares)}</span>" if len(parts) > 1 else "")


def _advantage(row: Mapping[str, Any]) -> str:
    """Return the cell of the advantage, its mean over the tokens; of a row that has none, no cell."""
    if "advantage" not in row:
        return ""
    value = row["advantage"]
    return f"<td>{value:+.3g}" if isinstance(value, int | float) else "<td class=dim>not trained on"


def _number(file: Path) -> int:
    return int(file.stem.removeprefix("step_"))


def _text(value: object) -> str:
    return "" if value is None else html.escape(str(value))


def _figure(entry: Mapping[str, Any], directory: Path, shown: dict[str, str]) -> str:
    """Return the image, a link to it, or its caption alone; a missing file is no failure of the page.

    An image that the page has already (in `shown`: its data, and the place where it is) is a link to there.
    """
    caption = html.escape(f"{entry.get('where', '')} {_measures(entry)}")
    file = image_path(entry, directory)
    if file is None or not file.is_file():
        return f"<figure><figcaption>{caption}, not kept</figcaption></figure>"
    if file.stat().st_size > _LARGEST_HELD:
        link = html.escape(file.resolve().as_uri())
        return f'<figure><a href="{link}">{html.escape(file.name)}</a><figcaption>{caption}</figcaption></figure>'
    data = file.read_bytes()
    source = f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"
    if source in shown:
        return f'<figure><a href="#{shown[source]}">shown above</a><figcaption>{caption}</figcaption></figure>'
    shown[source] = f"image-{len(shown) + 1}"
    return f'<figure id={shown[source]}><img alt="" src="{source}"><figcaption>{caption}</figcaption></figure>'
