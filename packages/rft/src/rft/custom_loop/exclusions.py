"""Settings of a loop that exclude one another, or that act only beside another one. No torch is imported here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rft_core.errors import OptionsError
from rft_dist.strategies.registry import STRATEGIES, choose_strategy, refusals, sharding_settings, strategy_settings
from rft_engine.registry import AUTO, ENGINES, limits_of
from rft_models.settings import freezing_refusal

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Exclusion:
    """Settings that are not taken together."""

    names: tuple[str, ...]
    applies: Callable[[Values], Any]
    why: str
    do: str


_STRATEGIES = tuple(dict.fromkeys(row.setting for row in STRATEGIES if row.setting))
"""The settings that choose how weights are distributed."""


def _reads_shards(values: Values) -> bool:
    """Return whether a rank can read its own shards from the files."""
    settings = strategy_settings(values)
    return choose_strategy(settings).sharding(settings).float32_weights


_EXCLUSIONS = (
    _Exclusion(
        ("fp16", "bf16"),
        lambda values: values["fp16"] and values["bf16"],
        "the forward computes in float16 or in bfloat16, not in both",
        "bf16=True alone, which needs no loss scale",
    ),
    _Exclusion(
        ("fp16", "use_mp_opt"),
        lambda values: values["fp16"] and values["use_mp_opt"],
        "the forward computes in float16 or in bfloat16, not in both",
        "use_mp_opt=True alone, which needs no loss scale",
    ),
    _Exclusion(
        ("meta_init", *_STRATEGIES),
        lambda values: values["meta_init"] and not _reads_shards(values),
        "a rank reads only its shards where weights are sharded; other strategies load full weights",
        "fsdp=True",
    ),
    _Exclusion(
        ("load_in_4bit", "lora_rank"),
        lambda values: values["load_in_4bit"] and not values["lora_rank"],
        "weights in 4 bits cannot be trained themselves",
        "lora_rank=16",
    ),
    _Exclusion(
        ("load_in_4bit", *_STRATEGIES),
        lambda values: values["load_in_4bit"] and (sharding_settings(values) or values["tp_size"] > 1),
        "weights in 4 bits cannot be sharded, cut into parts or flattened into one tensor",
        "load_in_4bit=False",
    ),
    _Exclusion(
        ("lora_dropout", *_STRATEGIES, "sp_size"),
        lambda values: (
            values["lora_dropout"] and (sharding_settings(values) or values["tp_size"] > 1 or values["sp_size"] > 1)
        ),
        "its masks follow from whole samples and whole adapters",
        "lora_dropout=0.0",
    ),
    _Exclusion(
        ("lora_type", "tp_size"),
        lambda values: values["lora_rank"] and values["lora_type"] == "dora" and values["tp_size"] > 1,
        "the length of a row is that of the whole row, of which a rank may have a part",
        'lora_type="rslora"',
    ),
    _Exclusion(
        ("lora_rank", "freeze_prefix", "train_only_tokens_from"),
        lambda values: values["lora_rank"] and (values["freeze_prefix"] or values["train_only_tokens_from"] >= 0),
        "with adapters every weight of the model is frozen already",
        'freeze_prefix="", train_only_tokens_from=-1',
    ),
    _Exclusion(
        ("enable_ema", "train_only_tokens_from"),
        lambda values: values["enable_ema"] and values["train_only_tokens_from"] >= 0,
        "the average covers full matrices, and here only rows of one are trained",
        "enable_ema=False",
    ),
    _Exclusion(
        ("max_norm_spike", "zero_stage"),
        lambda values: values["max_norm_spike"] and values["zero_stage"],
        "DeepSpeed learns the norm inside of its step, when it is too late to refuse it",
        "max_norm_spike=0.0",
    ),
    _Exclusion(
        ("engine_type", *_STRATEGIES),
        lambda values: (
            sharding_settings(values)
            and values["engine_type"] != AUTO
            and not ENGINES[values["engine_type"]].can.supports_sharded_policy
        ),
        "this engine reads whole weights; the native engine takes a copy of its own",
        'engine_type="native"',
    ),
)

_NEEDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **{name: (row.setting, acts) for row in STRATEGIES for name, acts in row.options.items()},
    **dict.fromkeys(("lora_alpha", "lora_dropout", "target_modules", "lora_type"), ("lora_rank", bool)),
    **dict.fromkeys(("gradient_checkpointing_mode", "gradient_checkpointing_every"), ("gradient_checkpointing", bool)),
    "chunk_size": ("fused_linear_logprob", bool),
    "ema_decay": ("enable_ema", bool),
    "sp_mode": ("sp_size", lambda size: size > 1),
}
"""Settings that act only where another one has certain values."""


def refuse_contradictions(values: Values, given: Mapping[str, object]) -> None:
    """Raise for settings that exclude one another, and for a given one that has no effect beside the others.

    Args:
        values: all settings by their names.
        given: those that were given.

    Raises:
        OptionsError: the first of them.
    """
    for name in given:
        if name in _NEEDS and not _NEEDS[name][1](values[_NEEDS[name][0]]):
            raise _without_effect(name, values, _NEEDS[name][0])
    for names, why, do, code in _found(values, given):
        raise OptionsError(
            code=code,
            what=", ".join(f"{name} = {values[name]}" for name in names),
            where="rft.open_loop",
            why=why,
            do=do,
        )


def _found(values: Values, given: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], str, str, str]]:
    """Yield (settings, why, what to do, code) of every contradiction."""
    for refusal in refusals(values):
        yield refusal.names, refusal.why, refusal.remedy(values), refusal.code
    for rule in _EXCLUSIONS:
        if rule.applies(values):
            # those that were left as they are say nothing
            names = tuple(name for name in rule.names if name in given)
            yield names, rule.why, rule.do, "loop.excluded_settings"
    if freezing := freezing_refusal(values["freeze_prefix"], values["train_only_tokens_from"]):
        yield freezing.names, freezing.why, freezing.do, freezing.code
    if values["engine_type"] != AUTO:
        for limit in limits_of(values["engine_type"], values):
            yield limit.settings, limit.why, limit.remedy.format_map(dict(values)), limit.code


def _without_effect(name: str, values: Values, needed: str) -> OptionsError:
    return OptionsError(
        code="loop.no_effect",
        what=f"{name} = {values[name]} beside {needed} = {values[needed]}",
        where="rft.open_loop",
        why=f"{name} acts only with {needed}",
        do=f"leave {name} out",
    )
