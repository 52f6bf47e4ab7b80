"""Small runs of reinforcement whose engines hold copies of the weights, and ways to leave a copy behind."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rft_algos.algorithms.published import Grpo
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.keyed_random import derive_key, permutation
from rft_dist.collectives import SingleProcess
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_engine.completions import Completion
from rft_engine.native.copied_weights import NativeEngineOnCopy
from rft_engine.native.copy_check import check_copy
from rft_models.decode.weight_copy import GenerationCopy
from rft_models.families.registry import packed_families
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import make_policy
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.batches.units import MicroBatching
from rft_trainer.evaluation.logprob_mismatch import scored_tokens
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
from rft_trainer.testing.bigram import DigitDecoder, MemoryWriter
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective

VOCAB, MAX_LEN = 47, 24
FAMILIES = ("qwen2", "llama", "gpt2", "qwen3")
PROMPTS = [Prompt(f"p:{i}", (3 + i, 20 + i, 5), str(i), str(i), "p") for i in range(8)]
_SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "head_dim": 8},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True},
}
_GPT2: dict[str, Any] = {
    **{"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
_RULES = StepConfig(
    prompts_per_rollout=2,
    rollouts_per_step=1,
    train_batch_size=6,
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
)


def tied_policy(family: str, seed: int) -> CausalPolicy:
    """Two layers of random weights under one matrix for input and output."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = _GPT2 if family == "gpt2" else _SIZES
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return make_policy(model.eval(), None, packed=family in packed_families())


class Replicas:
    """Engines that share the prompts of a call between them, each with a copy of the weights."""

    def __init__(self, policy: CausalPolicy, number: int) -> None:
        self.copies = [GenerationCopy(policy) for _ in range(number)]
        self.engines = [
            NativeEngineOnCopy(twin, policy.named_parameters, max_rows=6, max_len=MAX_LEN) for twin in self.copies
        ]
        for engine in self.engines:
            engine.refresh()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sample_keys: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        media: Sequence[object | None] | None = None,
    ) -> list[list[Completion]]:
        assert media is None
        found: dict[int, list[Completion]] = {}
        for number, engine in enumerate(self.engines):
            own = range(number, len(prompts), len(self.engines))
            answers = engine.generate([prompts[p] for p in own], [sample_keys[p] for p in own], options)
            found |= dict(zip(own, answers, strict=True))
        return [found[p] for p in range(len(prompts))]

    def load_weights(self, version: int) -> None:
        for engine in self.engines:
            engine.load_weights(version)

    def refresh(self) -> None:
        for engine in self.engines:
            engine.refresh()

    def sleep(self, level: int = 1) -> None:
        for engine in self.engines:
            engine.sleep(level)

    def wake(self) -> None:
        for engine in self.engines:
            engine.wake()


class StaleRun:
    """A run of GRPO with AdamW on a tiny model; `step` is one whole training step of the real loop."""

    def __init__(self, path: Path, seed: int, *, replicas: int = 1) -> None:
        self.numbers = random.Random(seed)
        self.policy = tied_policy(FAMILIES[seed % len(FAMILIES)], seed)
        self.replicas = Replicas(self.policy, replicas)
        self.engine, self.copy = self.replicas.engines[0], self.replicas.copies[0]
        self.names = [name for name, _ in self.copy.named_tensors()]
        self.loop = _loop(path, self.policy, self.replicas, seed)
        self.loop.check_engine = self.check
        self.check(0)

    def check(self, trainer_version: int) -> dict[str, tuple[float, float]]:
        """What the loop asks after every load: every replica against the policy of now."""
        gaps = [
            check_copy(engine, self._logprobs, trainer_version=trainer_version, replica=number)
            for number, engine in enumerate(self.replicas.engines)
        ]
        return {"engine/probe_gap": (max(gap.maximum for gap in gaps), 1.0)}

    def step(self) -> dict[str, Any]:
        """The metrics of one training step."""
        return dict(self.loop.train_step(StopSignals()).metrics)

    def _logprobs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        pairs = [(list(prompt), list(new)) for prompt, new in zip(prompts, completions, strict=True)]
        return scored_tokens(self.policy, pairs, 1.0, "cpu")


def _spread(items: Sequence[RewardItem]) -> list[Score]:
    """Hardly ever the same for two samples."""
    return [Score(sum(map(int, item.response_text.split())) / 100) for item in items]


def _loop(path: Path, policy: CausalPolicy, engine: Replicas, seed: int) -> RlLoop:
    one, progress, record = SingleProcess(), Progress(), Grpo(kl_place="none", kl_coef=0.0)
    directory = RunDirectory.create(path, config_text="recipe: {command: rl}\n", command=["rft-train"], environment={})
    optimizer = DataParallelOptimizer(
        policy.trainable_parameters(), one, betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0, max_norm=1.0
    )
    credit = AdvantageEstimator(record, RewardShapingConfig(longest_response=5), seed=seed)
    ledger = Ledger(
        len(PROMPTS),
        4,
        lambda epoch: permutation(derive_key(seed, "order", epoch), len(PROMPTS)).tolist(),
        data_hash="d",
        seed=seed,
    )
    collector = RolloutCollector(
        engine,
        DigitDecoder(),
        _spread,
        one,
        sampling=SamplingOptions(temperature=1.0, max_new_tokens=5, stop_token_ids=(2,)),
        group_size=3,
        seed=seed,
    )
    return RlLoop(
        ledger=ledger,
        prompts=PROMPTS,
        rollouts=SyncRollouts(engine, collector, ledger),
        assign_credit=credit,
        reference=None,
        old_policy=None,
        critic=None,
        control=None,
        updater=Updater(
            PolicyLoss(policy, PolicyObjective(record, credit.coefficients)),
            optimizer,
            one,
            micro_batching=MicroBatching(6, 0, False),
            learning_rate=lambda update: 3e-3,
        ),
        evaluator=None,
        saver=Saver(
            MemoryWriter(),
            policy,
            optimizer,
            {},
            one,
            schedule=SaveSchedule(0, 0, 0.0),
            before_save=directory.sync,
        ),
        reporter=Reporter(directory, [], one, num_steps=40, rollout_every=0, rollouts_kept=0),
        collectives=one,
        rules=_RULES,
        progress=progress,
        timer=PhaseTimer(),
        resume_command="rft-train resume here",
        sleep_engine=True,
    )


def unverified_load(twin: GenerationCopy, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Some tensors into a copy, and nobody looks whether they are all."""
    twin.begin()
    for name, tensor in tensors:
        twin.write(name, tensor)
    twin.refresh()


def untie(twin: GenerationCopy) -> None:
    """Let the output matrix be a tensor of its own, with the values of now."""
    head = twin._twin.head.layer  # type: ignore[reportPrivateUsage]
    assert isinstance(head.weight, Tensor)
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)


class KeptPrefixes:
    """A copy that answers for prompts it has read before with the keys and values of that time.

    They are had by reading with the weights of that time, `before`, which gives the same numbers.
    """

    def __init__(self, twin: GenerationCopy, before: GenerationCopy, seen: set[tuple[int, ...]]) -> None:
        self._twin, self._before, self._seen = twin, before, seen
        before.new_cache(1, MAX_LEN)  # it makes its table of rotations for this length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._twin, name)

    def prefill(self, cache: Any, token_ids_PL: Tensor, lengths_P: Tensor, copies_P: Sequence[int]) -> Tensor:
        """See `DecodableModel.prefill`."""
        rows = [tuple(row[:n].tolist()) for row, n in zip(token_ids_PL, lengths_P.tolist(), strict=True)]
        reader = self._before if self._seen.issuperset(rows) else self._twin
        return reader.prefill(cache, token_ids_PL, lengths_P, copies_P)
