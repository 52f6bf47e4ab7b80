"""Step reports: the row of metrics, the sample rollouts, and the records for sinks."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, zip_longest
from statistics import fmean

from rft_core.exact_records import exact_bytes, exact_value
from rft_core.host_memory import resident_memory
from rft_trainer.metrics.compute_meter import device_memory
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.metrics.sink import Sink
from rft_trainer.protocols import Collectives
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.runs.checkpointing import Progress
from rft_trainer.runs.conversation_metrics import conversation_metrics, conversation_rows
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.image_entries import image_entries, keep_images
from rft_trainer.runs.reader import UNSCORED_KIND
from rft_trainer.scoring.samples import FilterResult, flat_rollouts, sample_name

_OWN_NAMES = (
    "mean",
    "min",
    "max",
    "groups_with_signal",
    "score_clipped",
    "overlong_penalty",
    "length_term",
    "inconsistent",
)
_OWN_PREFIXES = ("status_", "unscored")


def part_metric(name: str) -> str:
    """Return the metric of a part of the reward: reward/NAME, or reward/part_NAME where that is a metric of its own."""
    return f"reward/part_{name}" if name in _OWN_NAMES or name.startswith(_OWN_PREFIXES) else f"reward/{name}"


def rollout_metrics(groups: Sequence[RolloutGroup], kept: FilterResult) -> dict[str, object]:
    """Compute metrics over the rollouts of a step; shares are in [0, 1], lengths in tokens."""
    flat = [rollout for _, rollout in flat_rollouts(groups)]
    rewards = [rollout.reward for rollout in flat if rollout.reward is not None]
    lengths = [rollout.num_sampled for rollout in flat]
    # over all groups, also those that a filter leaves out: a share of what was sampled
    signal = [len({rollout.reward for rollout in group.rollouts}) > 1 for group in groups]
    metrics: dict[str, object] = {
        "reward/mean": fmean(rewards) if rewards else float("nan"),
        "reward/min": min(rewards, default=float("nan")),
        "reward/max": max(rewards, default=float("nan")),
        "reward/groups_with_signal": sum(signal) / len(signal),
        "completion/length_mean": fmean(lengths),
        "completion/length_max": max(lengths),
        "completion/distinct": len({rollout.response_text for rollout in flat}),
        "completion/truncated_share": sum(rollout.finish_reason == "length" for rollout in flat) / len(flat),
        "completion/empty_share": sum(_is_empty(rollout) for rollout in flat) / len(flat),
        "data/prompts": len(groups),
        "data/samples": len(flat),
        "data/epoch": groups[-1].epoch,
    }
    for name in sorted({name for rollout in flat for name in rollout.breakdown}):
        metrics[part_metric(name)] = fmean(r.breakdown[name] for r in flat if name in r.breakdown)
    metrics |= conversation_metrics(flat)
    missing = Counter(str(rollout.status) for rollout in flat if rollout.reward is None)
    metrics |= {f"reward/status_{status}": count / len(flat) for status, count in sorted(missing.items())}
    if missing:
        metrics["reward/unscored"] = sum(missing.values()) / len(flat)
    kinds = Counter(rollout.failure or str(rollout.status) for rollout in flat if rollout.reward is None)
    metrics |= {f"{UNSCORED_KIND}{kind}": count for kind, count in sorted(kinds.items())}
    return metrics | {f"drop/{reason}": count for reason, count in sorted(kept.reasons.items())}


def _is_empty(rollout: Rollout) -> bool:
    """Return whether the policy sampled nothing, or nothing but its end and white space."""
    return not rollout.num_sampled or not rollout.response_text.strip()


class Reporter:
    """Writer of rank 0: metrics and evaluations to every sink (the run directory first), rollouts to the directory."""

    def __init__(
        self,
        directory: RunDirectory,
        sinks: Sequence[Sink],
        collectives: Collectives,
        *,
        num_steps: int,
        rollout_every: int,
        rollouts_kept: int,
        seconds_before: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._sinks = sinks
        self._writes = collectives.rank == 0
        self._num_steps = num_steps
        self._rollout_every = rollout_every
        self._rollouts_kept = rollouts_kept
        self._clock = clock
        self._zero = clock() - seconds_before

    def step(
        self,
        metrics: Mapping[str, object],
        progress: Progress,
        timer: PhaseTimer,
        *,
        num_tokens: int,
        num_samples: int,
    ) -> None:
        """Write one metrics row; times stand apart under `time/`, because a resumed run may differ in nothing else."""
        # on every rank, since all of them save and restore these counters
        progress.tokens += num_tokens
        # on every rank too: a listener of the phases hears the end of each step
        times = timer.step(num_samples=num_samples, num_tokens=num_tokens)
        progress.seconds = self._clock() - self._zero
        if not self._writes:
            return
        record: dict[str, object] = {"step": progress.step, "num_steps": self._num_steps, **metrics}
        record |= {"data/tokens": progress.tokens, "policy/total_updates": progress.updates, **times}
        record["time/elapsed"] = progress.seconds
        record["time/left"] = progress.seconds / progress.step * (self._num_steps - progress.step)
        if (resident := resident_memory()) is not None:
            record["memory/rss_mib"] = resident / 2**20
        # ru_maxrss is in KiB on Linux
        record["memory/peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        record |= device_memory()
        for sink in self._sinks:
            sink.step(record)

    def rollouts(
        self, groups: Sequence[RolloutGroup], progress: Progress, advantages: Mapping[str, float] | None = None
    ) -> None:
        """Write some complete groups of the step as readable rows; a run goes on without them.

        `advantages` are those of the samples that were trained on, by their names.

        Those of the first step too, so that a mistake in prompts or reward is seen at once, and in a short run at all.
        """
        if self._writes and rollouts_due(progress.step, self._rollout_every):
            rows = rollout_rows(groups, self._rollouts_kept, advantages)
            prompts, folder = [group.prompt for group in groups], self._directory.rollouts_directory
            with self._directory.optional.tried("rollouts/", len(rows)):
                self._directory.write_rollouts(progress.step, keep_images(rows, prompts, folder, self._rollouts_kept))
            for sink in self._sinks:
                sink.samples(progress.step, rows)

    def evaluation(self, name: str, measured: Mapping[str, object], progress: Progress, **lists: object) -> None:
        """Write one row of `evals.jsonl`; `lists` hold a number a prompt, so that two evaluations can be paired."""
        progress.seconds = self._clock() - self._zero
        if not self._writes:
            return
        record: dict[str, object] = {"step": progress.step, "name": name, **measured}
        record["time/elapsed"] = progress.seconds
        for sink in self._sinks:
            sink.evaluation({**record, **lists})


def rollout_rows(
    groups: Sequence[RolloutGroup], limit: int, advantages: Mapping[str, float] | None = None
) -> list[dict[str, object]]:
    """Return rollouts as rows, complete groups spread over the step, at most `limit` rows.

    With `advantages` by the names of samples every row has the one of its own, null where it was not trained on.
    """
    # whole groups: rewards say something only beside the others of their group
    chosen = evenly_chosen(groups, limit)
    rows: list[dict[str, object]] = []
    for group, rollout in flat_rollouts(chosen)[:limit]:
        more = {} if advantages is None else {"advantage": advantages.get(sample_name(group, rollout))}
        rows.append(rollout_row(group.prompt, rollout) | more)
    return rows


def gather_rows(
    collectives: Collectives, rows_by_prompt: Sequence[Sequence[Mapping[str, object]]]
) -> list[dict[str, object]]:
    """Return the rows of all ranks in the order of the data; every rank calls it.

    Args:
        rows_by_prompt: of this rank, which answered every n-th prompt of n ranks, from its own number on.
    """
    parts = [exact_value(part) for part in collectives.gather_bytes(exact_bytes(rows_by_prompt))]
    # prompt i is number i // n of rank i % n, so one prompt of each rank in turn gives the data's order back
    return [row for prompts in zip_longest(*parts, fillvalue=()) for rows in prompts for row in rows]


def rollout_row(prompt: Prompt, rollout: Rollout) -> dict[str, object]:
    """Return prompt, response and reward of one rollout as a row."""
    return {
        "prompt_id": prompt.prompt_id,
        "sample": rollout.sample_index,
        "prompt": prompt.text,
        "response": rollout.response_text,
        "label": prompt.label,
        "reward": rollout.reward,
        "status": str(rollout.status),
        "breakdown": dict(rollout.breakdown),
        "finish_reason": rollout.finish_reason,
        "num_tokens": rollout.num_sampled,
        "mean_logprob": sum(rollout.behaviour_logprobs) / rollout.num_sampled if rollout.num_sampled else None,
        **({"failure": rollout.failure or str(rollout.status)} if rollout.reward is None else {}),
        **({"detail": rollout.detail} if rollout.detail else {}),
        **conversation_rows(rollout),
        **image_entries(prompt),
    }


def rollouts_due(step: int, every: int) -> bool:
    """Return whether the rollouts of a step are kept: of the first and of each `every`-th; 0 = of none."""
    return bool(every) and (step == 1 or step % every == 0)


def evenly_chosen(groups: Sequence[RolloutGroup], limit: int) -> list[RolloutGroup]:
    """Return whole groups spread over the step: as few as have `limit` rollouts."""
    if not groups:
        return []
    size = max(len(group.rollouts) for group in groups)
    wanted = max(1, min(len(groups), -(-limit // size)))
    # spread over the step: its first groups are of the first rollout alone
    bounds = [round(i * len(groups) / wanted) for i in range(wanted + 1)]
    return [groups[start] for start, _ in pairwise(bounds)]
