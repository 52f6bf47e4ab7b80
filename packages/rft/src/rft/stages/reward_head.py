"""The reward model that is trained: a new head on a language model, or a reward model that is trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from rft_core.errors import OptionsError
from rft_models.families.vision import is_vision
from rft_models.files.directories import checked_model_directory
from rft_models.files.head_tensors import stored_tensor
from rft_models.layers.gradient_checkpointing import Checkpointing
from rft_models.loading.sequence_classifiers import HEAD
from rft_models.policy.load_for_training import checkpointing_of
from rft_models.reward_model.loading import load_reward_model, new_reward_model, read_head, spec_in_files
from rft_models.reward_model.model import RewardModel
from rft_models.reward_model.spec import RewardSpec, StepSpec, stored_spec
from rft_models.reward_model.truncated_decoder import truncate_decoder
from rft_models.settings import RewardHeadSettings, TrainedWeightsSettings

_DEFAULTS = RewardHeadSettings()


def head_spec(settings: RewardHeadSettings, *, steps: bool = False) -> RewardSpec:
    """Return the specification of a new head; `steps`: of one that scores the steps of a response.

    Raises:
        OptionsError: names or weights of the heads that do not fit.
    """
    heads = tuple(name.strip() for name in settings.heads_types.split(","))
    return RewardSpec(
        heads=heads,
        weights=_weights(settings.heads_weights, heads),
        pooling="attention" if settings.pooling_method == "attn" else "last",
        layer=None if settings.probing_layer < 0 else settings.probing_layer,
        scale_for_train=settings.scale_for_train,
        steps=_step_spec(settings) if steps else None,
    )


def trained_spec(pretrain: str | Path, settings: RewardHeadSettings, *, steps: bool = False) -> RewardSpec:
    """Return the specification of the head that is trained: that of a reward model's directory, else a new one.

    Raises:
        OptionsError: settings of the head that are not those of the reward model which is trained on; one of steps
            trained on pairs, or the other way round; a token classifier.
        DataError: the directory is none of a model, or its head is damaged.
    """
    asked = head_spec(settings, steps=steps)
    if not is_reward_model(pretrain):
        return asked
    path, config = checked_model_directory(pretrain)
    found = spec_in_files(path, config)
    if found.steps is not None and found.steps.is_of_token_classifier:
        raise OptionsError(
            code="rm.token_classifier",
            what=f"{pretrain} is a token classifier with two labels",
            where="--pretrain",
            why="it is read to score with; training would go on with another head than it has",
            do="--pretrain LANGUAGE_MODEL, or give it to rm-test --model or to rl --reward_pretrain",
        )
    if (found.steps is not None) != steps:
        has, asks = ("whole responses", "steps") if steps else ("steps of responses", "pairs")
        raise OptionsError(
            code="rm.other_kind",
            what=f"{pretrain} scores {has}, and the loss is of {asks}",
            where="--loss_type",
            why="a reward model is trained on with the head that it has",
            do="begin from the language model" if steps else "--loss_type steps",
        )
    changed = [item.name for item in fields(settings) if getattr(settings, item.name) != getattr(_DEFAULTS, item.name)]
    if changed and asked != found:
        raise OptionsError(
            code="rm.other_head",
            what=f"{', '.join(changed)} beside a reward model whose head is {found.as_record()}",
            where=", ".join(f"--{name}" for name in changed),
            why="a reward model is trained on with the head that it has",
            do=f"leave {', '.join(changed)} out, or begin from the language model",
        )
    return found


def is_reward_model(directory: str | Path) -> bool:
    """Return whether the directory holds a reward model or a sequence classifier, and not a language model alone."""
    path, config = checked_model_directory(directory)
    if stored_spec(config, path) is not None:
        return True
    weight = stored_tensor(path, f"{HEAD}.weight")
    return weight is not None and weight.dim() == 2


def reward_model_to_train(
    settings: TrainedWeightsSettings,
    spec: RewardSpec,
    source: str | Path,
    *,
    seed: int,
    dtype: torch.dtype,
    device: str,
) -> RewardModel:
    """Load the model in `source` in training mode; its head where it has one, else a new one, drawn from the seed."""
    checkpointing: Checkpointing | None = checkpointing_of(settings)
    if is_reward_model(source):
        model = load_reward_model(
            source, dtype=dtype, device=device, flash_attn=settings.flash_attn, gradient_checkpointing=checkpointing
        )
    else:
        model = new_reward_model(
            source,
            spec,
            seed=seed,
            dtype=dtype,
            device=device,
            flash_attn=settings.flash_attn,
            gradient_checkpointing=checkpointing,
        )
    return model.train()


def scored_part(spec: RewardSpec, where: str) -> Callable[[Any], Any]:
    """Return the function from a causal language model to the part whose states the head reads.

    Raises (the function):
        OptionsError: there is no such layer.
    """

    def part_of(model: Any) -> Any:
        part = model.base_model
        if spec.layer is not None:
            truncate_decoder(part.get_decoder() if is_vision(part.config.model_type) else part, spec.layer, where)
        return part

    return part_of


def take_head(model: RewardModel, directory: Path) -> None:
    """Put the values of the head in a directory into the model's own head.

    Raises:
        DataError: the directory holds no head of the model's specification.
    """
    model.head.load_state_dict(read_head(directory, model.spec).state_dict())


def _step_spec(settings: RewardHeadSettings) -> StepSpec:
    separator = settings.step_separator.replace(r"\n", "\n").replace(r"\t", "\t")
    return StepSpec(separator=separator, reduction=settings.step_reduction)


def _weights(text: str, heads: tuple[str, ...]) -> tuple[float, ...]:
    if not text:
        return (1.0,) * len(heads)
    try:
        weights = tuple(float(word) for word in text.split(","))
    except ValueError:
        weights = ()
    if len(weights) != len(heads):
        raise OptionsError(
            code="rm.head_weights",
            what=f"heads_weights = {text} for the heads {', '.join(heads)}",
            where="--heads_weights",
            why="each head has one weight, a number",
            do=f"--heads_weights {','.join(['1'] * len(heads))}",
        )
    return weights
