"""`rft-train eval`: score a model on held-out data; `rft-train eval RUN` takes everything from a run."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from rft.build.engines import make_engine
from rft.build.environment import enter_environment
from rft.build.images import codec_with_images, row_images
from rft.build.prompt_data import as_prompts, read_held_out
from rft.build.rewards import build_reward
from rft.build.rl_data import response_limits
from rft.parallel.parallelize import weights_dtype
from rft.process.machine import Machine, open_machine
from rft.resolved import Resolved
from rft.settings import EvalSettings
from rft_algos.statistics import mean_interval, wilson_interval
from rft_cli.config.resolve import resolve
from rft_cli.config.stored_run import as_words, read_values
from rft_core.errors import OptionsError
from rft_dist.checkpoints.locate import resolve_checkpoint
from rft_models.policy.load import load_policy
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.evaluation.evaluator import EvaluationResult, Evaluator
from rft_trainer.records.rollouts import Prompt, Rollout
from rft_trainer.runs.step_report import rollout_row


def run(argv: list[str]) -> int:
    """Resolve, answer every prompt once, print the score as a person reads it and as one JSON line."""
    words = words_of_run(Path(argv[0]), argv[1:], "eval") if argv and not argv[0].startswith("-") else argv
    resolved = resolve("eval", words)
    with open_machine(resolved.settings.model.device) as machine:
        result, rollouts, prompts = evaluate(resolved, machine)
        if machine.is_first:
            _show(resolved, result)
            if resolved.settings.output.output:
                rows = [rollout_row(prompt, rollout) for prompt, rollout in zip(prompts, rollouts, strict=True)]
                text = "".join(json.dumps(row) + "\n" for row in rows)
                Path(resolved.settings.output.output).write_text(text)
    return 0


_OF_TRAINING = (
    *("pretrain", "temperature", "top_p", "top_k", "min_p"),
    *("prompt_data", "max_samples", "n_samples_per_prompt", "shuffle_images"),
)
"""Settings of a run that say how it trained, not how it is evaluated."""


def words_of_run(path: Path, overrides: list[str], command: str) -> list[str]:
    """The flags that repeat what a run did, on its newest checkpoint; given flags come last and win.

    The run's sampling is left out: an evaluation is greedy unless flags say otherwise.
    """
    checkpoint = resolve_checkpoint(path, asked_by=f"rft-train {command}").checkpoint
    run = checkpoint.path.parent.parent
    values = read_values(run / "config.yaml")
    training_only = (
        "pretrain",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "prompt_data",
        "max_samples",
        "n_samples_per_prompt",
        "shuffle_images",
    )
    for name in training_only:
        values.pop(name, None)
    return [*as_words(values, command), "--pretrain", str(checkpoint.model_directory), *overrides]


def evaluate(
    resolved: Resolved[EvalSettings], machine: Machine
) -> tuple[EvaluationResult, list[Rollout], list[Prompt]]:
    """Score all prompts; the rollouts are those of this rank, all of them on one process."""
    settings = resolved.settings
    if not settings.data.eval_data:
        raise OptionsError(
            code="eval.no_data",
            what="eval_data is empty",
            where="--eval_data",
            why="there is nothing to score the model on",
            do="--eval_data test.jsonl",
        )
    with ExitStack() as opened:
        return _evaluate(settings, machine, opened)


def _evaluate(
    settings: EvalSettings, machine: Machine, opened: ExitStack
) -> tuple[EvaluationResult, list[Rollout], list[Prompt]]:
    codec = codec_with_images(settings.model, settings.images)
    environment = enter_environment(settings.conversation, codec, opened)
    prompts = _prompts(settings, codec)
    prompts = environment.opened(prompts) if environment else prompts
    policy = load_policy(
        settings.model.pretrain, dtype=weights_dtype(settings.model.bf16), device=machine.device
    ).eval()
    response, longest = response_limits(settings, max(len(prompt.token_ids) for prompt in prompts))
    longest = environment.room(settings.model.pretrain, longest, response) if environment else longest
    engine = make_engine(settings.engine, machine, policy, settings.model.pretrain, longest)
    reward = build_reward(settings, machine)
    try:
        evaluator = Evaluator(
            engine,
            codec,
            reward,
            machine.collectives,
            prompts,
            max_new_tokens=response,
            stop_token_ids=codec.eos_ids,
            temperature=settings.sampling.temperature,
            top_p=settings.sampling.top_p,
            top_k=max(settings.sampling.top_k, 0),
            min_p=settings.sampling.min_p,
            seed=settings.output.seed,
            conversations=environment.conversations(engine, longest) if environment else None,
        )
        result, rollouts = evaluator.with_rollouts()
    finally:
        reward.close()
    return result, rollouts, prompts[machine.ranks.rank :: machine.ranks.world_size]


def _prompts(settings: EvalSettings, codec: HfTokenizer) -> list[Prompt]:
    rendered = read_held_out(
        settings.data.eval_data,
        settings.data.eval_split,
        settings.data.max_eval_samples,
        settings.data,
        codec,
        label_key=settings.data.label_key,
        output_key=None,
        prompt_max_len=settings.sampling.prompt_max_len,
        images=row_images(settings.images, settings.output.seed),
    )
    return as_prompts(rendered)


def _show(resolved: Resolved[EvalSettings], result: EvaluationResult) -> None:
    settings = resolved.settings
    right = sum(correct is True for correct in result.correct)
    share = wilson_interval(right, result.num_scored)
    scored = [reward for reward in result.rewards if reward is not None]
    interval = mean_interval(scored)
    print(f"model     {settings.model.pretrain}")
    print(f"data      {settings.data.eval_data}: {len(result.rewards):,} problems")
    bounds = f"95 %: {share.low:.4f} to {share.high:.4f}"
    print(f"accuracy  {result.accuracy:.4f}  ({right:,} of {result.num_scored:,}; {bounds})")
    print(f"reward    {result.mean_reward:.4f}  (95 %: {interval.low:.4f} to {interval.high:.4f})")
    print(f"tokens    {result.mean_tokens:.1f} an answer; {result.num_truncated:,} were cut at the limit")
    if result.num_scored < len(result.rewards):
        print(f"unscored  {len(result.rewards) - result.num_scored:,}: in none of the figures above")
    print(json.dumps(result.as_record()))
