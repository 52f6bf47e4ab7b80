"""One measured run of `async.py`: the real loop on a tiny model, two replicas, lengths with a long tail."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch

from rft.build.replicas import WORKER
from rft_algos.algorithms.published import Grpo
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.keyed_random import derive_key, permutation
from rft_dist.collectives import SingleProcess
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_engine.replicas.engine import ReplicaEngine
from rft_engine.replicas.process import ProcessReplica
from rft_engine.weight_sync.shared_memory import SharedWeightStore
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_trainer.async_rollouts.queue import AsyncConfig, AsyncRollouts
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.batches.units import MicroBatching
from rft_trainer.loops.rl import RlLoop, StepConfig
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.records.rollouts import Prompt
from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.rollouts.collector import RolloutCollector
from rft_trainer.rollouts.source import RolloutSource, SyncRollouts
from rft_trainer.runs.checkpointing import Progress, Saver, SaveSchedule
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.step_report import Reporter
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.scoring.advantages import AdvantageEstimator, RewardShapingConfig
from rft_trainer.testing.bigram import DigitDecoder, MemoryWriter
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective

JUDGED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of a run."""

    hidden: int = 64
    layers: int = 4
    prompts_per_step: int = 4
    group_size: int = 4
    median_tokens: int = 64
    spread: float = 1.2
    """Standard deviation of the logarithm of a length."""
    longest: int = 1536
    """Tokens at which a response is cut."""
    num_replicas: int = 2
    learning_rate: float = 3e-3

    @property
    def samples_per_step(self) -> int:
        """Of one training step."""
        return self.prompts_per_step * self.group_size

    def length(self, key: int) -> int:
        """Tokens of the sample with this key: lognormal."""
        place = (derive_key(key, "length") + 2**63) / 2**64
        deviations = NormalDist().inv_cdf(min(max(place, 1e-9), 1 - 1e-9))
        return min(max(1, round(self.median_tokens * math.exp(self.spread * deviations))), self.longest)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run gave."""

    samples_per_second: float
    step_seconds: list[float]
    rewards: list[float]
    staleness: float
    phases: dict[str, float]
    """Seconds a step by phase, mean."""


class GivenLengths(ReplicaEngine):
    """Replicas whose samples have the lengths that their keys say, instead of ending with a stop token."""

    length: Callable[[int], int]

    def draw(
        self,
        prefixes: Sequence[Sequence[int]],
        keys: Sequence[int],
        starts: Sequence[int],
        budgets: Sequence[int],
        options: SamplingOptions,
        **rest: Any,
    ) -> Iterator[Any]:
        """As of `ReplicaEngine`."""
        wanted = [min(b, self.length(k) - s) for k, s, b in zip(keys, starts, budgets, strict=True)]
        return super().draw(prefixes, keys, starts, wanted, options, **rest)


def judge(items: Sequence[RewardItem]) -> list[Score]:
    """Share of even ones among the first tokens."""
    scores: list[Score] = []
    for item in items:
        tokens = item.response_text.split()[:JUDGED_TOKENS]
        scores.append(Score(sum(int(token) % 2 == 0 for token in tokens) / JUDGED_TOKENS))
    return scores


def replicas(model: Path, policy: CausalPolicy, work: Workload, logs: Path, *, is_ahead: bool) -> GivenLengths:
    """Started engines with the policy's weights, one thread each."""
    settings: dict[str, Any] = {
        "model_dir": str(model), "dtype": "float32", "device": "cpu", "flash_attn": False, "model_code": "",
        "graphs": False, "num_threads": 1, "gives_way": is_ahead,
    }  # fmt: skip
    room = work.longest + 8
    started = [
        ProcessReplica(
            n, WORKER, settings, max_rows=512, max_len=room, log_path=logs / f"{n}.log",
            environment={"OMP_NUM_THREADS": "1"},
        )
        for n in range(work.num_replicas)
    ]  # fmt: skip
    for replica in started:
        replica.ready()
    store = SharedWeightStore(policy.named_parameters, torch.float32, num_bytes=4 * policy.num_parameters)
    engine = GivenLengths(started, store, max_len=room)
    engine.length = cache(work.length)
    engine.refresh()
    return engine


def run(model: Path, work: Workload, staleness: int, num_steps: int, seed: int, *, deterministic: bool) -> Measured:
    """`num_steps` steps after three that are not measured."""
    with tempfile.TemporaryDirectory() as folder:
        policy = load_policy(model).train()
        engine = replicas(model, policy, work, Path(folder), is_ahead=staleness > 0)
        loop = _loop(Path(folder) / "run", policy, engine, work, staleness, num_steps + 3, seed, deterministic)
        try:
            return _measured(loop, work, num_steps)
        finally:
            loop.rollouts.close()
            engine.close()


def _measured(loop: RlLoop, work: Workload, num_steps: int) -> Measured:
    seconds: list[float] = []
    rewards: list[float] = []
    lags: list[float] = []
    phases: dict[str, float] = {}
    for step in range(num_steps + 3):
        started = time.perf_counter()
        done = loop.train_step(StopSignals(), {})
        rewards.append(float(str(done.metrics["reward/mean"])))
        if step >= 3:
            seconds.append(time.perf_counter() - started)
            lags.append(float(str(done.metrics.get("async/staleness_mean", 0.0))))
    recorder = loop.reporter
    assert isinstance(recorder, TimedReporter)
    for name in ("rollout", "logprob", "train", "sync"):
        rows = [row[f"time/{name}"] for row in recorder.times[3:]]
        phases[name] = sum(rows) / len(rows)
    rate = work.samples_per_step * len(seconds) / sum(seconds)
    return Measured(rate, seconds, rewards, sum(lags) / len(lags), phases)


class TimedReporter(Reporter):
    """Keeps the times of steps."""

    times: list[dict[str, float]]

    def step(self, metrics: Any, progress: Progress, timer: PhaseTimer, *, num_tokens: int, num_samples: int) -> None:
        """As of `Reporter`, without a row."""
        progress.tokens += num_tokens
        self.times.append(timer.step(num_samples=num_samples, num_tokens=num_tokens))


def _loop(
    path: Path,
    policy: CausalPolicy,
    engine: GivenLengths,
    work: Workload,
    staleness: int,
    num_steps: int,
    seed: int,
    deterministic: bool,
) -> RlLoop:
    one, progress, record = SingleProcess(), Progress(), Grpo(kl_place="none", kl_coef=0.0)
    directory = RunDirectory.create(path, config_text="", command=["benchmark"], environment={})
    prompts = [
        Prompt(f"p:{i}", (2 + i % 10,), str(2 + i % 10), str(2 + i % 10), "p") for i in range(work.prompts_per_step * 4)
    ]
    ledger = Ledger(
        len(prompts), num_steps, lambda epoch: permutation(derive_key(seed, "order", epoch), len(prompts)).tolist(),
        data_hash="d", seed=seed,
    )  # fmt: skip
    optimizer = DataParallelOptimizer(
        policy.trainable_parameters(), one, betas=(0.9, 0.98), epsilon=1e-8, weight_decay=0.0, max_norm=1.0
    )
    sampling = SamplingOptions(temperature=1.0, max_new_tokens=work.longest, stop_token_ids=())
    credit = AdvantageEstimator(record, RewardShapingConfig(longest_response=work.longest), seed=seed)
    rules = AsyncConfig(staleness, deterministic, work.prompts_per_step, num_steps, work.group_size, seed)
    rollouts: RolloutSource
    if staleness:
        rollouts = AsyncRollouts(engine, DigitDecoder(), judge, ledger, prompts, sampling=sampling, rules=rules)
    else:
        collector = RolloutCollector(
            engine, DigitDecoder(), judge, one, sampling=sampling, group_size=work.group_size, seed=seed
        )
        rollouts = SyncRollouts(engine, collector, ledger)
    reporter = TimedReporter(directory, [], one, num_steps=num_steps, rollout_every=0, rollouts_kept=0)
    reporter.times = []
    return RlLoop(
        ledger=ledger,
        prompts=prompts,
        rollouts=rollouts,
        assign_credit=credit,
        reference=None,
        old_policy=None,
        critic=None,
        control=None,
        updater=Updater(
            PolicyLoss(policy, PolicyObjective(record, credit.coefficients)),
            optimizer,
            one,
            micro_batching=MicroBatching(work.samples_per_step, 4096, True),
            learning_rate=lambda update: work.learning_rate,
        ),
        evaluator=None,
        saver=Saver(
            MemoryWriter(), policy, optimizer, {}, one, schedule=SaveSchedule(0, 0, 0.0), before_save=directory.sync
        ),
        reporter=reporter,
        collectives=one,
        rules=_rules(work, staleness, num_steps),
        progress=progress,
        timer=PhaseTimer(),
        resume_command="",
        sleep_engine=False,
    )


def _rules(work: Workload, staleness: int, num_steps: int) -> StepConfig:
    return StepConfig(
        prompts_per_rollout=work.prompts_per_step,
        rollouts_per_step=1,
        train_batch_size=work.samples_per_step,
        epochs_per_step=1,
        skip_zero_advantage=False,
        filter_groups=False,
        refill_rounds=0,
        smallest_group=2,
        needs_baseline=False,
        frozen_steps=0,
        max_steps=num_steps,
        eval_every=0,
        max_refused_in_a_row=0,
        max_unscored_share=0.0,
        max_staleness=staleness,
    )
