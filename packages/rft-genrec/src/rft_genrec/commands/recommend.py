"""The record of `rft-train genrec recommend`."""

from __future__ import annotations

from rft.config.command_record import Command

RECOMMEND = Command(
    name="genrec-recommend",
    two_words=True,
    summary="recommend items for histories, of a file or over HTTP",
    settings="rft_genrec.settings.recommend:GenrecRecommendSettings",
    rules="rft_genrec.settings.recommend:recommend_rules",
    notes="rft_genrec.settings.recommend:recommend_notes",
    act="rft_genrec.serving.command:lines",
)
