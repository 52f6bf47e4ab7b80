"""Recorder of a step's tokens: log-probs of engine and trainer, entropy and advantage, beside the readable rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from rft_core.durable_files import remove_file
from rft_trainer.records.rollouts import Rollout, RolloutGroup, TrainingSample
from rft_trainer.rollout_files.token_records import TokenRecord, token_file, token_files, write_token_records
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.step_report import evenly_chosen
from rft_trainer.scoring.samples import flat_rollouts, sample_name

Numbers = tuple[float, ...]


class EntropyScorer(Protocol):
    """Scorer of responses under the policy, over all ranks."""

    def with_entropies(self, groups: Sequence[RolloutGroup]) -> tuple[list[Numbers], list[Numbers]]:
        """Return log-probs and entropies, one tuple a rollout, one number a token behind the prompt."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLimits:
    """Steps and responses that are recorded, and how many bytes of them are kept."""

    is_due: Callable[[int], bool]
    """Whether a step of this number, counted from 1, is recorded."""
    num_responses: int | None
    """Of a step, in whole groups; None = all."""
    max_bytes: int
    """Of all files together: beyond it the oldest are removed."""


@dataclass(slots=True)
class _Scored:
    """The responses of the step that is recorded, and what its forward gave."""

    step: int
    groups: list[RolloutGroup]
    logprobs: dict[str, Numbers] = field(default_factory=dict[str, Numbers])
    entropies: dict[str, Numbers] = field(default_factory=dict[str, Numbers])
    samples: dict[str, TrainingSample] = field(default_factory=dict[str, TrainingSample])


class TokenRecorder:
    """Recorder of the steps that are due; `score` and `credit` on every rank, in this order, then `write`.

    The forward of `score` is one more than the algorithm needs: of the responses that are recorded, without gradient.
    """

    def __init__(self, directory: RunDirectory, scorer: EntropyScorer, limits: RecordLimits, *, writes: bool) -> None:
        """Store the collaborators; `writes` holds on one rank alone."""
        self._directory, self._scorer, self._limits, self._writes = directory, scorer, limits, writes
        self._scored: _Scored | None = None

    def score(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Score the step's responses under the weights that it begins with, where it is due."""
        self._scored = None
        if not self._limits.is_due(step):
            return
        most = self._limits.num_responses
        scored = _Scored(step, list(groups) if most is None else evenly_chosen(groups, most))
        # a conversation that failed before its first token has nothing to score
        drawn = [replace(one, rollouts=tuple(r for r in one.rollouts if r.completion_ids)) for one in scored.groups]
        drawn = [group for group in drawn if group.rollouts]
        names = [sample_name(*one) for one in flat_rollouts(drawn)]
        if names:
            logprobs, entropies = self._scorer.with_entropies(drawn)
            scored.logprobs = dict(zip(names, logprobs, strict=True))
            scored.entropies = dict(zip(names, entropies, strict=True))
        self._scored = scored

    def credit(self, samples: Sequence[TrainingSample]) -> None:
        """Take the samples of the step, which have its advantages."""
        if self._scored is not None:
            self._scored.samples = {sample.sample_id: sample for sample in samples}

    def write(self) -> None:
        """Write the records of the step; the run goes on without them where the disk refuses."""
        scored, self._scored = self._scored, None
        if scored is None or not self._writes:
            return
        folder = self._directory.rollouts_directory
        records = [_record(group, rollout, scored) for group, rollout in flat_rollouts(scored.groups)]
        with self._directory.optional.tried("rollouts/tokens", len(records)):
            write_token_records(token_file(folder, scored.step), records)
            _remove_oldest(folder, self._limits.max_bytes)


def _remove_oldest(folder: Path, max_bytes: int) -> None:
    files = list(token_files(folder).values())
    total = sum(file.stat().st_size for file in files)
    # the newest stays, whatever its size: it is what a person asks for
    for file in files[:-1]:
        if total <= max_bytes:
            return
        total -= file.stat().st_size
        remove_file(file)


def _record(group: RolloutGroup, rollout: Rollout, scored: _Scored) -> TokenRecord:
    name, length = sample_name(group, rollout), len(rollout.completion_ids)
    found = _found(scored.logprobs, name, length), _found(scored.entropies, name, length)
    return token_record(group, rollout, scored.samples.get(name), *found)


def token_record(
    group: RolloutGroup,
    rollout: Rollout,
    sample: TrainingSample | None,
    logprobs: Numbers | None,
    entropies: Numbers | None,
) -> TokenRecord:
    """Return the record of a response, with the trainer's log-probs and entropies of its tokens, in nats.

    `sample` is what the step trained on, None where the response was left out.
    """
    length = len(rollout.completion_ids)
    return TokenRecord(
        prompt_id=rollout.prompt_id,
        sample=rollout.sample_index,
        prompt_ids=group.prompt.token_ids,
        token_ids=rollout.completion_ids,
        mask=rollout.loss_mask or (True,) * length,
        versions=_versions(rollout),
        engine_logprobs=rollout.behaviour_logprobs,
        trainer_logprobs=logprobs,
        entropies=entropies,
        reference_logprobs=(sample.reference_logprobs or None) if sample else None,
        advantages=(sample.token_advantages or (sample.advantage,) * length) if sample else None,
        reward=rollout.reward,
        status=str(rollout.status),
        finish_reason=rollout.finish_reason,
    )


def _found(rows: Mapping[str, Numbers], name: str, length: int) -> Numbers | None:
    return rows.get(name, None if length else ())


def _versions(rollout: Rollout) -> tuple[int, ...]:
    """Return the version of each token; tokens of an observation have that of the sampled ones before them."""
    length = len(rollout.completion_ids)
    # nearly all responses, of which a step may have millions of tokens
    if not rollout.version_spans and not rollout.turns:
        return (rollout.weight_version,) * length
    spans = rollout.version_spans or ((rollout.weight_version, rollout.num_sampled),)
    drawn = [version for version, count in spans for _ in range(count)]
    if not rollout.loss_mask:
        return tuple(drawn) if len(drawn) == length else (rollout.weight_version,) * length
    versions: list[int] = []
    rest = iter(drawn)
    newest = rollout.weight_version
    for sampled in rollout.loss_mask:
        newest = next(rest, newest) if sampled else newest
        versions.append(newest)
    return tuple(versions)
