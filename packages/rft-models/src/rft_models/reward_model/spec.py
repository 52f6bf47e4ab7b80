"""Specification of a reward model's head on its decoder, as in config.json. No torch is imported here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from rft_core.errors import DataError, OptionsError

Pooling = Literal["last", "attention"]
StepReduction = Literal["min", "product", "mean", "last"]

RECORD = "reward_head"
"""Key of config.json that holds a `RewardSpec`, and beginning of the names of tensors that transformers has none of."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_UNNAMED = re.compile(r"LABEL_\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """Division of a response into steps, and the reduction of their scores to one reward.

    Example: `StepSpec(separator="\\n\\n", reduction="product")`.
    """

    separator: str = "\n"
    """Text behind each step; the step's score is read from the state of its last token."""
    reduction: StepReduction = "min"
    """The reward of a response from its steps, as in `rft_algos.rewards.step_scores`."""

    def __post_init__(self) -> None:
        if not self.separator or self.reduction not in get_args(StepReduction):
            raise OptionsError(
                code="models.reward_steps",
                what=f"separator {self.separator!r}, reduction {self.reduction!r}",
                where="reward head",
                why=f"steps end with a text, and the reduction is one of {', '.join(get_args(StepReduction))}",
                do='StepSpec(separator="\\n", reduction="min")',
            )

    @property
    def is_of_token_classifier(self) -> bool:
        """Return whether the model is a token classifier with two labels, which is scored with alone."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClassifierSteps(StepSpec):
    """Steps as TRL's PRMTrainer encodes them: prompts without a chat template, behind the begin token if there is one.

    Of models that are scored with alone: none is written here.
    """

    @property
    def is_of_token_classifier(self) -> bool:
        """Return True: it is the specification of a token classifier."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """Specification of the layer that is read, the pooling of a text's states, and the heads on it.

    Example: `RewardSpec(heads=("helpful", "safe"), weights=(1.0, 0.5), pooling="attention", layer=12)`.
    """

    heads: tuple[str, ...] = ("score",)
    """Their names, each a linear layer without bias from the pooled state to one number."""
    weights: tuple[float, ...] | None = (1.0,)
    """Weight of each head in the reward; None where the files do not contain it."""
    pooling: Pooling = "last"
    """"last": the state of the last token that is no padding; "attention": a mean that a learned query weights."""
    layer: int | None = None
    """k: the states behind layer k (from 1), before any final norm; layers above it are not run and not kept.
    None: the last layer's, after the final norm."""
    attention_heads: int = 4
    """Queries of "attention" pooling, each over its own part of the width."""
    scale_for_train: bool = False
    """A learned factor on the scores in training mode alone, from 1 / 0.07 (the temperature of CLIP, 2103.00020)."""
    steps: StepSpec | None = None
    """A step (process) reward model: the scores are of the steps of a response; None: of whole texts."""

    def __post_init__(self) -> None:
        wrong = self._wrong()
        if wrong is not None:
            raise OptionsError(
                code="models.reward_spec",
                what=wrong,
                where="reward head",
                why="heads have different names, finite weights and a layer counted from 1",
                do='RewardSpec(heads=("helpful", "safe"), weights=(1.0, 0.5))',
            )

    def _wrong(self) -> str | None:
        if not self.heads or len(set(self.heads)) < len(self.heads):
            return f"heads {self.heads}"
        unnamed = [name for name in self.heads if not _NAME.fullmatch(name)]
        if unnamed:
            return f"head {unnamed[0]!r}; a name has letters, digits, dots, dashes and underscores"
        if self.weights is not None and len(self.weights) != len(self.heads):
            return f"{len(self.weights)} weights for {len(self.heads)} heads"
        if self.weights is not None and not all(map(math.isfinite, self.weights)):
            return f"weights {self.weights}"
        if self.pooling not in get_args(Pooling):
            return f"pooling {self.pooling!r}; it is one of {', '.join(get_args(Pooling))}"
        if self.layer is not None and self.layer < 1:
            return f"layer {self.layer}"
        if self.steps is not None and (len(self.heads) > 1 or self.pooling != "last" or self.scale_for_train):
            return "scores of steps with several heads, pooled states or a scale: a step is one logit of one state"
        return f"attention_heads {self.attention_heads}" if self.attention_heads < 1 else None

    @property
    def is_classifier(self) -> bool:
        """Return true where a sequence classifier of transformers computes the same."""
        return self.pooling == "last" and self.layer is None and not self.scale_for_train and self.steps is None

    @property
    def tensor_prefix(self) -> str:
        """Prefix of the names of the head's tensors; "" for those that transformers knows."""
        return "" if self.is_classifier else f"{RECORD}."

    def as_record(self) -> dict[str, Any]:
        """Return the fields as plain JSON; without `steps` where scores are of whole texts."""
        return {name: value for name, value in asdict(self).items() if name != "steps" or value is not None}


def stored_spec(config: Mapping[str, Any], path: Path) -> RewardSpec | None:
    """Read the spec in a config.json that was written here, or None.

    Raises:
        DataError: the entry is damaged.
    """
    record = config.get(RECORD)
    if record is None:
        return None
    try:
        fields = dict(record)
        for name in ("heads", "weights"):
            fields[name] = None if fields[name] is None else tuple(fields[name])
        if fields.get("steps") is not None:
            fields["steps"] = StepSpec(**fields["steps"])
        return RewardSpec(**fields)
    except (TypeError, ValueError, KeyError, OptionsError) as error:
        raise DataError(
            code="models.reward_spec_damaged",
            what=f"{RECORD} in config.json cannot be read: {error}",
            where=str(path / "config.json"),
            why="this entry describes how the scores are computed",
            do=f"copy config.json of the reward model into {path} again",
        ) from error


def spec_of_classifier(config: Mapping[str, Any], num_labels: int) -> RewardSpec:
    """Return the spec of a sequence classifier of transformers with `num_labels` labels; a label names a head."""
    named = cast("Mapping[str, Any]", config.get("id2label") or {})
    names = [str(named.get(str(number), f"LABEL_{number}")) for number in range(num_labels)]
    names = [re.sub(r"[^\w.-]+", "_", name) for name in names]
    if num_labels == 1:
        return RewardSpec(heads=("score",) if _UNNAMED.fullmatch(names[0]) else (names[0],))
    return RewardSpec(heads=tuple(names), weights=None)
