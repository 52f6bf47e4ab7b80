"""Texts of items as encoders read them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from rft_genrec.catalogue.records import Catalogue


def item_texts(catalogue: Catalogue, field_characters: int) -> list[str]:
    """Return title and description of every item, each cut to its first characters; 0 = not cut."""
    most = field_characters or None
    return [f"{item.title[:most]} {item.description[:most]}".strip() for item in catalogue.items]


def digest_of_texts(texts: Sequence[str]) -> str:
    """Return the SHA-256 of texts in their order."""
    return hashlib.sha256(json.dumps(list(texts), ensure_ascii=False).encode()).hexdigest()
