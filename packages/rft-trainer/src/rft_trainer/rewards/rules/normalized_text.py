"""Texts as SQuAD compares them: without case, punctuation, articles and repeated white space."""

from __future__ import annotations

import re
import string

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Return a text in lower case without punctuation and articles, its words joined by one space.

    Source: the evaluation script of SQuAD 1.1 (Rajpurkar et al., 2016, arXiv 1606.05250).
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
