"""Test of a reward model by itself: its preferences, and the numerical soundness of its scores."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rft.hub.run_settings import local_directory
from rft_algos.statistics import Interval, wilson_interval
from rft_core.errors import DataError, PreflightError
from rft_models.reward_model.loading import load_reward_model
from rft_models.reward_model.scorer import RewardTextScorer

_SUMS = [(f"{a}+{b}=", str(a + b), str(a + b + 1)) for a, b in ((1, 1), (2, 3), (4, 4), (12, 7), (20, 22), (35, 14))]
_TOGETHER = 1e-4
"""Largest distance of a score alone from the same score in a batch, relative to the largest score."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two responses to one prompt, of which one is better."""

    prompt: str
    messages: tuple[dict[str, Any], ...]
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Figures of a reward model on pairs."""

    heads: tuple[str, ...]
    pooling: str
    num_right: int
    """Pairs whose better response has the higher score."""
    figures: Mapping[str, float]
    """By name: pairs, prefers_chosen, mean_margin, lowest, highest, difference_alone."""

    @property
    def right_interval(self) -> Interval:
        """The 95 % interval of the share of pairs in the right order."""
        return wilson_interval(self.num_right, int(self.figures["pairs"]))


def probe_reward_model(directory: str, pairs_file: Path | None) -> ProbeReport:
    """Score pairs of responses, of a file or, without one, of a few sums.

    Raises:
        DataError: a directory that is no reward model, or a row without its fields.
        PreflightError: scores that cannot be trained on.
    """
    scorer = RewardTextScorer(load_reward_model(local_directory(directory, "--model")))
    pairs = read_pairs(pairs_file) if pairs_file is not None else _sums()
    chosen, rejected = _scores(scorer, pairs)
    figures = _report(scorer, pairs, chosen, rejected)
    num_right = sum(a > b for a, b in zip(chosen, rejected, strict=True))
    return ProbeReport(tuple(scorer.model.spec.heads), scorer.model.spec.pooling, num_right, figures)


def read_pairs(file: Path) -> list[Pair]:
    """The rows of a file; `DataError` with file and line for one without prompt, chosen and rejected, or no row."""
    pairs: list[Pair] = []
    # at line feeds alone: a text may hold another line separator, such as U+2028
    for number, line in enumerate(file.read_bytes().removesuffix(b"\n").split(b"\n"), start=1):
        try:
            row = json.loads(line)
            prompt, chosen, rejected = row["prompt"], row["chosen"], row["rejected"]
            turns = cast("list[dict[str, Any]]", prompt) if isinstance(prompt, list) else []
            messages = tuple(dict(turn) for turn in turns)
            if not isinstance(chosen, str) or not isinstance(rejected, str):
                raise TypeError("chosen and rejected are texts")
            if not isinstance(prompt, str) and not turns:
                raise TypeError("prompt is a text, or the turns of a conversation")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                code="data.pair",
                what=f"{type(error).__name__}: {error}",
                where=f"{file}:{number}",
                why="a line is a JSON object with prompt, chosen and rejected",
                do=f"correct line {number} of {file}",
            ) from error
        text = prompt if isinstance(prompt, str) else "\n".join(str(turn.get("content", "")) for turn in messages)
        pairs.append(Pair(text, messages, chosen, rejected))
    return pairs


def _sums() -> list[Pair]:
    return [Pair(prompt, (), chosen, rejected) for prompt, chosen, rejected in _SUMS]


def _scores(scorer: RewardTextScorer, pairs: Sequence[Pair]) -> tuple[list[float], list[float]]:
    """Weighted sums of the heads for chosen and rejected; those of heads without stated weights count once each."""
    prompts = [pair.prompt for pair in pairs]
    messages = [pair.messages for pair in pairs]
    weights = scorer.model.spec.weights or (1.0,) * len(scorer.heads)
    columns: list[list[float]] = []
    for texts in ([pair.chosen for pair in pairs], [pair.rejected for pair in pairs]):
        scores_by_response = scorer.score(prompts, messages, texts)
        columns.append([])
        for scores in scores_by_response:
            if isinstance(scores, str):
                raise _refused(f"a response has no score: {scores}", "every response of the test needs one")
            columns[-1].append(sum(w * scores[head] for w, head in zip(weights, scorer.heads, strict=True)))
    return columns[0], columns[1]


def _report(
    scorer: RewardTextScorer, pairs: Sequence[Pair], chosen: Sequence[float], rejected: Sequence[float]
) -> dict[str, float]:
    """Figures by name; `PreflightError` where they cannot be trained on."""
    everything = [*chosen, *rejected]
    if not all(map(math.isfinite, everything)):
        raise _refused("a score is not finite", "it would be a failed reward in every step")
    span = max(everything) - min(everything)
    # the same batch again must give the same bits; a pair by itself may differ by rounding
    again = max(map(abs, (a - b for a, b in zip(_scores(scorer, pairs)[0], chosen, strict=True))))
    single = max(abs(_scores(scorer, [pair])[0][0] - score) for pair, score in zip(pairs, chosen, strict=True))
    if span == 0.0:
        raise _refused(f"all {len(everything)} scores are {everything[0]:g}", "equal rewards teach nothing")
    if again > 0.0 or single > _TOGETHER * max(1.0, *map(abs, everything)):
        raise _refused(f"scores differ by {again:g} twice, by {single:g} alone", "a text has one score")
    right = sum(a > b for a, b in zip(chosen, rejected, strict=True))
    return {
        "pairs": len(pairs),
        "prefers_chosen": right / len(pairs),
        "mean_margin": sum(a - b for a, b in zip(chosen, rejected, strict=True)) / len(pairs),
        "lowest": min(everything),
        "highest": max(everything),
        "difference_alone": single,
    }


def _refused(what: str, why: str) -> PreflightError:
    return PreflightError(
        code="reward.model_unfit",
        what=what,
        where="--model",
        why=why,
        do="use another reward model, or other pairs (--pairs FILE)",
    )
