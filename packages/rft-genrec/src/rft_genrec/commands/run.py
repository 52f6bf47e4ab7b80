"""Record of the command `rft-train genrec run`."""

from __future__ import annotations

from rft.config.command_record import Command

RUN = Command(
    name="genrec-run",
    two_words=True,
    summary="run the stages from interactions to figures, those that have changed",
    act="rft_genrec.pipeline.run:run",
    settings="rft_genrec.settings.run:GenrecRunSettings",
    rules="rft_genrec.settings.run:run_rules",
)
