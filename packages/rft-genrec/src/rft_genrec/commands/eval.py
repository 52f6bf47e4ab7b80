"""The record of `rft-train genrec eval`."""

from __future__ import annotations

from rft.config.command_record import Command

EVAL = Command(
    name="genrec-eval",
    two_words=True,
    summary="score a recommender and baselines by the next items of a split",
    settings="rft_genrec.settings.eval:GenrecEvalSettings",
    rules="rft_genrec.settings.eval:eval_rules",
    derive="rft_genrec.settings.eval:ranks_of_devices",
    act="rft_genrec.evaluation.page:lines",
)
