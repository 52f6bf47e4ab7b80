"""The two systems, each driven step by step through its own public training loop.

A side runs in a process of its own. Its loop calls a `Gate` at every step boundary, which waits
there until the step may start and reports how long it took, so both loops run whole and neither
knows that it is being measured.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from grpo_case import (
    ADVANTAGE_EPSILON,
    CLIP,
    LEARNING_RATE,
    MAX_NORM,
    MICRO_BATCH,
    Case,
    prompt_texts,
    text_reward,
)

from rft_algos.algorithms.components import GroupNorm, PpoClip
from rft_algos.algorithms.published import Grpo
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_dist.collectives import SingleProcess
from rft_dist.optim.adamw import StepOutcome
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_engine.native.engine import NativeEngine
from rft_models.decode.fast_decoder import decoder_for
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.batches.units import MicroBatching
from rft_trainer.loops.rl import RlLoop, StepConfig
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.records.rollouts import Prompt
from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.rollouts.collector import RolloutCollector
from rft_trainer.rollouts.source import SyncRollouts
from rft_trainer.runs.checkpointing import Progress, Saver, SaveSchedule
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.step_report import Reporter
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.scoring.advantages import AdvantageEstimator, RewardShapingConfig
from rft_trainer.sinks.jsonl import JsonlSink
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective


class Gate:
    """Where a loop waits between two steps; one JSON line in for each step, one out after it."""

    def __init__(self, requests: TextIO, answers: TextIO) -> None:
        self._requests, self._answers = requests, answers
        self._started = self._cpu_started = 0.0
        self.seconds: dict[str, float] = {}
        """Seconds of parts of the step that is running; the side adds to it."""
        self.tokens = 0
        """Tokens of the step's responses without end tokens; the reward counts them, one a word."""

    def wait(self) -> None:
        """Say that the loop is ready (for the first step) and wait for the word to go on."""
        self._answer({"ready": True})
        self._go()

    def finished_step(self) -> None:
        """Report the step that ends here, then wait for the next."""
        elapsed, cpu = time.perf_counter() - self._started, time.process_time() - self._cpu_started
        self._answer({"seconds": elapsed, "cpu": cpu, "parts": self.seconds, "tokens": self.tokens})
        self._go()

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        """Run `work` and add its seconds to a part."""
        started = time.perf_counter()
        result = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        return result

    def _answer(self, record: Mapping[str, Any]) -> None:
        print(json.dumps({**record, "peak_mib": peak_mib()}), file=self._answers, flush=True)

    def _go(self) -> None:
        word = self._requests.readline().strip()
        if word != "step":
            sys.exit(0)
        self.seconds, self.tokens = {}, 0
        self._started, self._cpu_started = time.perf_counter(), time.process_time()


def peak_mib() -> float:
    """Most memory this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- this project -----------------------------------------------------------------------------------


class GatedOptimizer(DataParallelOptimizer):
    """The optimizer of a run, with the time of its two calls noted."""

    gate: Gate

    def backward(self, loss: torch.Tensor, *, last: bool = False) -> None:
        self.gate.timed("backward", lambda: super(GatedOptimizer, self).backward(loss, last=last))

    def step(self, learning_rate: float, *, largest_norm: float = math.inf) -> StepOutcome:
        step = super().step
        return self.gate.timed("optimizer", lambda: step(learning_rate, largest_norm=largest_norm))


class GateSink:
    """Takes a step's record as a tracker would, and is the boundary between two steps."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def start(self, info: object) -> None: ...
    def evaluation(self, record: Mapping[str, Any]) -> None: ...
    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...
    def finish(self, summary: Mapping[str, Any]) -> None: ...

    def step(self, record: Mapping[str, Any]) -> None:
        parts = self._gate.seconds
        for name in ("rollout", "reward", "sync"):
            parts["generate" if name == "rollout" else name] = record[f"time/{name}"]
        parts["forward"] = record["time/train"] - parts["backward"] - parts["optimizer"]
        self._gate.finished_step()


class TextReward:
    """The reward of the benchmark in the form that this project's loop takes."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        self._gate.tokens += sum(len(item.response_text.split()) for item in items)
        return [Score(text_reward(item.response_text)) for item in items]

    def close(self) -> None: ...


class NoWriter:
    """No checkpoints on either side."""

    failed = False

    def save(self, step: int, **parts: object) -> None: ...
    def keep(self, step: int) -> None: ...
    def wait(self) -> None: ...


def record() -> Grpo:
    """The algorithm on our side; TRL's defaults say the same (loss_type "dapo" is the mean over tokens)."""
    return Grpo(
        advantage=GroupNorm(epsilon=ADVANTAGE_EPSILON),
        surrogate=PpoClip(low=CLIP, high=CLIP),
        kl_place="none",
        aggregation="token_mean",
    )


def make_optimizer(policy: CausalPolicy, kind: type[DataParallelOptimizer]) -> DataParallelOptimizer:
    return kind(
        policy.named_parameters(),
        SingleProcess(),
        betas=(0.9, 0.999),
        epsilon=1e-8,
        weight_decay=0.0,
        max_norm=MAX_NORM,
    )


def make_updater(policy: CausalPolicy, optimizer: DataParallelOptimizer, micro_batch: int = MICRO_BATCH) -> Updater:
    return Updater(
        PolicyLoss(policy, PolicyObjective(record())),
        optimizer,
        SingleProcess(),
        micro_batching=MicroBatching(max_sequences=micro_batch, max_tokens=0, by_tokens=False),
        learning_rate=lambda step: LEARNING_RATE,
    )


def our_prompts(case: Case, policy: CausalPolicy, num_prompts: int) -> list[Prompt]:
    assert policy.tokenizer is not None
    return [
        Prompt(f"prompt:{number}", tuple(policy.tokenizer.encode(text)), text, None, "benchmark")
        for number, text in enumerate(prompt_texts(case, num_prompts))
    ]


def our_run(case: Case, directory: Path, num_steps: int, gate: Gate, micro_batch: int = MICRO_BATCH) -> RlLoop:
    """The loop of `rft-train rl` with the collaborators that its composition makes."""
    policy = load_policy(directory).train()
    assert policy.tokenizer is not None
    collectives = SingleProcess()
    engine = NativeEngine(decoder_for(policy), max_rows=256, max_len=case.prompt_tokens + case.new_tokens)
    optimizer = make_optimizer(policy, GatedOptimizer)
    assert isinstance(optimizer, GatedOptimizer)
    optimizer.gate = gate
    prompts = our_prompts(case, policy, num_steps * case.prompts)
    progress = Progress()
    run_directory = RunDirectory.create(directory / "run", config_text="", command=[], environment={})
    ledger = Ledger(len(prompts), 1, lambda epoch: range(len(prompts)), data_hash="benchmark", seed=0)
    collector = RolloutCollector(
        engine,
        policy.tokenizer,
        TextReward(gate),
        collectives,
        sampling=SamplingOptions(
            temperature=1.0,
            max_new_tokens=case.new_tokens,
            min_new_tokens=0 if case.may_end else case.new_tokens,
            stop_token_ids=policy.tokenizer.eos_ids,
        ),
        group_size=case.group_size,
        seed=0,
    )
    return RlLoop(
        ledger=ledger,
        prompts=prompts,
        rollouts=SyncRollouts(engine, collector, ledger),
        assign_credit=AdvantageEstimator(record(), RewardShapingConfig(longest_response=case.new_tokens), seed=0),
        reference=None,
        old_policy=None,
        critic=None,
        control=None,
        updater=make_updater(policy, optimizer, micro_batch),
        evaluator=None,
        saver=Saver(
            NoWriter(),
            policy,
            optimizer,
            {"progress": progress},
            collectives,
            schedule=SaveSchedule(0, 0, 0.0),
            before_save=lambda: None,
        ),
        reporter=Reporter(
            run_directory,
            [JsonlSink(run_directory), GateSink(gate)],
            collectives,
            num_steps=num_steps,
            rollout_every=0,
            rollouts_kept=0,
        ),
        collectives=collectives,
        rules=StepConfig(
            prompts_per_rollout=case.prompts,
            rollouts_per_step=1,
            train_batch_size=case.num_sequences,
            epochs_per_step=1,
            skip_zero_advantage=True,
            filter_groups=False,
            refill_rounds=0,
            smallest_group=2,
            needs_baseline=False,
            frozen_steps=0,
            max_steps=0,
            eval_every=0,
            max_refused_in_a_row=0,
            max_unscored_share=0.0,
        ),
        progress=progress,
        timer=PhaseTimer(),
        resume_command="",
        sleep_engine=False,
    )


def drive_ours(case: Case, directory: Path, num_steps: int, gate: Gate, micro_batch: int) -> None:
    """Run our loop; returns when the gate closes."""
    run = our_run(case, directory, num_steps, gate, micro_batch)
    gate.wait()
    run.run(StopSignals())


# --- TRL --------------------------------------------------------------------------------------------


def trl_reward(gate: Gate | None) -> Callable[..., list[float]]:
    """The reward of the benchmark in the form that TRL takes."""

    def reward(prompts: Sequence[str], completions: Sequence[str], **kwargs: Any) -> list[float]:
        if gate is not None:
            gate.tokens += sum(len(text.split()) for text in completions)
        return [text_reward(text) for text in completions]

    return reward


def make_trainer(case: Case, directory: Path, num_steps: int, gate: Gate | None, micro_batch: int = MICRO_BATCH) -> Any:
    """TRL's GRPOTrainer with its defaults, except where the benchmark's setting is stated."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class TimedTrainer(GRPOTrainer):
        """The trainer itself; three of its calls are timed when a step is measured."""

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            work = lambda: super(TimedTrainer, self)._generate(*args, **kwargs)  # noqa: E731
            return gate.timed("generate", work) if gate else work()

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            work = lambda: super(TimedTrainer, self)._calculate_rewards(*args, **kwargs)  # noqa: E731
            return gate.timed("reward", work) if gate else work()

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            work = lambda: super(TimedTrainer, self).compute_loss(*args, **kwargs)  # noqa: E731
            return gate.timed("forward", work) if gate else work()

        def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
            work = lambda: super(TimedTrainer, self)._prepare_inputs(*args, **kwargs)  # noqa: E731
            return gate.timed("prepare", work) if gate else work()

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            work = lambda: super(TimedTrainer, self).training_step(*args, **kwargs)  # noqa: E731
            return gate.timed("training_step", work) if gate else work()

    class Boundary(TrainerCallback):
        """The boundary between two steps, as the sink is on our side."""

        first = True

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert gate is not None
            if self.first:
                self.first = False
                gate.wait()
            else:
                self._finish()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.before = time.perf_counter()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert gate is not None
            gate.seconds["optimizer"] = time.perf_counter() - self.before

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._finish()

        def _finish(self) -> None:
            assert gate is not None
            parts = gate.seconds
            parts["backward"] = parts.pop("training_step") - parts.pop("prepare") - parts["forward"]
            gate.finished_step()

    arguments = GRPOConfig(
        output_dir=str(directory / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=case.num_sequences // micro_batch,
        num_generations=case.group_size,
        max_completion_length=case.new_tokens,
        generation_kwargs={
            "min_new_tokens": 0 if case.may_end else case.new_tokens,
            "max_new_tokens": case.new_tokens,
        },
        beta=0.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        num_iterations=1,
        epsilon=CLIP,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=MAX_NORM,
        max_steps=num_steps,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    return TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32),
        reward_funcs=[trl_reward(gate)],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompt_texts(case, num_steps * case.prompts)}),
        processing_class=AutoTokenizer.from_pretrained(str(directory)),
        callbacks=[Boundary()] if gate else [],
    )


def drive_trl(case: Case, directory: Path, num_steps: int, gate: Gate, micro_batch: int) -> None:
    """Run TRL's loop; returns when the gate closes."""
    make_trainer(case, directory, num_steps, gate, micro_batch).train()
