"""The sizes of a new decoder: what settings leave open is derived here, and what does not fit is refused.

No torch is imported here, so that the command line can refuse settings at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from rft_core.errors import SettingsRefusal
from rft_models.settings import DecoderSettings

MIXTURES = frozenset({"mixtral", "qwen3_moe", "qwen2_moe", "dots1"})
"""Families whose blocks hold experts."""
WITH_SHARED_EXPERTS = frozenset({"qwen2_moe", "dots1"})

_DEFAULT_EXPERTS, _DEFAULT_TOP_K = 8, 2
_GLU_STEP = 64
_EXPERT_STEP = 16
"""Widths that matrix units take whole: 16 numbers of bfloat16 are 32 bytes, twice what grouped products ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewDecoderSizes:
    """A decoder's sizes, every one of them a number.

    Example: `decoder_sizes(DecoderSettings(hidden_size=64, num_heads=4), vocab_size=300).ffn_hidden_size` is 192.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_hidden_size: int
    """Of the feed-forward part, of a mixture of each expert."""
    max_seq_len: int
    use_glu: bool
    dropout: float
    tie_embeddings: bool
    init_std: float
    num_experts: int
    """0 = no mixture."""
    top_k: int
    shared_experts: int

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads


def family_of(chosen: DecoderSettings) -> str:
    """Return the family that settings choose, "auto" resolved."""
    if chosen.family != "auto":
        return chosen.family
    if not chosen.use_glu or chosen.dropout > 0:
        return "own"
    if not chosen.use_moe:
        return "qwen3"
    return "qwen2_moe" if chosen.shared_experts else "qwen3_moe"


def decoder_sizes(chosen: DecoderSettings, *, vocab_size: int) -> NewDecoderSizes:
    """Return the sizes of a decoder for a tokenizer of `vocab_size` tokens.

    Raises:
        OptionsError: sizes that do not fit together; the first of `decoder_refusals`.
    """
    for refusal in decoder_refusals(chosen, vocab_size=vocab_size):
        raise refusal.as_error(asdict(chosen) | {"tokenizer": f"{vocab_size} tokens"})
    num_experts = (chosen.num_experts or _DEFAULT_EXPERTS) if chosen.use_moe else 0
    top_k = (chosen.top_k or min(_DEFAULT_TOP_K, num_experts)) if chosen.use_moe else 0
    return NewDecoderSizes(
        family=family_of(chosen),
        vocab_size=chosen.vocab_size or vocab_size,
        hidden_size=chosen.hidden_size,
        num_layers=chosen.num_layers,
        num_heads=chosen.num_heads,
        num_kv_heads=chosen.num_kv_heads or chosen.num_heads,
        ffn_hidden_size=chosen.ffn_hidden_size or _ffn_width(chosen, top_k),
        max_seq_len=chosen.max_seq_len,
        use_glu=chosen.use_glu,
        dropout=chosen.dropout,
        tie_embeddings=chosen.tie_embeddings,
        init_std=chosen.init_std,
        num_experts=num_experts,
        top_k=top_k,
        shared_experts=chosen.shared_experts,
    )


def _ffn_width(chosen: DecoderSettings, top_k: int) -> int:
    """Width of the feed-forward part; that of an expert makes a token's experts as wide as the dense part together."""
    if not chosen.use_glu:
        return 4 * chosen.hidden_size
    dense = _round_up(-(-8 * chosen.hidden_size // 3), _GLU_STEP)
    return _round_up(-(-dense // (top_k + chosen.shared_experts)), _EXPERT_STEP) if chosen.use_moe else dense


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def decoder_refusals(chosen: DecoderSettings, *, vocab_size: int | None = None) -> list[SettingsRefusal]:
    """Return everything that does not fit, in the order of the settings; empty where a decoder can be made.

    Args:
        chosen: the settings.
        vocab_size: tokens of the tokenizer; None where it is not known yet.
    """
    found = [refusal for rule in _RULES for refusal in rule(chosen)]
    if vocab_size is not None and chosen.vocab_size is not None and chosen.vocab_size < vocab_size:
        found.append(
            SettingsRefusal(
                code="decoder.vocab_size",
                names=("vocab_size", "tokenizer"),
                why="every token of the tokenizer has a row of the embedding",
                do=f"--vocab_size {vocab_size}, or leave vocab_size out",
            )
        )
    return found


def _heads(chosen: DecoderSettings) -> Iterator[SettingsRefusal]:
    hidden, heads = chosen.hidden_size, chosen.num_heads
    if hidden % heads or hidden // heads % 2:
        yield SettingsRefusal(
            code="decoder.heads",
            names=("hidden_size", "num_heads"),
            why="hidden_size / num_heads must be an even whole number: positions turn pairs of a head's entries",
            do=f"--hidden_size {_round_up(hidden, 2 * heads)}",
        )
    kv_heads = chosen.num_kv_heads
    if kv_heads is not None and (kv_heads > heads or heads % kv_heads):
        fitting = max(number for number in range(1, min(kv_heads, heads) + 1) if heads % number == 0)
        yield SettingsRefusal(
            code="decoder.kv_heads",
            names=("num_heads", "num_kv_heads"),
            why="each key and value head serves equally many query heads",
            do=f"--num_kv_heads {fitting}",
        )


def _experts(chosen: DecoderSettings) -> Iterator[SettingsRefusal]:
    if not chosen.use_moe:
        for name in ("num_experts", "top_k", "shared_experts"):
            if getattr(chosen, name):
                yield SettingsRefusal(
                    code="decoder.no_mixture",
                    names=(name, "use_moe"),
                    why=f"{name} belongs to a mixture of experts, and the feed-forward part is dense",
                    do=f"--use_moe, or leave {name} out",
                )
        return
    num_experts = chosen.num_experts or _DEFAULT_EXPERTS
    if chosen.top_k > num_experts:
        yield SettingsRefusal(
            code="decoder.top_k",
            names=("top_k", "num_experts"),
            why=f"a token goes to top_k different experts of {num_experts}",
            do=f"--top_k {num_experts}",
        )


def _families(chosen: DecoderSettings) -> Iterator[SettingsRefusal]:
    family = family_of(chosen)
    if chosen.use_moe and family not in MIXTURES:
        names = ("family", "use_moe") if chosen.family != "auto" else ("use_moe", "dropout", "use_glu")
        yield SettingsRefusal(
            code="decoder.dense_family",
            names=names,
            why=f"the family {family} has no experts; those that have: {', '.join(sorted(MIXTURES))}",
            do="--family auto with use_glu on and dropout 0, or leave use_moe out",
        )
    if not chosen.use_moe and family in MIXTURES:
        yield SettingsRefusal(
            code="decoder.mixture_family",
            names=("family", "use_moe"),
            why=f"the blocks of {family} hold experts",
            do="--use_moe, or --family qwen3",
        )
    if family != "own":
        for name, is_set in (("use_glu", not chosen.use_glu), ("dropout", chosen.dropout > 0)):
            if is_set:
                yield SettingsRefusal(
                    code=f"decoder.{name}",
                    names=("family", name),
                    why=f"the architecture {family} is gated and has no dropout",
                    do="--family own, or leave family out",
                )
    yield from _shared(chosen, family)


def _shared(chosen: DecoderSettings, family: str) -> Iterator[SettingsRefusal]:
    if chosen.use_moe and chosen.shared_experts and family not in WITH_SHARED_EXPERTS and family in MIXTURES:
        yield SettingsRefusal(
            code="decoder.shared_experts",
            names=("family", "shared_experts"),
            why=f"{family} has no shared experts; {' and '.join(sorted(WITH_SHARED_EXPERTS))} have",
            do="--family qwen2_moe, or leave shared_experts out",
        )
    if chosen.use_moe and family in WITH_SHARED_EXPERTS and not chosen.shared_experts:
        yield SettingsRefusal(
            code="decoder.shared_experts",
            names=("family", "shared_experts"),
            why=f"each block of {family} has a shared expert",
            do="--shared_experts 1",
        )


_RULES: tuple[Callable[[DecoderSettings], Iterator[SettingsRefusal]], ...] = (_heads, _experts, _families)
