"""Held-out evaluation: greedy answers (by default), one or several a prompt, scored by the same reward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, astuple, dataclass, field, replace
from statistics import fmean
from typing import Any, Protocol

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.statistics import Interval, mean_interval, share_interval
from rft_core.errors import OptionsError, OutageError
from rft_core.exact_records import exact_bytes, exact_value
from rft_core.keyed_random import derive_key
from rft_trainer.evaluation.sampled_metrics import ScoredSample, by_prompt, default_ks, hits_at_k
from rft_trainer.evaluation.task_metrics import TaskMetrics
from rft_trainer.protocols import Collectives, Engine, ResponseDecoder
from rft_trainer.records.rollouts import Prompt, Rollout
from rft_trainer.records.turns import TurnCounts, total, turn_counts
from rft_trainer.rollouts.collector import RewardFunction, sample_responses, score_rollouts
from rft_trainer.rollouts.multi_turn import Conversations
from rft_trainer.scoring.advantages import is_correct
from rft_trainer.update.nonfinite_checks import refuse_non_finite_shares

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Result of one evaluation: one number a prompt, in their order; unscored prompts are in no mean.

    `correct` is whether the reward's "correctness" component is 1 where it has one, else
    whether the reward is 1. Of several samples a prompt has the mean reward and the share of correct ones, over the
    samples that have a reward.
    """

    rewards: tuple[float | None, ...]
    correct: tuple[float | None, ...]
    """True or False of a single response, a share of several."""
    num_truncated: int
    mean_tokens: float
    turns: TurnCounts = field(default_factory=TurnCounts)
    """Turns and tool calls of all conversations; none without an environment."""
    why_unscored: str = ""
    """The first response without a reward, and why it has none; empty where every one has a reward."""
    task_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of installed tasks by name."""
    num_samples: int = 1
    """Responses to each prompt."""
    num_unscored: int = 0
    """Responses without a reward."""
    by_prompt: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict[str, tuple[float | None, ...]])
    """pass@k, maj@k, best@k and picked@k of several samples by name, a number a prompt; None where too few have a
    reward."""

    sources: tuple[str, ...] = ()
    """The set of each prompt, where there are several."""

    @property
    def at_k(self) -> dict[str, float]:
        """Means of pass@k, maj@k, best@k and picked@k over the prompts that have them."""
        return {name: fmean(known) for name, values in self.by_prompt.items() if (known := _known(values))}

    @property
    def num_scored(self) -> int:
        """Number of prompts that have a reward."""
        return sum(reward is not None for reward in self.rewards)

    @property
    def mean_reward(self) -> float:
        """Mean over the scored prompts; nan when there is none."""
        scored = [reward for reward in self.rewards if reward is not None]
        return sum(scored) / len(scored) if scored else float("nan")

    @property
    def accuracy(self) -> float:
        """Share of the scored prompts that are right; nan when there is none."""
        scored = [correct for correct in self.correct if correct is not None]
        return sum(scored) / len(scored) if scored else float("nan")

    def by_source(self) -> dict[str, EvaluationResult]:
        """Return rewards, correctness and pass@k of each set, where there are several; tokens are not counted."""
        found: dict[str, EvaluationResult] = {}
        for source in dict.fromkeys(self.sources):
            own = [index for index, name in enumerate(self.sources) if name == source]
            found[source] = EvaluationResult(
                rewards=tuple(self.rewards[index] for index in own),
                correct=tuple(self.correct[index] for index in own),
                num_truncated=0,
                mean_tokens=float("nan"),
                num_samples=self.num_samples,
                by_prompt={name: tuple(values[index] for index in own) for name, values in self.by_prompt.items()},
            )
        return found

    def intervals(self) -> dict[str, Interval]:
        """Return the 95 % intervals of accuracy, reward, pass@k and the like, over the prompts.

        Samples of one prompt are alike: the prompts are what was drawn independently.
        """
        values: dict[str, Sequence[float | None]] = {"accuracy": self.correct, "reward": self.rewards, **self.by_prompt}
        found: dict[str, Interval] = {}
        for name, numbers in values.items():
            if known := _known(numbers):
                is_reward = name == "reward" or name.startswith("best@")
                found[name] = mean_interval(known) if is_reward else share_interval(known)
        return found

    def as_record(self) -> dict[str, object]:
        """Return the metrics as a row of `evals.jsonl`."""
        several = {"eval/samples": self.num_samples} if self.num_samples > 1 else {}
        return {
            "eval/accuracy": self.accuracy,
            "eval/reward": self.mean_reward,
            "eval/n": len(self.rewards),
            **several,
            "eval/unscored": self.num_unscored,
            "eval/truncated": self.num_truncated,
            "eval/mean_tokens": self.mean_tokens,
            **{f"eval/{name}": value for name, value in self.at_k.items()},
            **{f"eval/{name}": value for name, value in self.turns.shares().items()},
            **{f"eval/{name}": value for name, value in self.task_metrics.items()},
            **{
                f"eval/{source}/{name}": value
                for source, one in self.by_source().items()
                for name, value in one.means()
            },
        }

    def means(self) -> list[tuple[str, float]]:
        """Return accuracy, reward, the number of prompts, and pass@k and the like, by name."""
        return [
            ("accuracy", self.accuracy),
            ("reward", self.mean_reward),
            ("n", len(self.rewards)),
            *self.at_k.items(),
        ]


WHOLE_REWARD = "reward"
"""Name of what picks where it is the reward itself and none of its parts."""

Rows = list[list[Any]]
"""What is kept of each response to a prompt, in the order of the samples."""


Readable = Callable[[Prompt, Rollout], Mapping[str, Any]]
"""Returns a response as a row of JSON for people."""


class Journal(Protocol):
    """Keeper of what was answered already, so that an evaluation that was killed goes on from there."""

    @property
    def prompts_at_once(self) -> int:
        """Prompts that a rank answers before all of them are kept."""
        ...

    def done(self) -> Mapping[int, Rows]:
        """Return the rows of prompts that were answered, by the number of the prompt; called on the first rank."""
        ...

    def keep(self, rows: Mapping[int, Rows]) -> None:
        """Keep the rows of more prompts; called on the first rank."""
        ...


@dataclass(slots=True)
class Evaluator:
    """Evaluator on all held-out prompts; ranks share the work and all get the full result."""

    engine: Engine
    decoder: ResponseDecoder
    reward: RewardFunction
    collectives: Collectives
    prompts: Sequence[Prompt]
    """The held-out prompts, in order."""
    _: KW_ONLY
    sampling: SamplingOptions
    seed: int = 0
    conversations: Conversations | None = None
    metrics: TaskMetrics | None = None
    """What installed tasks compute of the answers."""
    num_samples: int = 1
    """Responses sampled for each prompt."""
    ks: tuple[int, ...] | None = None
    """Values of k of pass@k, maj@k and best@k; None = 1, 2, 4, ... and `num_samples`."""
    answer_of: Callable[[str], str | None] = str.strip
    """Reads the answer of a response, the vote of maj@k; None where it has none."""
    pick: str = ""
    """Part of the reward, or `WHOLE_REWARD`, whose highest value picks one of k responses, for picked@k; empty =
    none."""
    ranked: bool = False
    """The responses to a prompt are its best ones, best first, and no draws: hit@k takes the place of pass@k."""
    first_answers: bool = False
    """Of ranked responses the first alone is the answer, whose reward, correctness and task metrics count; the others
    count in hit@k."""
    keys: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        # by index alone: every evaluation of a run asks with the same keys, and can be paired with the others
        self.keys = [_keys(self.seed, index, self.num_samples) for index in range(len(self.prompts))]

    def __call__(self) -> EvaluationResult:
        """Evaluate all prompts and return the result.

        Raises:
            OutageError: the reward server of a rank is away, on all ranks.
            DataError: the metrics of a task are none.
            OptionsError: no response has the part of the reward that picks.
        """
        return self._result(self._rows({}, None, None))

    def with_rows(
        self, readable: Readable, journal: Journal | None = None
    ) -> tuple[EvaluationResult, list[list[dict[str, Any]]]]:
        """Evaluate all prompts; return the result, and `readable` rows of the responses to each prompt, on every rank.

        `journal` keeps what is answered, and what it has is not answered again.
        """
        done = {} if journal is None else self._shared(journal)
        rows = self._rows(done, journal, readable)
        return self._result(rows), [[row[_READABLE] for row in group] for group in rows]

    def _shared(self, journal: Journal) -> dict[int, Rows]:
        """Return what the first rank has kept, on every rank."""
        done = journal.done() if self.collectives.rank == 0 else {}
        if self.collectives.world_size > 1:
            done = exact_value(self.collectives.gather_bytes(exact_bytes(done))[0])
        return {int(index): rows for index, rows in done.items()}

    def _rows(self, done: Mapping[int, Rows], journal: Journal | None, readable: Readable | None) -> list[Rows]:
        """Answer the prompts that are left, each rank its share; return the rows of all prompts in their order."""
        rank, world_size = self.collectives.rank, self.collectives.world_size
        left = [index for index in range(len(self.prompts)) if index not in done]
        found = dict(done)
        at_once = (journal.prompts_at_once if journal else max(1, len(left))) * world_size
        # at least once, also without prompts: every rank takes part in the exchanges of every turn
        for start in range(0, max(1, len(left)), at_once):
            now = left[start : start + at_once]
            rows = self._answered(now[rank::world_size], readable)
            if world_size > 1:
                parts = [exact_value(part) for part in self.collectives.gather_bytes(exact_bytes(rows))]
                for part in parts:
                    if isinstance(part, dict):
                        raise OutageError(**part)
                # back to the order of the prompts, which were dealt out in turn
                rows = [parts[i % world_size][i // world_size] for i in range(len(now))]
            fresh = dict(zip(now, rows, strict=True))
            if journal is not None and rank == 0:
                journal.keep(fresh)
            found |= fresh
        return [found[index] for index in range(len(self.prompts))]

    def _answered(self, indices: Sequence[int], readable: Readable | None) -> list[Rows]:
        """Answer prompts of this rank and score the responses."""
        # keys go with the prompts: which rank answers one changes none of its tokens
        prompts = [self.prompts[index] for index in indices]
        sampled = self._draw(prompts, [self.keys[index] for index in indices])
        # before the rewards: a model with NaN in its weights still answers, and would look like a poor one
        back = "go back to an earlier checkpoint of the run"
        refuse_non_finite_shares(sampled, self.collectives, during="evaluation", do=back)
        try:
            scored = sampled if self.conversations is not None else score_rollouts(self.reward, prompts, sampled)
        except OutageError as outage:
            if self.collectives.world_size > 1:  # the other ranks wait in the exchange of the rows
                self.collectives.gather_bytes(exact_bytes(asdict(outage.problem)))
            raise
        pairs = zip(prompts, scored, strict=True)
        return [[_row(prompt, rollout, readable) for rollout in group] for prompt, group in pairs]

    def _result(self, rows: Sequence[Rows]) -> EvaluationResult:
        result = self._summed_up(rows)
        if self.metrics is not None:
            pairs = zip(map(self._answers, rows), self.prompts, strict=True)
            flat = [(row, prompt.label) for group, prompt in pairs for row in group]
            found = self.metrics([row[6] for row, _ in flat], [label for _, label in flat], [row[0] for row, _ in flat])
            result = replace(result, task_metrics=found)
        # all ranks have the same result: one of them says so
        if result.why_unscored and self.collectives.rank == 0:
            num, why = len(rows) * self.num_samples, result.why_unscored
            _LOG.warning("%d of %d held-out answers have no reward; first: %s", result.num_unscored, num, why)
        return result

    def _summed_up(self, rows: Sequence[Rows]) -> EvaluationResult:
        """Sum up the rows of all responses, a list for each prompt."""
        flat = [row for group in rows for row in group]
        scored = [[row for row in self._answers(group) if row[0] is not None] for group in rows]
        ks = default_ks(self.num_samples) if self.ks is None else self.ks
        samples = [[self._sample(row, votes=bool(ks)) for row in group] for group in scored]
        if self.pick and flat and all(one.score is None for group in samples for one in group):
            raise _no_such_part(self.pick, flat)
        return EvaluationResult(
            rewards=tuple(fmean(one.reward for one in group) if group else None for group in samples),
            correct=tuple(_share([one.is_correct for one in group]) if group else None for group in samples),
            num_truncated=sum(bool(row[2]) for row in flat),
            mean_tokens=sum(int(row[3]) for row in flat) / len(flat) if flat else float("nan"),
            turns=total(TurnCounts(*row[4]) for row in flat),
            why_unscored=next((str(row[5]) for row in flat if row[0] is None), ""),
            num_samples=self.num_samples,
            num_unscored=sum(row[0] is None for row in flat),
            by_prompt=hits_at_k([[bool(row[1]) for row in group] for group in rows], ks)
            if self.ranked
            else by_prompt(samples, ks),
            sources=self._sources(),
        )

    def _answers(self, group: Rows) -> Rows:
        return group[:1] if self.first_answers else group

    def _sample(self, row: Sequence[Any], *, votes: bool) -> ScoredSample:
        answer, reward = self.answer_of(row[6]) if votes else None, float(row[0])
        score = row[_BREAKDOWN].get(self.pick, reward if self.pick == WHOLE_REWARD else None) if self.pick else None
        return ScoredSample(reward, bool(row[1]), answer, score)

    def _sources(self) -> tuple[str, ...]:
        """Return the set of each prompt; empty where all are of one."""
        sources = tuple(prompt.source for prompt in self.prompts)
        return sources if len(set(sources)) > 1 else ()

    def _draw(self, prompts: Sequence[Prompt], keys: Sequence[Sequence[int]]) -> list[list[Rollout]]:
        if self.conversations is not None:
            return self.conversations.sample(prompts, keys, self.sampling)
        return sample_responses(self.engine, self.decoder, prompts, keys, self.sampling)


def _keys(seed: int, index: int, num_samples: int) -> list[int]:
    """Return a key for each sample; the first is that of a single response, whatever the number."""
    return [derive_key(seed, "evaluation", index, *([sample] if sample else [])) for sample in range(num_samples)]


_READABLE = 7
"""Place of the row for people, which is None where none is asked for."""
_BREAKDOWN = 8
"""Place of the parts of the reward."""


def _row(prompt: Prompt, rollout: Rollout, readable: Readable | None) -> list[Any]:
    """Return what is kept of a response, with a row for people where one is asked for."""
    reward = rollout.reward
    correct = None if reward is None else is_correct(rollout)
    counts = astuple(turn_counts(rollout.turns))
    reason = f"{rollout.prompt_id} ({rollout.status}): {rollout.detail}"
    return [
        reward,
        correct,
        rollout.finish_reason == "length",
        rollout.num_sampled,
        counts,
        reason,
        rollout.response_text,
        {**readable(prompt, rollout), "correct": correct} if readable else None,
        dict(rollout.breakdown),
    ]


def _no_such_part(pick: str, rows: Sequence[Sequence[Any]]) -> OptionsError:
    known = [*sorted({name for row in rows for name in row[_BREAKDOWN]}), WHOLE_REWARD]
    return OptionsError(
        code="eval.unknown_part",
        what=f"eval_pick = {pick}; the parts of the reward are {', '.join(known)}",
        where="--eval_pick",
        why="no response has a value by which it could be picked",
        do=f"--eval_pick {known[0]}",
    )


def _share(correct: Sequence[bool]) -> float:
    return correct[0] if len(correct) == 1 else fmean(correct)


def _known(values: Sequence[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None]
