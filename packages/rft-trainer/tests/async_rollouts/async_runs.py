"""Whole runs with a queue for tests: a bigram policy learns to repeat its prompt, in milliseconds, on ranks too."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rft_algos.algorithms.published import Grpo
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import PeerError
from rft_core.keyed_random import derive_key, permutation
from rft_trainer.async_rollouts.queue import AsyncConfig, AsyncRollouts
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.batches.units import MicroBatching
from rft_trainer.evaluation.evaluator import Evaluator
from rft_trainer.loops.rl import RlLoop, StepConfig
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.protocols import Collectives
from rft_trainer.records.rollouts import Prompt, RolloutGroup
from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.rollouts.collector import RolloutCollector
from rft_trainer.rollouts.source import RolloutSource, SyncRollouts
from rft_trainer.runs.checkpointing import Progress, Saver, SaveSchedule
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.step_report import Reporter
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.scoring.advantages import AdvantageEstimator, RewardShapingConfig
from rft_trainer.sinks.jsonl import JsonlSink
from rft_trainer.testing.async_engine import BigramAsyncEngine
from rft_trainer.testing.bigram import BigramEngine, BigramPolicy, DigitDecoder, MemoryWriter, OneRank, PlainOptimizer
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective

VOCABULARY, STOP, GROUP, LONGEST, SEED = 6, 0, 4, 9, 3
PROMPTS = [Prompt(f"p:{i}", (1 + i % 5,), str(1 + i % 5), str(1 + i % 5), "p") for i in range(20)]
RULES = StepConfig(
    prompts_per_rollout=5,
    rollouts_per_step=1,
    train_batch_size=10,
    epochs_per_step=1,
    skip_zero_advantage=True,
    filter_groups=False,
    refill_rounds=0,
    smallest_group=2,
    needs_baseline=False,
    frozen_steps=0,
    max_steps=0,
    eval_every=4,
    max_refused_in_a_row=1,
    max_unscored_share=0.1,
)
EVERY_ENTRY = [(epoch, position) for epoch in range(4) for position in range(len(PROMPTS))]


T = TypeVar("T")


class Stopped(BaseException):
    """What a test ends a run with, as a kill would."""


def repeats_its_prompt(items: Sequence[RewardItem]) -> list[Score]:
    """1 when the first token of the response is the prompt's."""
    return [Score(float(item.response_text.split()[0] == item.label)) for item in items]


@dataclass(frozen=True, slots=True)
class ThreadRank:
    """One rank of several that are threads of this process."""

    rank: int
    world_size: int
    barrier: threading.Barrier
    board: list[Any]

    def sum(self, tensor: Tensor) -> Tensor:
        """Over ranks, in their order."""
        return torch.stack(self._all(tensor.detach().clone())).sum(0)

    def max(self, tensor: Tensor) -> Tensor:
        """Over ranks."""
        return torch.stack(self._all(tensor.detach().clone())).amax(0)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Of every rank."""
        return self._all(data)

    def _all(self, value: Any) -> list[Any]:
        self.board[self.rank] = value
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerError(code="collective.failed", what="a rank is gone", where="", why="", do="") from None
        found = list(self.board)
        # all have come: what is broken here was broken by a rank that is through, and this exchange took place
        with contextlib.suppress(threading.BrokenBarrierError):
            self.barrier.wait()
        return found


def run_on_ranks(num_ranks: int, work: Callable[[ThreadRank], T]) -> list[T | BaseException]:
    """What every rank returned or raised; one that ends badly breaks the exchanges of the others, as a death would."""
    barrier, board = threading.Barrier(num_ranks, timeout=60.0), [None] * num_ranks
    ended: list[Any] = [None] * num_ranks

    def life(rank: int) -> None:
        try:
            ended[rank] = work(ThreadRank(rank, num_ranks, barrier, board))
        except BaseException as error:  # noqa: BLE001 - what the test looks at
            ended[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=life, args=(rank,), name=f"rank-{rank}") for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


class SummedOptimizer(PlainOptimizer):
    """`PlainOptimizer` on the gradients of all ranks."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], collectives: Collectives) -> None:
        super().__init__(parameters)
        self._collectives = collectives

    def step(self, learning_rate: float, *, largest_norm: float = float("inf")) -> Any:
        """The same step on every rank."""
        for parameter in self._parameters:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self._collectives.sum(own)
        return super().step(learning_rate)


class AheadRun:
    """A run with a queue (`staleness` None: with the plain collector), its parts in reach."""

    def __init__(
        self,
        path: Path,
        staleness: int | None,
        *,
        rules: StepConfig = RULES,
        deterministic: bool = False,
        reward: Callable[[Sequence[RewardItem]], list[Score]] = repeats_its_prompt,
        episodes: int = 4,
        save_every: int = 3,
        pause: float = 0.0,
        patience: float = 20.0,
        collectives: Collectives | None = None,
        prompts: Sequence[Prompt] = PROMPTS,
    ) -> None:
        self.ranks: Collectives = collectives or OneRank()
        self.policy = BigramPolicy(VOCABULARY, dtype=torch.float64)
        self.writer, self.reward, self.prompts = MemoryWriter(), reward, prompts
        self.directory = RunDirectory.create(path, config_text="", command=["rft-train"], environment={})
        self.optimizer = SummedOptimizer([self.policy.table], self.ranks)
        self.sampling = SamplingOptions(temperature=1.0, max_new_tokens=LONGEST, stop_token_ids=(STOP,))
        self.tables: dict[int, Tensor] = {}
        self.groups: dict[int, list[RolloutGroup]] = {}
        self.engine = BigramAsyncEngine(self.policy, pause=pause)
        self.queue: AsyncRollouts | None = None
        ledger, progress = _ledger(len(prompts), episodes), Progress()
        parts: dict[str, Any] = {"progress": progress, "ledger": ledger}
        serving = BigramEngine(self.policy)
        collector = RolloutCollector(
            serving, DigitDecoder(), reward, self.ranks, sampling=self.sampling, group_size=GROUP, seed=SEED
        )
        rollouts: RolloutSource = SyncRollouts(serving, collector, ledger)
        if staleness is not None:
            num = rules.prompts_per_rollout * rules.rollouts_per_step
            ahead = AsyncConfig(staleness, deterministic, num, rules.max_steps, GROUP, SEED, patience)
            self.queue = self._queue(ledger, ahead)
            rollouts = parts["rollouts_ahead"] = self.queue
        saver = Saver(
            self.writer,
            self.policy,
            self.optimizer,
            parts,
            self.ranks,
            schedule=SaveSchedule(save_every, 0, 0.0),
            before_save=self.directory.sync,
        )
        rules = replace(rules, max_staleness=staleness or 0)
        self.loop = self._loop(ledger, progress, rollouts, saver, rules)

    def _queue(self, ledger: Ledger, ahead: AsyncConfig) -> AsyncRollouts:
        return AsyncRollouts(
            self.engine,
            DigitDecoder(),
            self.reward,
            ledger,
            self.prompts,
            sampling=self.sampling,
            rules=ahead,
            collectives=self.ranks,
        )

    def _loop(
        self, ledger: Ledger, progress: Progress, rollouts: RolloutSource, saver: Saver, rules: StepConfig
    ) -> RlLoop:
        record = Grpo(kl_place="none", kl_coef=0.0)
        credit = AdvantageEstimator(record, RewardShapingConfig(longest_response=LONGEST), seed=SEED)
        return RlLoop(
            ledger=ledger,
            prompts=self.prompts,
            rollouts=rollouts,
            assign_credit=credit,
            reference=None,
            old_policy=None,
            critic=None,
            control=self._seen,
            updater=Updater(
                PolicyLoss(self.policy, PolicyObjective(record, credit.coefficients)),
                self.optimizer,
                self.ranks,
                micro_batching=MicroBatching(3, 0, False),
                learning_rate=lambda update: 8.0,
            ),
            evaluator=Evaluator(
                rollouts,
                DigitDecoder(),
                self.reward,
                self.ranks,
                self.prompts[:5],
                sampling=SamplingOptions(temperature=0.0, max_new_tokens=3, stop_token_ids=(STOP,)),
            ),
            saver=saver,
            reporter=Reporter(
                self.directory, [JsonlSink(self.directory)], self.ranks, num_steps=16, rollout_every=0, rollouts_kept=6
            ),
            collectives=self.ranks,
            rules=rules,
            progress=progress,
            timer=PhaseTimer(),
            resume_command="rft-train resume here",
            sleep_engine=False,
        )

    def _seen(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """What is about to be trained, by step."""
        self.groups[self.loop.progress.step] = list(groups)
        self.tables[self.loop.progress.step] = self.policy.table.detach().clone()
        return list(groups)

    def go(self, signals: StopSignals | None = None) -> AheadRun:
        """To the end; threads are ended whatever happens."""
        try:
            self.loop.run(signals or StopSignals())
        finally:
            self.close()
        return self

    def close(self) -> None:
        """End the threads."""
        if self.queue is not None:
            self.queue.close()

    def resume_from(self, other: AheadRun) -> AheadRun:
        """Continue from the newest checkpoint of another run's first rank, with the weights that it had then."""
        step, records = other.writer.saved[-1]
        with torch.no_grad():
            self.policy.table.copy_(other.tables_at(step))
        self.loop.saver.restore(step, json.loads(json.dumps(records)))
        if step:
            self.loop.rollouts.load_weights(step)
        return self

    def tables_at(self, step: int) -> Tensor:
        """The weights of a version."""
        return self.tables.get(step, self.policy.table)

    def rows(self) -> list[dict[str, Any]]:
        """The metrics, without times and what only a queue has."""
        self.directory.sync()
        left_out = ("time/", "memory/", "async/", "engine/")
        rows = self.directory.read_metrics().rows
        return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in rows]


def trained_entries(*runs: AheadRun) -> list[tuple[int, int]]:
    """(epoch, position) of every group that was trained, in order; of a run that was stopped, the steps it kept."""
    found: list[tuple[int, int]] = []
    for number, run in enumerate(runs):
        last = run.writer.saved[-1][0] if number < len(runs) - 1 else run.loop.progress.step
        found += [
            (group.epoch, group.position) for step in sorted(run.groups) if step < last for group in run.groups[step]
        ]
    return found


def _ledger(num_prompts: int, episodes: int) -> Ledger:
    def order(epoch: int) -> list[int]:
        return [int(place) for place in permutation(derive_key(SEED, "order", epoch), num_prompts)]

    return Ledger(num_prompts, episodes, order, data_hash="d", seed=SEED)
