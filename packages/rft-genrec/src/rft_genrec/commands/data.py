"""The record of `rft-train genrec data`, which makes a catalogue and its samples."""

from __future__ import annotations

from rft.config.command_record import Command

DATA = Command(
    name="genrec-data",
    two_words=True,
    summary="make a catalogue and samples for generative recommendation",
    settings="rft_genrec.settings.data:GenrecDataSettings",
    rules="rft_genrec.settings.data_rules:problems",
    notes="rft_genrec.settings.data_rules:idle_settings",
    act="rft_genrec.interactions.prepare:prepare",
)
