"""`ConstrainedLogitsProcessor` for transformers' own `generate`; see `rft_engine.decoding.constrained_logits`.

Unlike the one of MiniOneRec it looks at no model's name, keeps no count of calls and fails closed. It takes a
`TokenTrie` of the IDs' tokens and the prompts of the call in place of a dictionary of prefixes.
"""

from __future__ import annotations

from rft_engine.decoding.constrained_logits import ConstrainedLogitsProcessor

__all__ = ["ConstrainedLogitsProcessor"]
