"""Sampled answers beside the images that they are about: a page of its own in the run's directory, for a browser.

The page holds its images, so that it can be sent to somebody; larger ones are links to their files.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rft_core.durable_files import replace_text
from rft_trainer.data.image_headers import media_type
from rft_trainer.runs.image_entries import entries_of, image_path
from rft_trainer.runs.reader import SAMPLES_PAGE, read_run
from rft_trainer.runs.reader import rows as rows_of

_LARGEST_HELD = 1 << 20
"""Bytes of an image that the page holds; a larger one is a link."""
_MOST_ROWS = 64
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1c2430}
table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.6rem .8rem;
border-bottom:1px solid #d8dee8}td.text{white-space:pre-wrap;overflow-wrap:anywhere}
img{max-width:16rem;max-height:16rem;min-width:6rem;image-rendering:pixelated;border:1px solid #d8dee8}
figure{margin:0 0 .5rem}figcaption,.dim{color:#68748a;font-size:13px;overflow-wrap:anywhere}
@media (prefers-color-scheme:dark){body{background:#12161d;color:#e4e8ef}td,th,img{border-color:#303846}}"""


def write(run: Path) -> Path | None:
    """The page of the last step whose rollouts were kept; None where its rows hold no images.

    Raises:
        StorageError: the disk refuses.
    """
    files = read_run(run).rollout_files
    rows = rows_of(files[-1])[:_MOST_ROWS] if files else []
    if not any(entries_of(row) for row in rows):
        return None
    file = run / SAMPLES_PAGE
    replace_text(file, _page(run, files[-1], rows))
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


def _page(run: Path, file: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    name = html.escape(run.resolve().name)
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{name}: samples</title><style>{_STYLE}</style>"
    titles = "".join(f"<th>{title}" for title in ("images", "prompt", "answer", "wanted", "reward"))
    step = int(file.stem.removeprefix("step_"))
    body = "\n".join(_row(row, file.parent) for row in rows)
    return (
        f"{head}\n<h1>{name}</h1><p class=dim>{len(rows)} sampled answers of step {step}; "
        f"all that was kept is in rollouts/{file.name}\n<table><tr>{titles}\n{body}\n</table></html>\n"
    )


def _row(row: Mapping[str, Any], directory: Path) -> str:
    images = "".join(_figure(entry, directory) for entry in entries_of(row)) or "<span class=dim>none</span>"
    reward = row.get("reward")
    score = f"{reward:.3g}" if isinstance(reward, int | float) else html.escape(str(row.get("status", "")))
    cells = "".join(f"<td class=text>{_text(row.get(name))}" for name in ("prompt", "response", "label"))
    return f"<tr><td>{images}{cells}<td>{score}"


def _text(value: object) -> str:
    return "" if value is None else html.escape(str(value))


def _figure(entry: Mapping[str, Any], directory: Path) -> str:
    """Return the image, a link to it, or its caption alone; a missing file is no failure of the page."""
    caption = html.escape(f"{entry.get('where', '')} {_measures(entry)}")
    file = image_path(entry, directory)
    if file is None or not file.is_file():
        return f"<figure><figcaption>{caption}, not kept</figcaption></figure>"
    if file.stat().st_size > _LARGEST_HELD:
        link = html.escape(file.resolve().as_uri())
        return f'<figure><a href="{link}">{html.escape(file.name)}</a><figcaption>{caption}</figcaption></figure>'
    data = file.read_bytes()
    source = f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"
    return f'<figure><img alt="" src="{source}"><figcaption>{caption}</figcaption></figure>'
