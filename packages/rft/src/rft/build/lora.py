"""LoRA from settings: the base weights' directory, the adapters' initial values, and a preview of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rft.checkpoints.writer import ResumePoint
from rft_core.errors import CheckpointError, DataError
from rft_models.backbone.packed_model import PackedModel
from rft_models.critic.causal_critic import CausalCritic
from rft_models.lora import files
from rft_models.lora.adapters import AdapterRules, preview
from rft_models.policy.adaptation import add_adapters
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.settings import AdapterSettings, LoraSettings


def rules_of(settings: LoraSettings) -> AdapterRules | None:
    """Return the adapters' rules; None = no adapters."""
    return AdapterRules.of(
        settings.lora_rank, settings.lora_alpha, settings.dropout, settings.target_modules, settings.lora_type
    )


def weights_directory(settings: LoraSettings, pretrain: str | Path, restored: ResumePoint | None) -> str | Path:
    """Return the directory that a policy is loaded from; with adapters always that of the base weights, also on resume.

    Raises:
        CheckpointError: the checkpoint to continue from holds no adapters.
    """
    if restored is None:
        return pretrain
    if not settings.lora_rank:
        return restored.model_directory
    # not the checkpoint's own weights: adapters are merged into them, and would be counted twice
    try:
        return files.base_directory(_folder(restored))
    except DataError:
        return pretrain  # it was moved; the fingerprint says whether this is it


def adapt(
    policy: PackedModel,
    settings: LoraSettings,
    restored: ResumePoint | None,
    *,
    base: str | Path,
    seed: int,
) -> None:
    """Put adapters into a loaded policy, with the values of the checkpoint where there is one; or nothing.

    `base` is the directory that the policy's weights came from.
    """
    rules = rules_of(settings)
    if rules is None:
        return
    adapters = add_adapters(policy, rules, seed=seed, base=base)
    if restored is not None:
        files.load(adapters, _folder(restored))
        if policy.pending_weights is None:  # else when its blocks have been read
            policy.verify()


def adapt_critic(critic: CausalCritic, settings: AdapterSettings, *, seed: int) -> None:
    """Put adapters into a critic, whose head is trained in full; a checkpoint holds all of its tensors."""
    rules = rules_of(settings)
    if rules is not None:
        add_adapters(critic, rules, seed=seed)


def counting(policy: CausalPolicy, schedule: Callable[[int], float]) -> Callable[[int], float]:
    """Return the learning rate of each step; its call at the start of a step also begins the step's dropout masks."""
    if not policy.has_masks:
        return schedule

    def rate(update: int) -> float:
        policy.begin_update(update)
        return schedule(update)

    return rate


def _folder(restored: ResumePoint) -> Path:
    folder = restored.model_directory / files.FOLDER
    if folder.is_dir():
        return folder
    raise CheckpointError(
        code="adapters.none_saved",
        what=f"the checkpoint of step {restored.step} holds no adapters",
        where=str(restored.model_directory),
        why="its run trained all weights, or weights other than those that --lora_rank asks for",
        state="nothing was changed",
        do="leave --lora_rank out, or start from its weights: --ckpt_weights_only in place of --load_checkpoint",
    )


def preview_adapters(
    settings: LoraSettings, pretrain: str, part_of: Callable[[Any], Any] = lambda model: model
) -> list[str]:
    """Return the adapters' number, kind and layers in lines, from the configuration alone; empty without adapters.

    `part_of` gives the part of the causal language model that is trained.

    Raises:
        OptionsError: a target module that no linear layer has.
    """
    rules = rules_of(settings)
    return [] if rules is None else preview(pretrain, rules, part_of)
