"""EMA weights (`--enable_ema`) in place of the weights: exported from a checkpoint, or swapped in for an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.checkpoints.export_lora import MERGED_LIMIT, load_adapted
from rft.checkpoints.verified_export import differs, logprob_difference, whole_or_not_at_all
from rft_core.errors import OptionsError
from rft_dist.checkpoint_format.resharding import BlockReader
from rft_dist.checkpoints.reader import Checkpoint
from rft_dist.optim import ema
from rft_models.files.checkpoint_names import to_checkpoint_names, to_module_names
from rft_models.lora import files
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_trainer.evaluation.ema_evaluator import EmaEvaluator, SwapInEma
from rft_trainer.evaluation.evaluator import Evaluator

_LOG = logging.getLogger(__name__)


class TensorsWithEma:
    """Tensors of a model directory, those that are averaged as their averages; one in memory at a time."""

    def __init__(
        self, stored: BlockReader, averages: BlockReader, keys: Mapping[str, str], own: Mapping[str, str], model: Any
    ) -> None:
        """`keys`: the model's own name -> that of its average; `own`: name in files -> the model's own, of averages."""
        self.table = stored.table
        self._stored, self._averages, self._keys, self._own, self._model = stored, averages, keys, own, model

    def full_tensor(self, name: str) -> Tensor:
        """A tensor in full."""
        own = self._own.get(name)
        if own is None:
            return self._stored.full_tensor(name)
        # the files may have other names than the model: the average goes the same way as its weight
        return dict(to_checkpoint_names(self._model, lambda: [(own, self._averages.full_tensor(self._keys[own]))])())[
            name
        ]


def take_averages(policy: CausalPolicy, checkpoint: Checkpoint, stored: BlockReader) -> TensorsWithEma:
    """Copy every average of the checkpoint into the policy; return the reader that replaces that of its weights.

    Raises:
        OptionsError: it has none, or some of tensors that the model does not have.
    """
    reader = checkpoint.blocks("optimizer")
    names = {key.removeprefix(f"{ema.KIND}/"): key for key in reader.table if key.startswith(f"{ema.KIND}/")}
    parameters = dict(policy.named_parameters())
    own = to_module_names(policy.model, ((name, parameters[name]) for name in names if name in parameters))
    # names are compared with both sides: a parameter of the model, and a tensor in the files
    unknown = sorted({name for name in names if name not in parameters} | (set(own) - set(stored.table)))
    if unknown or not names:
        raise _no_averages(checkpoint, unknown)
    with torch.no_grad():
        for name, key in names.items():
            parameters[name].copy_(reader.full_tensor(key))
    return TensorsWithEma(stored, reader, names, own, policy.model)


def _no_averages(checkpoint: Checkpoint, unknown: list[str]) -> OptionsError:
    unusable = (
        f"averages of {len(unknown)} tensors that its model does not have, the first {unknown[0]}" if unknown else ""
    )
    return OptionsError(
        code="export.no_averages",
        what=f"step {checkpoint.step} holds {unusable or 'no moving average of its weights'}",
        where=f"--ema, {checkpoint.path}",
        why="averages of whole weights are kept while a run trains with --enable_ema",
        do=f"rft-train export {checkpoint.path} DIR (the weights themselves), or train with --enable_ema",
    )


def averaged_evaluator(
    evaluator: Evaluator | None, averages: SwapInEma | None, refresh: Callable[[], None] | None, *, tells: bool
) -> EmaEvaluator | None:
    """The evaluation of the averages, where there are any and prompts are held out.

    `refresh` loads the policy's weights into the engine under the same version. None: other threads draw with the
    weights all the time, so EMA weights cannot be swapped in; logged where `tells`.
    """
    if evaluator is None or averages is None:
        return None
    if refresh is None:
        if tells:
            _LOG.info(
                "the moving averages are not evaluated: rollouts that run ahead (--max_staleness) are drawn meanwhile; "
                "rft-train export RUN DIR --ema, then rft-train eval --pretrain DIR"
            )
        return None
    return EmaEvaluator(evaluator, averages, refresh)


def has_adapters(checkpoint: Checkpoint) -> bool:
    """Return True when the checkpoint's run trained adapters."""
    return (checkpoint.model_directory / files.FOLDER).is_dir()


def export_averaged(checkpoint: Checkpoint, target: Path, dtype_name: str = "") -> list[str]:
    """A complete Hugging Face directory with the averaged adapters folded in, and below it they alone.

    `dtype_name`: the type that the folded weights are written in; empty = as they are.

    Raises:
        OptionsError: the checkpoint has no averages of its adapters.
        DataError: what was written computes something else.
    """
    policy = load_adapted(checkpoint.model_directory / files.FOLDER)
    _take_averages(policy, checkpoint)
    lines: list[str] = []

    def write(staging: Path) -> None:
        policy.save_pretrained(staging)
        apart = logprob_difference(policy, load_policy(staging, dtype=policy.dtype))
        # merged matrices are rounded to the type of the weights, which shows in narrow types
        limit = MERGED_LIMIT if policy.dtype is torch.float32 else 0.25
        # not `apart > limit`: NaN must be refused as well
        if not apart <= limit:
            raise differs(f"log-probabilities of a probe differ by {apart:.3g} (limit {limit:g})", staging)
        # only after the comparison, because this rounding is asked for
        if dtype_name:
            load_policy(staging, dtype=getattr(torch, dtype_name)).save_pretrained(staging)
        lines.append(f"compared    log-probabilities of a probe {apart:.2g} apart")

    whole_or_not_at_all(target, write)
    return [
        *lines,
        f"checkpoint  step {checkpoint.step}, {checkpoint.path}",
        f"written     {target}: the averaged adapters folded into {policy.where}",
    ]


@torch.no_grad()
def _take_averages(policy: CausalPolicy, checkpoint: Checkpoint) -> None:
    assert policy.adapters is not None
    reader = checkpoint.blocks("optimizer")
    names = {key.removeprefix(f"{ema.KIND}/"): key for key in reader.table if key.startswith(f"{ema.KIND}/")}
    parameters = dict(policy.adapters.named_parameters())
    if names.keys() != parameters.keys():
        raise OptionsError(
            code="export.no_averages",
            what=f"step {checkpoint.step} holds {len(names) or 'no'} moving averages of its {len(parameters)} adapters",
            where=f"--ema, {checkpoint.path}",
            why="averages of adapters are kept while a run trains with --enable_ema",
            do=f"rft-train export {checkpoint.path} DIR (the adapters themselves), or train with --enable_ema",
        )
    for name, key in names.items():
        parameters[name].copy_(reader.full_tensor(key))
