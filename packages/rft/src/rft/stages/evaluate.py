"""Evaluation of a model on held-out rows: every prompt answered, and scored by the reward of the settings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rft.build.constraint import constraint_of, within
from rft.build.engines import make_engine
from rft.build.environment import enter_environment
from rft.build.images import row_images, tokenizer_with_images
from rft.build.prompt_data import as_prompts, read_held_out, with_label_column
from rft.build.reward_parts import columns_of
from rft.build.rewards import build_reward
from rft.build.rl_data import response_limits
from rft.build.shared_parts import sampling_options
from rft.hub.run_settings import with_model_directories
from rft.parallel.parallelize import weights_dtype
from rft.process.machine import Machine
from rft.reward_names import reads_columns
from rft.settings import EvalSettings
from rft_algos.statistics import Interval, mean_interval, paired_difference_interval, wilson_interval
from rft_core.errors import OptionsError, ServiceError
from rft_dist.checkpoints.locate import resolve_checkpoint
from rft_models.policy.load import load_policy
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.evaluation.evaluator import EvaluationResult, Evaluator
from rft_trainer.evaluation.task_metrics import TaskMetrics
from rft_trainer.protocols import Collectives
from rft_trainer.records.rollouts import Prompt, Rollout
from rft_trainer.records.scores import Reward
from rft_trainer.rewards.routes import require_routes
from rft_trainer.runs.step_report import gather_rows, rollout_row


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of all prompts, and the rollouts of this rank: all of them on one process."""

    result: EvaluationResult
    prompts: list[Prompt]
    """Of this rank, as are the rollouts."""
    rollouts: list[list[Rollout]]
    """Those of each prompt."""

    @property
    def num_right(self) -> int:
        """Prompts whose answer was right; of several samples, all of them."""
        return sum(correct == 1 for correct in self.result.correct)

    @property
    def accuracy_interval(self) -> Interval:
        """The 95 % interval of the share of right answers, among those that were scored."""
        if self.result.num_samples == 1:
            return wilson_interval(self.num_right, self.result.num_scored)
        # samples of one prompt are alike: the prompts are what was drawn independently
        return mean_interval([float(correct) for correct in self.result.correct if correct is not None])

    @property
    def reward_interval(self) -> Interval:
        """The 95 % interval of the mean reward, of the answers that were scored."""
        return mean_interval([reward for reward in self.result.rewards if reward is not None])

    def rows(self, collectives: Collectives) -> list[dict[str, object]]:
        """Return prompt, response and reward of each rollout, those of all ranks; every rank calls it."""
        pairs = zip(self.prompts, self.rollouts, strict=True)
        return gather_rows(collectives, [[rollout_row(prompt, one) for one in group] for prompt, group in pairs])


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The model of a run's newest checkpoint that verifies, or of the checkpoint that was named."""

    run: Path
    model_directory: Path


def trained_model(path: Path, *, asked_by: str) -> TrainedModel:
    """Find the model that a run, or one of its checkpoints, holds; `asked_by` is the command for the remedy.

    Raises:
        CheckpointError: there is none, or none that verifies.
    """
    checkpoint = resolve_checkpoint(path, asked_by=asked_by).checkpoint
    return TrainedModel(checkpoint.path.parent.parent, checkpoint.model_directory)


def evaluate(settings: EvalSettings, machine: Machine, *, reward: Reward | None = None) -> Evaluation:
    """Score all prompts; every rank answers its share of them. `reward` takes the place of the named function.

    Raises:
        OptionsError: no data to evaluate on, or settings that the engine, the reward or the model refuse.
        ServiceError: no answer has a reward.
    """
    if not settings.data.eval_data:
        raise OptionsError(
            code="eval.no_data",
            what="eval_data is empty",
            where="--eval_data",
            why="there is nothing to score the model on",
            do="--eval_data test.jsonl",
        )
    settings = with_model_directories(settings)
    with ExitStack() as opened:
        return _evaluate(settings, machine, opened, reward)


def _evaluate(settings: EvalSettings, machine: Machine, opened: ExitStack, function: Reward | None) -> Evaluation:
    tokenizer = tokenizer_with_images(settings.model, settings.images)
    environment = enter_environment(settings.conversation, tokenizer, opened)
    trie, metrics = constraint_of(settings, tokenizer), TaskMetrics.of(settings.data.eval_metrics)
    prompts = _prompts(settings, tokenizer)
    prompts = environment.opened(prompts) if environment else prompts
    policy = load_policy(
        settings.model.pretrain, dtype=weights_dtype(settings.model.bf16), device=machine.device
    ).eval()
    response, longest = response_limits(settings, max(len(prompt.token_ids) for prompt in prompts))
    longest = environment.room(settings.model.pretrain, longest, response) if environment else longest
    engine = within(make_engine(settings.engine, machine, policy, settings.model.pretrain, longest), trie)
    reward = build_reward(settings, machine, function=function, columns=columns_of(prompts))
    try:
        evaluator = Evaluator(
            engine,
            tokenizer,
            reward,
            machine.collectives,
            prompts,
            sampling=sampling_options(settings.sampling, response, tokenizer.eos_ids),
            seed=settings.output.seed,
            conversations=environment.conversations(engine, longest) if environment else None,
            metrics=metrics,
            num_samples=settings.evaluation.eval_n,
        )
        result, rollouts = evaluator.with_rollouts()
    finally:
        reward.close()
    if result.num_scored == 0:
        raise ServiceError(
            code="eval.no_scores",
            what=f"none of the {len(prompts)} answers has a reward",
            where=f"reward function; first: {result.why_unscored}",
            why="an accuracy is a share of the answers that were scored",
            state="nothing was written",
            do="repair the reward, then the same command",
        )
    # in the order in which the evaluator shares the prompts out
    return Evaluation(result, prompts[machine.ranks.rank :: machine.ranks.world_size], rollouts)


def _prompts(settings: EvalSettings, tokenizer: HfTokenizer) -> list[Prompt]:
    read = partial(
        read_held_out,
        settings.data.eval_data,
        settings.data.eval_split,
        settings.data.max_eval_samples,
        settings.data,
        tokenizer,
        output_key=None,
        prompt_max_len=settings.sampling.prompt_max_len,
        images=row_images(settings.images, settings.output.seed),
        whole_rows=reads_columns(settings),
    )
    rendered, _ = with_label_column(lambda key: read(label_key=key), settings)
    require_routes(settings.reward, rendered)
    return as_prompts(rendered)


def change_interval(before: Sequence[float | None], after: Sequence[float | None]) -> Interval | None:
    """Return the paired 95 % interval of the mean change, over the prompts that both evaluations scored.

    None where fewer than two were.
    """
    pairs = [(float(a), float(b)) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    return paired_difference_interval([a for a, _ in pairs], [b for _, b in pairs]) if len(pairs) >= 2 else None
