"""Starting from the weights of a checkpoint without continuing its run: all of them, or those that are named."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rft.checkpoints.weight_causes import causes, shapes_of
from rft_core.errors import CheckpointError, OptionsError
from rft_dist.checkpoints.locate import resolve_checkpoint
from rft_dist.checkpoints.reader import Checkpoint
from rft_dist.settings import CheckpointSettings
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.freezing import names_of
from rft_models.policy.load import load_policy

_LOG = logging.getLogger(__name__)

_SHOWN = 3
_LORA = re.compile(r"lora_A(\.|$)")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Outcome of loading initial weights: names loaded, missing, unexpected and mismatched."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """In the model and not in the checkpoint."""
    unexpected: tuple[str, ...]
    """In the checkpoint and not in the model."""
    mismatched: tuple[str, ...]
    """Of another shape in the checkpoint; each with both shapes."""
    kept: int
    """Tensors of the model that were not asked for."""

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} loaded"]
        for name in ("missing", "unexpected", "mismatched"):
            names = getattr(self, name)
            shown = f" ({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''})" if names else ""
            parts.append(f"{len(names)} {name}{shown}")
        return ", ".join([*parts, f"{self.kept} kept from --pretrain"])


def engine_weights_directory(settings: CheckpointSettings, source: str | Path, *, shares_weights: bool) -> str | Path:
    """The directory from which an engine that has weights of its own begins.

    Raises:
        OptionsError: only some weights are taken, so that no directory has what the policy starts from.
    """
    if settings.ckpt_partial and not shares_weights:
        raise OptionsError(
            code="checkpoint.partial_engine",
            what=f"--ckpt_partial {settings.ckpt_partial} with an engine that loads a directory of its own",
            where="--ckpt_partial",
            why="no directory holds the mixture of weights that the policy starts from",
            do="--engine_type native",
        )
    return _checkpoint(settings).model_directory if settings.ckpt_weights_only else source


def load_initial_weights(policy: CausalPolicy, settings: CheckpointSettings, *, show: bool) -> None:
    """Put the weights that the settings name into the policy; nothing where they name none.

    Every rank takes them from its own reading. Raises CheckpointError, and changes nothing, where
    all are asked for and they are not those of this model, or where a beginning names none.
    """
    if not (settings.ckpt_weights_only or settings.ckpt_partial):
        return
    checkpoint = _checkpoint(settings)
    donor = load_policy(checkpoint.model_directory, dtype=policy.dtype, tokenizer=policy.tokenizer)
    target, source = _state(policy), _state(donor)
    words = (word.strip() for word in settings.ckpt_partial.split(","))
    prefixes = [_as_the_model_names(word, target) for word in words if word]
    if settings.ckpt_partial and not prefixes:
        raise _names_nothing(settings.ckpt_partial, source, str(checkpoint.model_directory))
    # every word by itself: a misspelt one must not hide behind one that fits
    for prefix in prefixes:
        both = [name for name in target if name.startswith(prefix) and name in source]
        if not any(target[name].shape == source[name].shape for name in both):
            raise _names_nothing(prefix, source, str(checkpoint.model_directory))
    ours, theirs = (getattr(each.model, "config", None) for each in (policy, donor))
    because = causes(ours, theirs, shapes_of(target), shapes_of(source))
    model = str(checkpoint.model_directory)
    taken = copy_weights(target, source, prefixes or [""], because=because, path=checkpoint.path, model=model)
    if show:
        _LOG.info("weights of step %d from %s: %s", checkpoint.step, checkpoint.path, taken)


def copy_weights(
    target: Mapping[str, Tensor],
    source: Mapping[str, Tensor],
    prefixes: list[str],
    *,
    because: str = "",
    path: Path | None = None,
    model: str = "",
) -> LoadReport:
    """Copy the tensors whose names begin with one of `prefixes`; "" stands for all, which then have to fit.

    An error names `because`, the settings that differ, the checkpoint `path`, and `model`, the directory of the model
    that the checkpoint belongs to.

    Raises CheckpointError, and copies nothing, where all are asked for and the two sets differ.
    """
    chosen = [name for name in sorted({*target, *source}) if any(name.startswith(prefix) for prefix in prefixes)]
    both = [name for name in chosen if name in target and name in source]
    taken = LoadReport(
        loaded=tuple(name for name in both if target[name].shape == source[name].shape),
        missing=tuple(name for name in chosen if name not in source),
        unexpected=tuple(name for name in chosen if name not in target),
        mismatched=tuple(
            f"{name} {list(source[name].shape)} for {list(target[name].shape)}"
            for name in both
            if target[name].shape != source[name].shape
        ),
        kept=len(set(target) - set(chosen)),
    )
    if prefixes == [""] and (taken.missing or taken.unexpected or taken.mismatched):
        raise CheckpointError(
            code="checkpoint.other_weights",
            what=f"the checkpoint's weights are not those of this model: {taken}"
            + (f"; in the checkpoint: {because}" if because else ""),
            where="--ckpt_weights_only" + (f", {path}" if path else ""),
            why="all weights were requested: each must be present with its shape",
            do=_other_weights_remedy(taken, source, model),
        )
    # the first change: every refusal above has left the model as it was
    with torch.no_grad():
        for name in taken.loaded:
            target[name].copy_(source[name])
    return taken


def _other_weights_remedy(taken: LoadReport, source: Mapping[str, Tensor], model: str) -> str:
    """The change that makes model and checkpoint fit: of the adapters, of the model, or of the weights to take."""
    ranks = {tensor.shape[0] for name, tensor in source.items() if _LORA.search(name)}
    differing = [*taken.missing, *taken.unexpected, *taken.mismatched]
    if len(ranks) == 1 and all("lora_" in name for name in differing):
        return f"--lora_rank {ranks.pop()}"
    if taken.mismatched or not taken.loaded:
        # a part of the weights would leave a model of two: those of another size keep the values of --pretrain
        return f"--pretrain {model}, the model of this checkpoint" if model else "--ckpt_path of another checkpoint"
    return f"--ckpt_partial {','.join(_beginnings(taken.loaded))}"


def _beginnings(names: Iterable[str]) -> list[str]:
    """The first two parts of the names, each once."""
    return list(dict.fromkeys(".".join(name.split(".")[:2]) for name in names))


def _checkpoint(settings: CheckpointSettings) -> Checkpoint:
    asked_by = "--ckpt_weights_only" if settings.ckpt_weights_only else "--ckpt_partial"
    return resolve_checkpoint(Path(settings.ckpt_path).expanduser(), asked_by=asked_by).checkpoint


def _state(policy: CausalPolicy) -> dict[str, Tensor]:
    """The model's tensors by name, one that is tied to an earlier one left out."""
    tensors: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in policy.model.state_dict().items():
        # a tied tensor would be copied twice and counted twice
        if tensor.data_ptr() not in addresses:
            tensors[name] = tensor
        addresses.add(tensor.data_ptr())
    return tensors


def _as_the_model_names(prefix: str, names: Iterable[str]) -> str:
    """A beginning of names; "visual" is the vision tower whatever a model calls it."""
    return next((own for own in names_of(prefix) if any(name.startswith(own) for name in names)), prefix)


def _names_nothing(prefix: str, source: Mapping[str, Tensor], where: str) -> CheckpointError:
    first = sorted({".".join(name.split(".")[:3]) for name in source})
    return CheckpointError(
        code="checkpoint.partial_names_nothing",
        what=f"no weight whose name begins with {prefix!r} has the same shape in model and checkpoint",
        where=where,
        why="each name must match a weight, so that none is left out unnoticed",
        do=f"--ckpt_partial {first[0] if first else 'NAME'}",
    )
