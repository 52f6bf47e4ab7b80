"""The bookkeeping of a large step: all that is done with rollouts but the decoding, the forward and the backward.

    python benchmarks/data_scale.py                  # 512 samples of 8,192 tokens; results/data_scale.json

One entry a part, in the order of a step of `rft-train rl`. Responses are random tokens with float32 log-probs and
rewards of 0 and 1, so that every group has signal; GRPO without a KL term, micro-batches of 8 sequences. What a run of
one rank without token records leaves out stands apart (`beside`). The digest is of all packed tensors. Modules are
loaded before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # here, so that its import is in no figure: a run makes it once
import torch

from rft_algos.algorithms.published import Grpo
from rft_trainer.batches.packing import pack, rank_micro_batches
from rft_trainer.batches.training_batch import TrainingBatch
from rft_trainer.batches.units import MicroBatching
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup, TokenBatch, TrainingSample
from rft_trainer.records.scores import RewardStatus
from rft_trainer.rollout_files.token_recorder import token_record
from rft_trainer.rollout_files.token_records import write_token_records
from rft_trainer.rollouts.group_exchange import ExchangedGroups, encode_groups
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.rollout_signs import batch_signs, credit_signs
from rft_trainer.runs.step_report import rollout_metrics, rollout_rows
from rft_trainer.scoring.advantages import AdvantageEstimator, PolicyScores, RewardShapingConfig
from rft_trainer.scoring.finite_scores import non_finite_scores
from rft_trainer.scoring.samples import flat_rollouts, keep_scored
from rft_trainer.update.nonfinite_checks import refuse_non_finite_samples

RESULTS = Path(__file__).parent / "results" / "data_scale.json"
GROUP, PROMPT_TOKENS, MICRO_BATCH = 8, 192, 8


def main() -> None:
    """Measure one step and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    found = measured_step(given.samples, given.tokens)
    given.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


class Parts:
    """CPU seconds by part, in the order in which they were first measured."""

    def __init__(self) -> None:
        """Begin with none."""
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Add the CPU time of a block to a part."""
        begin = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - begin


def made_groups(num_samples: int, num_tokens: int) -> list[RolloutGroup]:
    """Return a step's groups: `num_samples` responses, each of `num_tokens` tokens with its prompt."""
    draw, generator = random.Random(0), np.random.default_rng(0)
    length = num_tokens - PROMPT_TOKENS
    groups: list[RolloutGroup] = []
    for number in range(num_samples // GROUP):
        ids = tuple(generator.integers(0, 32000, PROMPT_TOKENS).tolist())
        prompt = Prompt(f"train:{number}", ids, "a prompt", "1", "train")
        rollouts = tuple(
            Rollout(
                prompt_id=prompt.prompt_id,
                sample_index=index,
                completion_ids=tuple(generator.integers(0, 32000, length).tolist()),
                behaviour_logprobs=tuple((-generator.exponential(size=length).astype(np.float32)).tolist()),
                log_kept_mass=(0.0,) * length,
                finish_reason="stop",
                weight_version=0,
                response_text=" ".join(str(draw.random()) for _ in range(length // 8)),
                reward=float(index % 2),
                status=RewardStatus.OK,
                breakdown={"correctness": float(index % 2)},
            )
            for index in range(GROUP)
        )
        groups.append(RolloutGroup(prompt, 0, number, rollouts))
    return groups


def measured_step(num_samples: int, num_tokens: int) -> dict[str, Any]:
    """Return CPU seconds of each part, their sum, and a digest of the samples and of the packed tensors."""
    groups, parts = made_groups(num_samples, num_tokens), Parts()
    with parts.part("check of the log-probs"):
        refuse_non_finite_samples((group.rollouts for group in groups), during="step 1", do="")
    with parts.part("filters"):
        kept = keep_scored(groups)
    with parts.part("advantages and samples"):
        behaviour = [rollout.behaviour_logprobs for _, rollout in flat_rollouts(kept.groups)]
        scores = PolicyScores(behaviour, behaviour)
        assert not non_finite_scores(scores)
        credit = AdvantageEstimator(Grpo(kl_place="none"), RewardShapingConfig(longest_response=num_tokens), seed=0)
        samples, _ = credit(kept.groups, scores, step=0)
        advantages = {sample.sample_id: sample.mean_advantage for sample in samples}
    with parts.part("batches"):
        batch = TrainingBatch.of(samples).split(num_samples)[0].without_zero_advantages()
        cuts = rank_micro_batches(batch.samples, 0, 1, MicroBatching(MICRO_BATCH, 0, by_tokens=False).cut)
    digest = hashlib.sha256()
    packing = 0.0
    for cut in cuts:
        # one at a time, as in a step: the next is packed when the gradient of this one is there
        begin = time.process_time()
        packed = pack(cut)
        packing += time.process_time() - begin
        _add(digest, packed)
    parts.seconds["packing"] = packing
    with parts.part("metrics"):
        rollout_metrics(groups, kept), batch_signs(groups), credit_signs(kept.groups, samples)
    with tempfile.TemporaryDirectory() as folder, parts.part("readable rows"):
        (Path(folder) / "rollouts").mkdir()
        RunDirectory(Path(folder)).write_rollouts(1, rollout_rows(groups, 64, advantages))
    whole = sum(parts.seconds.values())
    more = Parts()
    # what a run of one rank without token records leaves out
    with more.part("exchange between ranks, sending"):
        data = encode_groups(groups)
    with more.part("exchange between ranks, receiving"):
        received = ExchangedGroups(data).groups({(0, group.position): group.prompt for group in groups})
    assert received == groups, "every number arrives as it was sent"
    with tempfile.TemporaryDirectory() as folder, more.part("token records of all responses"):
        write_token_records(Path(folder) / "tokens_000001.arrow", _records(groups, samples, behaviour))
    return {
        "samples": num_samples,
        "tokens": num_tokens,
        "cpu_seconds": {name: round(one, 3) for name, one in parts.seconds.items()},
        "sum": round(whole, 3),
        "beside": {name: round(one, 3) for name, one in more.seconds.items()},
        "digest": digest.hexdigest(),
    }


def _add(digest: Any, batch: TokenBatch) -> None:
    for name in TokenBatch.__dataclass_fields__:
        value = getattr(batch, name)
        if isinstance(value, torch.Tensor):
            digest.update(f"{name}{value.dtype}".encode() + value.numpy().tobytes())


def _records(
    groups: Sequence[RolloutGroup], samples: Sequence[TrainingSample], logprobs: Sequence[tuple[float, ...]]
) -> list[Any]:
    return [
        token_record(group, rollout, sample, numbers, numbers)
        for (group, rollout), sample, numbers in zip(flat_rollouts(groups), samples, logprobs, strict=True)
    ]


if __name__ == "__main__":
    main()
