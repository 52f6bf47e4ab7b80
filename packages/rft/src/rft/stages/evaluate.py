"""Evaluation of a model on held-out rows: every prompt answered, and scored by the reward of the settings."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

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
from rft.resolved import with_values
from rft.reward_names import function_names, reads_columns
from rft.settings import EvalSettings
from rft.stages.evaluation_compare import ComparedWith, compared_with
from rft.stages.evaluation_output import checked_output, manifest_of, partial_rows, write_output
from rft_algos.statistics import Interval as Interval
from rft_algos.statistics import paired_difference_interval
from rft_core.checkpoint_places import run_of
from rft_core.errors import OptionsError, RftError, ServiceError
from rft_dist.checkpoints.locate import resolve_checkpoint
from rft_models.policy.load import load_policy
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.evaluation.breakdown import accuracy_by, require_column
from rft_trainer.evaluation.comparison import PairedChange as PairedChange
from rft_trainer.evaluation.comparison import PairedComparison as PairedComparison
from rft_trainer.evaluation.comparison import compare_rows
from rft_trainer.evaluation.evaluator import EvaluationResult, Evaluator
from rft_trainer.evaluation.partial_rows import PartialRows
from rft_trainer.evaluation.task_metrics import TaskMetrics
from rft_trainer.records.rollouts import Prompt
from rft_trainer.records.scores import Reward, remedy_of
from rft_trainer.rewards.routes import require_routes
from rft_trainer.rewards.voted_answers import answer_reader
from rft_trainer.runs.step_report import rollout_row
from rft_trainer.settings.evaluation import parse_ks


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of all prompts with the rows of all responses, the same on every rank."""

    result: EvaluationResult
    prompts: list[Prompt]
    rows: list[list[dict[str, Any]]]
    """Prompt, response and reward of each response, those of each prompt."""
    comparison: PairedComparison | None = None
    """This evaluation against the one of `--compare`."""
    accuracy_by: Mapping[str, Interval] = field(default_factory=dict[str, Interval])
    """Accuracy of the rows with each value of the column of `--eval_by`."""

    @property
    def num_right(self) -> int:
        """Prompts whose answer was right; of several samples, all of them."""
        return sum(correct == 1 for correct in self.result.correct)

    @property
    def accuracy_interval(self) -> Interval:
        """The 95 % interval of the share of right answers, among those that were scored."""
        return self.result.intervals()["accuracy"]

    @property
    def reward_interval(self) -> Interval:
        """The 95 % interval of the mean reward, of the answers that were scored."""
        return self.result.intervals()["reward"]

    def flat_rows(self) -> list[dict[str, Any]]:
        """Return the rows of all responses, in the order of the data."""
        return [row for group in self.rows for row in group]

    def figures(self, compared_with: str = "") -> dict[str, Any]:
        """Return metrics, intervals, the accuracy by a column, and the comparison, as JSON."""
        found: dict[str, Any] = {
            "metrics": self.result.as_record(),
            "intervals": {name: [one.low, one.high] for name, one in self.result.intervals().items()},
        }
        if self.accuracy_by:
            found["accuracy_by"] = {value: asdict(one) for value, one in self.accuracy_by.items()}
        if self.comparison is not None:
            found["compare"] = self.comparison.as_record(compared_with)
        return found


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
    return TrainedModel(run_of(checkpoint.path), checkpoint.model_directory)


def evaluate(settings: EvalSettings, machine: Machine, *, reward: Reward | None = None) -> Evaluation:
    """Score all prompts; every rank answers its share of them. `reward` takes the place of the named function.

    Where the settings name an output the first rank writes it; rows that a killed evaluation left are used again.

    Raises:
        OptionsError: no data to evaluate on, or settings that the engine, the reward or the model refuse.
        DataError: rows to compare with, or of an earlier start, that cannot be used.
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
    output, other = checked_output(settings.output.output), compared_with(settings.output.compare)
    settings = with_model_directories(settings)
    scored = _scored(settings, machine, reward, output, ".partial")
    found = scored.evaluation
    if other is not None:
        found = replace(found, comparison=_compared(settings, machine, reward, output, other, found))
    if output is not None and machine.is_first:
        write_output(output, scored.manifest, found.figures(other.name if other else ""), found.flat_rows())
        # only now: until the whole is on the disk they are what there is of it
        for suffix in (".partial", _OTHER_PARTIAL):
            partial_rows(output, scored.manifest, found.prompts, suffix).remove()
    return found


_OTHER_PARTIAL = ".compared.partial"


def _compared(
    settings: EvalSettings,
    machine: Machine,
    reward: Reward | None,
    output: Path | None,
    other: ComparedWith,
    ours: Evaluation,
) -> PairedComparison:
    """Compare with saved rows, or with those of a model that answers the same prompts under the same keys."""
    rows: Sequence[Mapping[str, Any]] = other.rows
    if other.model:
        theirs = with_values(settings, {"pretrain": other.model})
        rows = _scored(theirs, machine, reward, output, _OTHER_PARTIAL).evaluation.flat_rows()
    return compare_rows(rows, ours.flat_rows(), seed=settings.output.seed, where=f"--compare {other.name}")


@dataclass(frozen=True, slots=True)
class _Scored:
    """An evaluation with the manifest of its output; empty without an output."""

    evaluation: Evaluation
    manifest: dict[str, Any]


def _scored(
    settings: EvalSettings, machine: Machine, function: Reward | None, output: Path | None, suffix: str
) -> _Scored:
    with ExitStack() as opened:
        return _answered(settings, machine, opened, function, output, suffix)


def _answered(
    settings: EvalSettings,
    machine: Machine,
    opened: ExitStack,
    function: Reward | None,
    output: Path | None,
    suffix: str,
) -> _Scored:
    tokenizer = tokenizer_with_images(settings.model, settings.images)
    environment = enter_environment(settings.conversation, tokenizer, opened)
    trie, metrics = constraint_of(settings, tokenizer), TaskMetrics.of(settings.data.eval_metrics)
    if trie is not None and settings.sampling.num_beams > trie.num_sequences:
        # all sequences that there are: rows are counted, by this number
        settings = with_values(settings, {"num_beams": trie.num_sequences})
    prompts = _prompts(settings, tokenizer)
    if settings.output.eval_by:
        require_column(settings.output.eval_by, prompts)
    prompts = environment.opened(prompts) if environment else prompts
    manifest = manifest_of(settings, prompts, function) if output is not None else {}
    policy = load_policy(
        settings.model.pretrain, dtype=weights_dtype(settings.model.bf16), device=machine.device
    ).eval()
    response, longest = response_limits(settings, max(len(prompt.token_ids) for prompt in prompts))
    longest = environment.room(settings.model.pretrain, longest, response) if environment else longest
    engine = make_engine(settings.engine, machine, policy, settings.model.pretrain, longest)
    num_samples = settings.sampling.num_beams or settings.evaluation.eval_n
    engine = within(engine, trie, beams=settings.sampling.num_beams > 0)
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
            num_samples=num_samples,
            ks=parse_ks(settings.evaluation.eval_k, num_samples),
            answer_of=answer_reader(*function_names(settings)),
            pick=settings.evaluation.eval_pick,
            ranked=settings.sampling.num_beams > 0,
        )
        journal = partial_rows(output, manifest, prompts, suffix) if output is not None else None
        with _kept_answers(journal):
            result, rows = evaluator.with_rows(rollout_row, journal)
    finally:
        reward.close()
    if result.num_scored == 0:
        raise _no_scores(result, rows)
    column = settings.output.eval_by
    return _Scored(
        Evaluation(result, prompts, rows, accuracy_by=accuracy_by(column, prompts, result.correct) if column else {}),
        manifest,
    )


@contextmanager
def _kept_answers(journal: PartialRows | None) -> Generator[None]:
    """Let an error in the middle say that the answers so far are kept, where they are."""
    try:
        yield
    except RftError as error:
        if journal is not None and journal.path.exists():
            error.tell_state(f"the answers so far are in {journal.path}; the same command goes on with them")
        raise


def _no_scores(result: EvaluationResult, rows: Sequence[Sequence[Mapping[str, Any]]]) -> ServiceError:
    statuses = [str(row["status"]) for group in rows for row in group]
    return ServiceError(
        code="eval.no_scores",
        what=f"none of the {len(statuses)} answers has a reward",
        where=f"reward function; first: {result.why_unscored}",
        why="an accuracy is a share of the answers that were scored",
        state="nothing was written",
        do=remedy_of(statuses, "the same command", is_resumed=False),
    )


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
        whole_rows=reads_columns(settings) or bool(settings.output.eval_by),
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
