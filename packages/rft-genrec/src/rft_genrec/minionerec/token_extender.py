"""`TokenExtender`, which reads the tokens of an index of semantic IDs; see `rft_genrec.prompts.token_extender`."""

from __future__ import annotations

from rft_genrec.prompts.token_extender import TokenExtender

__all__ = ["TokenExtender"]
