"""Every error code of recommendation has its row in docs/genrec/errors.md, and no row has another one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "packages" / "rft-genrec" / "src"
NO_CODES = {"genrec.json"}
"""Names of files."""


def test_the_page_lists_every_code() -> None:
    text = "".join(path.read_text() for path in sorted(SOURCES.rglob("*.py")))
    codes = set(re.findall(r'"(genrec\.[a-z_]+)"', text)) - NO_CODES
    page = (ROOT / "docs" / "genrec" / "errors.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `genrec.")]
    listed = [code for row in rows for code in re.findall(r"`(genrec\.[a-z_]+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(codes)
