"""A catalogue of six tools, and people who take them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

IDS = [[f"<a_{n // 3}>", f"<b_{n % 3}>"] for n in range(6)]


def write_catalogue(folder: Path, ids: list[list[str]] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    items = {str(n): {"title": f"Tool {n}", "description": "red"} for n in range(6)}
    (folder / "tools.item.json").write_text(json.dumps(items))
    (folder / "tools.index.json").write_text(json.dumps(dict(enumerate(ids or IDS))))
    rows = ["user_id,history_item_id,item_id"]
    for user in range(8):
        items_of = [(user + step) % 6 for step in range(5)]
        rows += [f'A{user},"{items_of[:end]}",{items_of[end]}' for end in range(1, 5)]
    (folder / "train.csv").write_text("\n".join(rows) + "\n")
    (folder / "valid.csv").write_text("\n".join([rows[0], *rows[3:6]]) + "\n")
    return folder


@pytest.fixture
def catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RFT_CACHE", str(tmp_path / "cache"))
    return write_catalogue(tmp_path / "catalogue")
