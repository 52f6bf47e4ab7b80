"""Workload of a command on a rank beside the training of one model, as the plan of a run needs it.

A command of another package implements `Workload`, or takes one that is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rft.resolved import Resolved
from rft.reward_names import memory_notes
from rft_dist.planning.parallel_dims import BatchShare, ParallelDims
from rft_engine.registry import engine_kind

if TYPE_CHECKING:  # it imports torch
    from rft.planning.traced.stages import TracedStage


@dataclass(frozen=True, slots=True)
class RolloutShare:
    """A rank's share of one rollout."""

    num_prompts: int
    """Of all ranks."""
    prompts_a_rank: int
    samples_a_prompt: int
    samples_a_rank: int
    num_forwards: int
    """In which the samples are scored."""
    rows_a_forward: int


@dataclass(frozen=True, slots=True)
class ExtraMemory:
    """Models and caches that a rank has beside the model that it trains."""

    reference: bool = False
    """A second, frozen model of the same size."""
    critic: bool = False
    """A second, trained model of the same size."""
    cache_rows: int = 0
    """Rows of the key/value cache of an engine in this process."""
    notes: list[str] = field(default_factory=list[str])


class Workload(Protocol):
    """Load of a rank under a command."""

    def extra_memory(self, resolved: Resolved[Any], grid: ParallelDims) -> ExtraMemory:
        """Return the models and caches beside the model that is trained."""
        ...

    def rollout(self, resolved: Resolved[Any], grid: ParallelDims) -> RolloutShare | None:
        """Return a rank's share of a rollout; None where nothing is generated. Refuses what the start refuses."""
        ...

    def longest_sample(self, values: Mapping[str, Any], positions: int | None) -> int:
        """Return the tokens of the longest sample that the settings allow, in a model of so many positions."""
        ...

    def samples_a_unit(self, settings: Any) -> int:
        """Return the samples that are never divided: 2 of a stage of pairs."""
        ...

    @property
    def has_token_head(self) -> bool:
        """Return whether the model has an output matrix."""
        ...

    def traced_stage(self) -> TracedStage | None:
        """Return the stage as a step of it is traced; None = its memory is bounded by formula. Imports torch."""
        ...

    def row_limit(self, settings: Any, positions: int | None) -> tuple[int, str]:
        """Return the tokens that a row of the data may have before training, and the flag that says so."""
        ...

    def require_image_support(self, settings: Any) -> None:
        """Raise `OptionsError` where rows have images and a part of the run cannot see them."""
        ...


class RlWorkload:
    """Rollouts, a reference and a critic where the algorithm needs them, and an engine in this process."""

    def extra_memory(self, resolved: Resolved[Any], grid: ParallelDims) -> ExtraMemory:
        """Return the models that the algorithm needs, and the rows that an engine of this process decodes at once."""
        from rft.build.algorithm import algorithm_record

        values, record = resolved.values, algorithm_record(resolved.settings)
        notes = memory_notes(values)
        prompts = -(-values["rollout_batch_size"] // grid.dp_size)
        rows = min(values["engine_max_rows"], prompts * values["n_samples_per_prompt"])
        if engine_kind(values["engine_type"]).can.reserves_memory:
            rows = 0
        return ExtraMemory(record.needs_reference, record.advantage.needs_values, rows, notes)

    def rollout(self, resolved: Resolved[Any], grid: ParallelDims) -> RolloutShare:
        """Return a rollout's distribution by prompts; refuses batches that the start refuses."""
        from rft.build.algorithm import algorithm_record
        from rft_trainer.batches.batch_plan import BatchSizes, plan_batches

        values = resolved.values
        names = ("rollout_batch_size", "n_samples_per_prompt", "train_batch_size", "micro_train_batch_size")
        names += ("micro_rollout_batch_size", "max_epochs", "num_episodes")
        groups = algorithm_record(resolved.settings).advantage.compares_groups
        numbers = {name: int(values[name]) for name in names}
        sizes = BatchSizes(**numbers, world_size=grid.dp_size, group_estimator=groups)
        # for its refusals alone; the rows are not counted here, and one rollout of prompts stands for them
        plan_batches(values["rollout_batch_size"], sizes)
        prompts = BatchShare("rollout_batch_size", values["rollout_batch_size"], values["rollout_batch_size"])
        share, _ = prompts.of(grid.world_size)  # every rank generates, also those that train on the same samples
        scored = -(-values["rollout_batch_size"] * values["n_samples_per_prompt"] // grid.dp_size)
        return RolloutShare(
            num_prompts=values["rollout_batch_size"],
            prompts_a_rank=share,
            samples_a_prompt=values["n_samples_per_prompt"],
            samples_a_rank=share * values["n_samples_per_prompt"],
            num_forwards=-(-scored // values["micro_rollout_batch_size"]),
            rows_a_forward=values["micro_rollout_batch_size"],
        )

    def longest_sample(self, values: Mapping[str, Any], positions: int | None) -> int:
        """Return the longest prompt with the longest response, within max_len."""
        allowed = values["prompt_max_len"] + values["generate_max_len"]
        return min(allowed, values["max_len"]) if values["max_len"] else allowed

    has_token_head = True

    def samples_a_unit(self, settings: Any) -> int:
        """Return 1: every response is trained on by itself."""
        return 1

    def traced_stage(self) -> TracedStage:
        """Return the stage of rollouts."""
        from rft.planning.traced import stages

        return stages.RL

    def row_limit(self, settings: Any, positions: int | None) -> tuple[int, str]:
        """Return the limit of a prompt."""
        return settings.sampling.prompt_max_len, "--prompt_max_len"

    def require_image_support(self, settings: Any) -> None:
        """Refuse a reward that reads no images."""
        from rft.build.reward_parts import require_image_rewards

        require_image_rewards(settings)


class RmWorkload:
    """One model, and pairs of texts that are run together."""

    def extra_memory(self, resolved: Resolved[Any], grid: ParallelDims) -> ExtraMemory:
        """Return none: there is the model alone."""
        return ExtraMemory()

    def rollout(self, resolved: Resolved[Any], grid: ParallelDims) -> None:
        """Return None: nothing is generated."""

    has_token_head = False

    def longest_sample(self, values: Mapping[str, Any], positions: int | None) -> int:
        """Return max_len, or else the positions of the model."""
        return values["max_len"] or positions or 0

    def samples_a_unit(self, settings: Any) -> int:
        """Return 2: the texts of a pair are never divided."""
        return 2

    def traced_stage(self) -> TracedStage:
        """Return the stage of pairs of texts."""
        from rft.planning.traced import stages

        return stages.RM

    def row_limit(self, settings: Any, positions: int | None) -> tuple[int, str]:
        """Return the limit of a text."""
        return settings.training.max_len or positions or 1 << 31, "--max_len"

    def require_image_support(self, settings: Any) -> None:
        """Accept: nothing but the model sees the images."""


class SftWorkload:
    """One model, and rows of prompt and response."""

    def extra_memory(self, resolved: Resolved[Any], grid: ParallelDims) -> ExtraMemory:
        """Return none: there is the model alone."""
        return ExtraMemory()

    def rollout(self, resolved: Resolved[Any], grid: ParallelDims) -> None:
        """Return None: nothing is generated."""

    def longest_sample(self, values: Mapping[str, Any], positions: int | None) -> int:
        """Return max_len, or else the positions of the model."""
        return values["max_len"] or positions or 0

    has_token_head = True

    def samples_a_unit(self, settings: Any) -> int:
        """Return 1: a row is trained on by itself."""
        return 1

    def traced_stage(self) -> TracedStage:
        """Return the stage of rows."""
        from rft.planning.traced import stages

        return stages.SFT

    def row_limit(self, settings: Any, positions: int | None) -> tuple[int, str]:
        """Return the limit of a whole row."""
        return settings.training.max_len or positions or 1 << 31, "--max_len"

    def require_image_support(self, settings: Any) -> None:
        """Accept: nothing but the model sees the images."""


class DpoWorkload(SftWorkload):
    """One model, and pairs of responses or labelled ones."""

    def samples_a_unit(self, settings: Any) -> int:
        """Return 2 for a loss of pairs, which are never divided, 1 for one of labelled responses."""
        return 1 if settings.loss.loss_type == "kto" else 2

    def traced_stage(self) -> TracedStage:
        """Return the stage of preferences."""
        from rft.planning.traced import stages

        return stages.DPO


DPO: Workload = DpoWorkload()
RL: Workload = RlWorkload()
RM: Workload = RmWorkload()
SFT: Workload = SftWorkload()
