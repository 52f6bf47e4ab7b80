"""Test of a step reward model by itself: which steps of rows it calls good, and where it sees the first error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rft.hub.sources import located_sources
from rft_core.errors import PreflightError
from rft_models.reward_model.loading import load_reward_model
from rft_models.reward_model.spec import StepSpec
from rft_models.reward_model.step_scorer import StepTextScorer
from rft_trainer.data.preference_rows.labelled_steps import LabelledSteps, load_steps
from rft_trainer.data.preference_rows.preference_columns import StepKeys
from rft_trainer.data.sources import rows_of_source
from rft_trainer.evaluation.step_evaluator import StepEvaluation
from rft_trainer.settings.reward_model import RmTestDataSettings


@dataclass(frozen=True, slots=True)
class StepTest:
    """Outcome of a test on labelled steps."""

    evaluation: StepEvaluation
    rows: tuple[LabelledSteps, ...]
    scores: tuple[tuple[float, ...], ...]
    """A logit a step of each row."""

    def records(self) -> list[dict[str, object]]:
        """Return a record a row: its texts, labels, and the probability that each step is right."""
        return [
            {
                "prompt": [message.as_dict() for message in row.prompt.messages or ()] or row.prompt.text,
                "completions": list(row.steps),
                "labels": list(row.labels),
                "probabilities": [float(p) for p in torch.tensor(scores, dtype=torch.float64).sigmoid()],
            }
            for row, scores in zip(self.rows, self.scores, strict=True)
        ]


def has_steps(data: RmTestDataSettings) -> bool:
    """Return whether the rows of a test have the columns of labelled steps."""
    specs = located_sources(data.eval_data, split=data.eval_split, flag="--eval_data")
    rows = rows_of_source(specs[0], split=data.eval_split or None)
    return bool(rows) and {data.completions_key, data.labels_key} <= rows[0].fields.keys()


def score_labelled_steps(directory: str, data: RmTestDataSettings, *, bf16: bool, device: str) -> StepTest:
    """Score the labelled steps of the rows.

    Raises:
        DataError: as `load_steps`, and for a directory that is no reward model.
        PreflightError: a row that has no scores, or scores that are not finite.
    """
    model = load_reward_model(directory, dtype=torch.bfloat16 if bf16 else torch.float32, device=device)
    scorer = StepTextScorer(model)
    rows = read_steps(data, scorer.steps)
    messages = [[message.as_dict() for message in row.prompt.messages or ()] for row in rows]
    found = scorer.score_steps([row.prompt.text or "" for row in rows], messages, [row.steps for row in rows])
    scores: list[tuple[float, ...]] = []
    for row, one in zip(rows, found, strict=True):
        if isinstance(one, str) or not bool(torch.tensor(one).isfinite().all()):
            raise PreflightError(
                code="reward.steps_unfit",
                what=f"row {row.prompt.prompt_id}: {one if isinstance(one, str) else 'a score is not finite'}",
                where="--eval_data",
                why="every row of the test needs a score a step",
                do="remove the row, or use another reward model",
            )
        scores.append(tuple(one))
    steps = [
        (score, label, number, row.weight)
        for number, (row, one) in enumerate(zip(rows, scores, strict=True))
        for score, label in zip(one, row.labels, strict=True)
        if label is not None
    ]
    scores_N, labels_N, rows_N, weights_N = torch.tensor(steps, dtype=torch.float64).unbind(1)
    return StepTest(StepEvaluation(scores_N, labels_N, rows_N.long(), weights_N), tuple(rows), tuple(scores))


def read_steps(data: RmTestDataSettings, steps: StepSpec) -> Sequence[LabelledSteps]:
    """Read the rows as training reads them, for a model with this separator."""
    specs = located_sources(data.eval_data, split=data.eval_split, flag="--eval_data")
    keys = StepKeys(prompt=data.input_key, steps=data.completions_key, labels=data.labels_key)
    rows = load_steps(specs, keys, steps.separator, split=data.eval_split or None).rows
    return rows[: data.max_eval_samples] if data.max_eval_samples else rows
