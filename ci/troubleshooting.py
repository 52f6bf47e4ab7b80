"""The pages of troubleshooting, in English and in Chinese, made of the registry of failures.

docs/troubleshooting/rows_*.json     one record a failure of users' guides: what RFT does about it, and the tests
docs/troubleshooting/matrix.json     one record a row of the fault matrix
docs/troubleshooting/missing_zh.json what a row lacks (ID), and what was not run on a GPU (ID.gpu), in Chinese, each
                                     with a digest of the English text that it translates
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "troubleshooting"
DEEDS = ("prevented", "detected", "explained", "recovered")


@cache
def texts() -> dict[str, Any]:
    """Words of the page in each language, and its parts by the first row of each."""
    return json.loads((FOLDER / "words.json").read_text())


@cache
def rows() -> tuple[dict[str, Any], ...]:
    """Every failure, in the order of its number."""
    found = [row for file in sorted(FOLDER.glob("rows_*.json")) for row in json.loads(file.read_text())]
    return tuple(sorted(found, key=lambda row: row["id"]))


@cache
def matrix() -> tuple[dict[str, Any], ...]:
    """Every row of the fault matrix."""
    return tuple(json.loads((FOLDER / "matrix.json").read_text()))


@cache
def missing_in_chinese() -> dict[str, dict[str, str]]:
    """What rows lack (`F01`) and what of them was not run on a GPU (`F01.gpu`), in Chinese."""
    return json.loads((FOLDER / "missing_zh.json").read_text())


def missing(row: dict[str, Any], language: str) -> str:
    """What a row lacks; in English where its Chinese translates an earlier text."""
    return _translated(row["id"], row["missing"], language)


def to_show(row: dict[str, Any]) -> str:
    """What of a row was not run on a GPU; empty where all was, or nothing needs one."""
    return row.get("gpu", "")


def _translated(key: str, text: str, language: str) -> str:
    chinese = missing_in_chinese().get(key, {})
    if language == "zh" and chinese.get("of") == hashlib.sha256(text.encode()).hexdigest()[:12]:
        return chinese["zh"]
    return text


def counts() -> dict[str, int]:
    """How many rows there are, are complete, lack something, and were not wholly run on a GPU."""
    complete = [row for row in rows() if not row["missing"]]
    return {
        "rows": len(rows()),
        "complete": len(complete),
        "lacking": len(rows()) - len(complete),
        "gpu": sum(bool(to_show(row)) for row in rows()),
        "gpu_complete": sum(bool(to_show(row)) for row in complete),
    }


def page(language: str) -> str:
    """The page in a language: an index by the texts that people see, then a section a failure."""
    words = texts()["words"][language]
    lines = [
        f"# {words['title']}",
        "",
        words["intro"],
        "",
        words["counts"].format(**counts()),
        "",
        f"## {words['index']}",
        "",
    ]
    lines += [f"| {words['text']} | {words['row']} |", "|---|---|"]
    index = sorted((text, row["id"]) for row in rows() for text in row["texts"])
    lines += [f"| {_cell(text)} | [{label}](#{label.lower()}) |" for text, label in index]
    titles = {part["first"]: part[language] for part in texts()["parts"]}
    for row in rows():
        if row["id"] in titles:
            lines += ["", f"## {titles[row['id']]}"]
        lines += ["", *_section(row, words, language)]
    return "\n".join(lines) + "\n"


def _section(row: dict[str, Any], words: dict[str, str], language: str) -> list[str]:
    deeds = [words[deed] for deed in DEEDS if row[deed]] or [words["nothing"]]
    # an anchor of its own: of a title in Chinese each viewer makes another one
    lines = [
        f'<a id="{row["id"].lower()}"></a>',
        "",
        f"### {row['id']} {row['title'][language]}",
        "",
        f"{words['cause']}: {row['cause'][language]}",
        "",
    ]
    lines += [f"{words['deeds']} ({', '.join(deeds)}): {row['what_happens'][language]}"]
    if row["missing"]:
        lines += ["", f"{words['missing']}: {missing(row, language)}"]
    if to_show(row):
        lines += ["", f"{words['to_show']}: {_translated(row['id'] + '.gpu', to_show(row), language)}"]
    if row["tests"]:
        gpu = f" ({words['gpu']})" if row["needs_gpu"] else ""
        lines += ["", f"{words['tests']}{gpu}: {', '.join(f'`{test}`' for test in row['tests'])}"]
    return lines


def _cell(text: str) -> str:
    escaped = text.replace("|", "\\|")
    return f"`{escaped}`" if "`" not in escaped else escaped


def pages() -> dict[Path, str]:
    """Both pages by their files."""
    return {
        ROOT / "docs" / "troubleshooting.md": page("en"),
        ROOT / "docs" / "zh" / "troubleshooting.md": page("zh"),
    }
