"""The cases: what is put in, what each pins down, and which were worked out by hand."""

from __future__ import annotations

from conformance.definitions import (
    advantage,
    aggregation,
    correction,
    kl,
    preference,
    quantisation,
    ranking,
    router,
    shaping,
    surrogate,
    tokens,
    value,
)
from conformance.definitions.case import Case

ALL: tuple[Case, ...] = (
    *advantage.CASES,
    *tokens.CASES,
    *aggregation.CASES,
    *correction.CASES,
    *kl.CASES,
    *preference.CASES,
    *quantisation.CASES,
    *ranking.CASES,
    *router.CASES,
    *shaping.CASES,
    *surrogate.CASES,
    *value.CASES,
)
