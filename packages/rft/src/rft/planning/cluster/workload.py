"""The work of one step: rollouts, log-probabilities and updates, read from the settings of a command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rft.planning.cluster.equations import forward_flops, training_flops
from rft.resolved import Resolved
from rft_core.errors import OptionsError
from rft_dist.planning.memory_estimate import DecoderSizes

_DIVIDED = {
    "sp_size": "sequences that are divided over ranks are not counted",
    "ep_size": "the exchanges of experts are not counted",
}
_NOT_COUNTED = {
    "lora_rank": "gradients and moments of adapters alone travel and stay",
    "adam_offload": "the copies to the host at every step are not counted",
    "fsdp_cpu_offload": "the copies to the host at every layer are not counted",
}
"""Settings that the equations leave out, and why they would be wrong beside them."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """One rollout and what is done with it."""

    num_prompts: int
    samples_a_prompt: int
    prompt_tokens: int
    response_tokens: int
    """Of every response: the longest that the settings allow."""
    updates: int
    """Optimizer steps on one rollout."""
    forwards: int
    """Passes for log-probabilities: of the policy before the update, and of a reference."""
    epochs: int
    """Passes of forward and backward over the samples."""
    micro_tokens: int
    """Tokens of one forward and backward pass, at most; 0 = counted by samples."""
    micro_samples: int
    recomputes: bool
    engine_rows: int
    """Sequences that an engine decodes at once, at most."""
    rounds_engine: bool
    """Whether the engine's matrices have 8 bits."""

    @property
    def num_samples(self) -> int:
        """Return the samples of a rollout."""
        return self.num_prompts * self.samples_a_prompt

    @property
    def sample_tokens(self) -> int:
        """Return the tokens of a sample, n."""
        return self.prompt_tokens + self.response_tokens

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all samples."""
        return self.num_samples * self.sample_tokens

    def forward_flops(self, sizes: DecoderSizes) -> float:
        """Operations of the passes for log-probabilities, of all samples."""
        return self.num_samples * self.forwards * forward_flops(sizes, self.sample_tokens)

    def training_flops(self, sizes: DecoderSizes) -> float:
        """Operations of the updates, of all samples."""
        passes = self.num_samples * self.epochs
        return passes * training_flops(sizes, self.sample_tokens, recomputes=self.recomputes)

    def micro_batches(self, samples: int) -> int:
        """Return the passes in which a rank takes so many samples."""
        if not samples:
            return 0
        if self.micro_tokens:
            return -(-samples * self.sample_tokens // max(self.micro_tokens, self.sample_tokens))
        return -(-samples // self.micro_samples)


def step_shape(resolved: Resolved[Any]) -> StepShape:
    """Read the work of a step from the settings of `rl`.

    Raises:
        OptionsError: a command without rollouts, or a setting that the equations do not count.
    """
    values = resolved.values
    if "rollout_batch_size" not in values:
        raise beside_cluster(
            resolved.command, "a step is one of rollouts and updates", "rft-train plan rl --cluster 64xH100"
        )
    for name, why in _DIVIDED.items():
        if values[name] > 1:
            raise beside_cluster(f"{name} = {values[name]}", why, f"leave {name} out")
    for name, why in _NOT_COUNTED.items():
        if values.get(name):
            raise beside_cluster(name, why, f"leave {name} out")
    from rft.build.algorithm import algorithm_record

    record = algorithm_record(resolved.settings)
    samples = values["rollout_batch_size"] * values["n_samples_per_prompt"]
    return StepShape(
        num_prompts=values["rollout_batch_size"],
        samples_a_prompt=values["n_samples_per_prompt"],
        prompt_tokens=values["prompt_max_len"],
        response_tokens=_longest(values) - values["prompt_max_len"],
        updates=values["max_epochs"] * -(-samples // values["train_batch_size"]),
        forwards=int(record.needs_old_logprobs) + int(record.needs_reference),
        epochs=values["max_epochs"],
        micro_tokens=_micro_tokens(values),
        micro_samples=values["micro_train_batch_size"],
        recomputes=bool(values["gradient_checkpointing"]) and values["gradient_checkpointing_mode"] == "full",
        engine_rows=values["engine_max_rows"],
        rounds_engine=bool(values["engine_fp8"]),
    )


def _longest(values: Mapping[str, Any]) -> int:
    allowed = values["prompt_max_len"] + values["generate_max_len"]
    return max(min(allowed, values["max_len"] or allowed), values["prompt_max_len"] + 1)


def _micro_tokens(values: Mapping[str, Any]) -> int:
    return int(values["max_tokens_per_micro_batch"]) if values.get("packing_samples") else 0


def beside_cluster(what: str, why: str, do: str = "rft-train plan --help") -> OptionsError:
    """Return the refusal of a setting with which a cluster cannot be planned."""
    what = f"--cluster beside {what}"
    return OptionsError(code="plan.cluster_setting", what=what, where="command line", why=why, do=do)
