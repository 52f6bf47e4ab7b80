"""Verdict on a run: what its rows show to be wrong with it, each with its figures and one remedy.

Computed from rows that are written already, so that the end of a run, the pages of a run that was killed and a run that
goes on say the same. A finding is a statement about all or nearly all of the rows; where they are too few for one,
nothing is said. A run whose responses all have its highest reward after worse ones has solved its task: that is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from rft_trainer.runs.optional_files import OptionalFiles
from rft_trainer.runs.reader import RunFiles

Row = Mapping[str, Any]

NEARLY_ALL = 0.9
"""Share of the steps, from which on a finding holds that is not true of all of them."""
FEWEST_STEPS = 10
"""Steps below which nothing is said of a part of them or of a change."""
FEWEST_LOSSES = 30
"""Rows of a loss that falls slowly, below which noise hides its fall."""
LEAST_RISE = 0.05
"""Nats a token that a loss rises at least: one near 0 doubles by noise."""
CERTAIN = 4.0
"""Standard errors between the best rewards and the last, from which on they have collapsed."""
HUGE_REWARD = 1e15
"""A reward whose square, times a batch, leaves float32."""
HUGE_RATE = 0.05
"""Adam moves every weight by about the learning rate at each step, and weights are a few hundredths large."""


@dataclass(frozen=True, slots=True)
class RunFinding:
    """One thing that is wrong with a run."""

    code: str
    what: str
    """The fact, with its figures."""
    do: str
    """What to look at or to change."""

    def as_record(self) -> dict[str, str]:
        """Return the finding as plain JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The rows that a verdict is computed from."""

    rows: Sequence[Row]
    """Rows of metrics in the order of their steps."""
    evaluations: Sequence[Row] = ()
    steps: tuple[int, int] = (1, 0)
    """The first and the last step that are known to have been done in this directory; (1, 0) where none is."""
    rollouts: str = ""
    """File of the last rollouts that were kept; empty without any."""


def evidence_of(run: RunFiles) -> Evidence:
    """Return what the directory of a run holds; a run that goes on or was killed has evidence as well."""
    names = [*run.checkpoints, *(file.stem for file in run.rollout_files)]
    done = [int(number) for name in names if (number := name.removeprefix("step_")).isdecimal()]
    begun = [row["step"] for row in run.metrics[:1] if isinstance(row.get("step"), int)]
    # a run that begins with a checkpoint of another one has no row of the steps before it
    first = min([*begun, *(step for step in done if step)], default=1) if "ckpt_path" in run.settings else 1
    # below the run: its directory may be moved, and two runs of the same settings come to the same verdict
    rollouts = str(run.rollout_files[-1].relative_to(run.path)) if run.rollout_files else ""
    return Evidence(
        rows=run.metrics, evaluations=run.evaluations, steps=(first, max(done, default=0)), rollouts=rollouts
    )


def verdict(evidence: Evidence) -> list[RunFinding]:
    """Return the findings on a run, the most severe first; empty where nothing is wrong or too little is known."""
    rows = _with_step(evidence.rows)
    found = [_lost_rows(rows, *evidence.steps), _refused_updates(rows)]
    if any("sft/loss" in row for row in rows):
        found += [_bad_losses(rows) or _loss_that_did_not_fall(rows, evidence.evaluations)]
    else:
        # of these the first that holds: a constant reward has neither signal nor gradient
        found += [_lost_reward(rows, evidence) or _collapse(rows), _one_answer(rows, evidence)]
    return [finding for finding in found if finding is not None]


def unwritten(files: OptionalFiles) -> list[RunFinding]:
    """Return what a run could not write of the files that it can do without, which no row shows."""
    return [
        RunFinding(
            "rows_lost",
            f"{_counted(number, 'row')} of {name} could not be written: {files.reasons[name]}",
            "df -h and df -i before the next run; metrics and checkpoints are complete",
        )
        for name, number in sorted(files.lost.items())
    ]


def present_findings(rows: Sequence[Row], rollouts: str = "") -> list[RunFinding]:
    """Return the findings on the last steps of a run that goes on: those that its later steps cannot make untrue."""
    rows = _with_step(rows)
    found = [_refused_updates(rows), _bad_losses(rows), _lost_reward(rows, Evidence(rows=rows, rollouts=rollouts))]
    return [finding for finding in found if finding is not None]


def constant_reward(rows: Sequence[Row], rollouts: str = "") -> RunFinding | None:
    """Return the finding that all responses of the rows had one and the same reward; None where they had not."""
    return _constant_reward(_with_step(rows), Evidence(rows=rows, rollouts=rollouts))


def collapse(rows: Sequence[Row]) -> RunFinding | None:
    """Return the finding that rewards which were good end near the lowest; None where they do not."""
    return _collapse(_with_step(rows))


def rising_loss(rows: Sequence[Row]) -> RunFinding | None:
    """Return the finding that the loss of demonstrations rose; None where it did not."""
    found = _loss_that_did_not_fall(_with_step(rows), [])
    return found if found is not None and found.code == "loss_rose" else None


def _with_step(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if isinstance(row.get("step"), int)]


def _lost_reward(rows: Sequence[Row], evidence: Evidence) -> RunFinding | None:
    return _constant_reward(rows, evidence) or _no_signal(rows, evidence) or _no_gradient(rows)


def _lost_rows(rows: Sequence[Row], first: int, last: int) -> RunFinding | None:
    steps = [row["step"] for row in rows]
    # where the directory begins later than at step 1, from another run's checkpoint, so do its rows
    before, after = min([first, *steps[:1]]) - 1, max([last, *steps[-1:]]) + 1
    gaps = [(a + 1, b - 1) for a, b in pairwise([before, *steps, after]) if b - a > 1]
    if not gaps:
        return None
    number = sum(last - first + 1 for first, last in gaps)
    named = ", ".join(f"{first} to {last}" if last > first else f"{first}" for first, last in gaps[:3])
    return RunFinding(
        "metrics_lost",
        f"metrics.jsonl lacks {_counted(number, 'row')} of steps that were done: {named}{', ...' if gaps[3:] else ''}",
        "leave metrics.jsonl alone while a run goes on; a tracker, where there was one, has these rows",
    )


def _refused_updates(rows: Sequence[Row]) -> RunFinding | None:
    refused, applied = sum(_values(rows, "policy/updates_refused")), sum(_values(rows, "policy/updates"))
    if len(rows) < FEWEST_STEPS or not refused or refused < 0.2 * (refused + applied):
        return None
    return RunFinding(
        "updates_refused",
        f"{refused:.0f} of {refused + applied:.0f} optimizer updates were refused: their gradients were not finite",
        f"{_rate_flag(rows)} {max(_values(rows, 'policy/learning_rate'), default=0.0) / 10:.3g}",
    )


def _constant_reward(rows: Sequence[Row], evidence: Evidence) -> RunFinding | None:
    lowest, highest = _values(rows, "reward/min"), _values(rows, "reward/max")
    if not rows or min(len(lowest), len(highest)) < len(rows) or min(lowest) != max(highest):
        return None
    number = sum(_values(rows, "data/samples"))
    return RunFinding(
        "constant_reward",
        f"the reward was {highest[0]:.3g} for all {number:,.0f} responses of {_span(rows)}: {_share_of_signal(rows)}, "
        "and nothing was learned from them",
        _look_at_rollouts(rows, evidence),
    )


def _no_signal(rows: Sequence[Row], evidence: Evidence) -> RunFinding | None:
    silent = [row for row in rows if _is_silent(row)]
    if len(rows) < FEWEST_STEPS or len(silent) < NEARLY_ALL * len(rows) or _is_solved(rows):
        return None
    return RunFinding(
        "no_signal",
        f"in {len(silent)} of {len(rows)} steps ({_span(rows)}) no response had a better reward than another to its "
        f"prompt: mean reward {_first_and_last(rows, 'reward/mean')}, {_share_of_signal(rows)}",
        _rate_remedy(rows) or _look_at_rollouts(rows, evidence),
    )


def _is_silent(row: Row) -> bool:
    """Return True where no update could learn from the rewards of a step.

    Equal rewards in every group alone are not enough: with a baseline over the batch, groups teach by their difference.
    """
    if row.get("reward/groups_with_signal") != 0 or row.get("reward/min") is None:
        return False
    return row.get("reward/min") == row.get("reward/max") or row.get("policy/gradient_norm") == 0


def _no_gradient(rows: Sequence[Row]) -> RunFinding | None:
    # a mean over no update is no number, and stands in the row as null
    with_signal = [row for row in rows if row.get("reward/groups_with_signal") and row.get("policy/updates")]
    without = [row for row in with_signal if row.get("policy/gradient_norm") == 0]
    if not without or len(without) < NEARLY_ALL * len(with_signal):
        return None
    largest = max(
        (abs(value) for name in ("reward/min", "reward/max") for value in _values(without, name)), default=0.0
    )
    what = f"rewards differed, and the gradient was 0 all the same, in {len(without)} of {len(rows)} steps"
    if largest >= HUGE_REWARD:
        what += f": rewards as large as {largest:.3g} leave no advantage in float32"
        return RunFinding("no_gradient", what, "have the reward return numbers of about 1")
    look = "policy/clip_fraction, policy/ratio_clamped and drop/ in metrics.jsonl say what took it away"
    return RunFinding("no_gradient", what, _rate_remedy(rows) or look)


def _collapse(rows: Sequence[Row]) -> RunFinding | None:
    """Find rewards that were good for some steps and end near the lowest reward of the run.

    The difference is measured in standard errors of the best window. Its variance is at most (mean - lowest) (highest -
    mean), and a group counts as one observation, since responses to one prompt are alike: both too many rather than too
    few errors.
    """
    means = [row for row in rows if _is_number(row.get("reward/mean"))]
    if len(means) < FEWEST_STEPS:
        return None
    size = max(3, len(means) // 5)
    windows = [means[start : start + size] for start in range(len(means) - size + 1)]
    scores = [fmean(_values(window, "reward/mean")) for window in windows]
    best, last = max(scores), scores[-1]
    window = windows[scores.index(best)]
    lowest, highest = min(_values(means, "reward/min"), default=best), max(_values(means, "reward/max"), default=best)
    groups = sum(_values(window, "data/prompts"))
    error = math.sqrt(max(0.0, best - lowest) * max(0.0, highest - best) / groups) if groups > 0 else math.inf
    if last - lowest > 0.2 * (best - lowest) or best - last < CERTAIN * error or best == last:
        return None
    return RunFinding(
        "collapsed",
        f"the mean reward fell from {best:.3g} (steps {window[0]['step']} to {window[-1]['step']}) to {last:.3g} (the "
        f"last {size} steps); entropy {_first_and_last(rows, 'policy/entropy')}, "
        f"cut responses {_first_and_last(rows, 'completion/truncated_share')}",
        _rate_remedy(rows) or f"{_rate_flag(rows)} {_rate(rows) / 10:.3g}",
    )


def _one_answer(rows: Sequence[Row], evidence: Evidence) -> RunFinding | None:
    """Find a run that ends with one and the same response to different prompts, and has not solved its task by it."""
    same = 0
    for row in reversed(rows):
        if row.get("completion/distinct") != 1 or not sum(_values([row], "data/prompts")) > 1:
            break
        same += 1
    if same < max(3, len(rows) // 10) or _is_solved(rows):
        return None
    what = f"since step {rows[-same]['step']} the response to every prompt is one and the same"
    look = f"read it in {evidence.rollouts}" if evidence.rollouts else "--rollout_log_interval 1"
    if same == len(rows):
        return RunFinding("one_answer", what, _rate_remedy(rows) or look)
    return RunFinding("one_answer", what, _rate_remedy(rows) or f"{_rate_flag(rows)} {_rate(rows) / 10:.3g}")


def _bad_losses(rows: Sequence[Row]) -> RunFinding | None:
    bad = [row for row in rows if "sft/loss" in row and not _is_number(row["sft/loss"])]
    if not bad:
        return None
    return RunFinding(
        "loss_not_finite",
        f"the loss was not a finite number in {len(bad)} of {_counted(len(rows), 'step')}, first in step "
        f"{bad[0]['step']}",
        f"{_rate_flag(rows)} {_rate(rows) / 10:.3g}",
    )


def _loss_that_did_not_fall(rows: Sequence[Row], evaluations: Sequence[Row]) -> RunFinding | None:
    """Find a loss that is no lower at the end.

    Held-out rows, whose loss has no noise of batches, decide where there are any. A loss has risen where it is above
    twice that of the first step, which is of the weights that the run began with, or where every one of the last third
    is well above both that and the first third.
    """
    losses = _values(rows, "sft/loss")
    # an evaluation of the best weights, put back at the end, says nothing of the last ones
    held_out = _values([row for row in evaluations if "eval/best_step" not in row], "eval/loss")
    if len(losses) < FEWEST_STEPS or (len(held_out) > 1 and min(held_out[1:]) < held_out[0]):
        return None
    size = len(losses) // 3
    begin, end = losses[:size], losses[-size:]
    first, last = max(losses[0], 1e-9), fmean(end)
    many = len(losses) >= FEWEST_LOSSES
    if last <= LEAST_RISE:  # nothing is left to learn
        return None
    higher = last > 2 * first or min(end) > 1.2 * max(first, fmean(begin)) or (many and min(end) > 1.5 * first)
    rose = higher and last - first > LEAST_RISE
    if not rose and (not many or last < fmean(begin)):
        return None
    seen = f"; held out {held_out[0]:.4g} -> {held_out[-1]:.4g}" if len(held_out) > 1 else ""
    return RunFinding(
        "loss_rose" if rose else "loss_not_falling",
        f"the loss {'rose' if rose else 'did not fall'}: {losses[0]:.4g} in the first step, {last:.4g} on average in "
        f"the last {size}{seen}",
        _rate_remedy(rows) or (f"{_rate_flag(rows)} {_rate(rows) / 10:.3g}" if rose else _other_rate(rows)),
    )


def _other_rate(rows: Sequence[Row]) -> str:
    """Return the remedy for a loss that neither falls nor rises: mostly a rate that is too small to move it."""
    rate = _rate(rows)
    return f"{_rate_flag(rows)} {rate * 10 if rate < 1e-3 else rate / 10:.3g}"


def _is_solved(rows: Sequence[Row]) -> bool:
    """Return True where a run ends with its highest reward throughout, and began with less."""
    means, highest = _values(rows, "reward/mean"), _values(rows, "reward/max")
    if not means:
        return False
    best, last = max(highest), means[-max(1, len(means) // 10) :]
    return fmean(last) >= best - 0.02 * abs(best) and means[0] < fmean(last)


def _look_at_rollouts(rows: Sequence[Row], evidence: Evidence) -> str:
    cut = _values(rows, "completion/truncated_share")
    if cut and fmean(cut) >= NEARLY_ALL:
        longest = max(_values(rows, "completion/length_max"), default=0)
        return f"--generate_max_len {max(2 * longest, 1):.0f}: {fmean(cut):.0%} of the responses were cut at the limit"
    # what a function of one's own is given is the first thing to look at where its value never changes
    asked = "rft-train check rl with the same flags shows what the reward is given and returns"
    if not evidence.rollouts:
        return f"--rollout_log_interval 1, and compare response, label and reward in the rows of rollouts/; {asked}"
    return f"compare response, label and reward in {evidence.rollouts}; {asked}"


def _rate_remedy(rows: Sequence[Row]) -> str:
    """Return the remedy for a rate that moves every weight further than it is large; empty for a smaller rate."""
    rate = _rate(rows)
    if rate <= HUGE_RATE:
        return ""
    return f"{_rate_flag(rows)} 1e-5, from the start: {rate:.3g} moves every weight further than it is large"


def _rate(rows: Sequence[Row]) -> float:
    return max(_values(rows, "policy/learning_rate"), default=0.0)


def _rate_flag(rows: Sequence[Row]) -> str:
    return "--learning_rate" if any("sft/loss" in row for row in rows) else "--actor_learning_rate"


def _share_of_signal(rows: Sequence[Row]) -> str:
    share = fmean(_values(rows, "reward/groups_with_signal") or [0.0])
    return f"{share:.2%} of the groups had rewards that differ" if share else "no group had rewards that differ"


def _first_and_last(rows: Sequence[Row], name: str) -> str:
    values = _values(rows, name)
    return f"{values[0]:.3g} -> {values[-1]:.3g}" if values else "unknown"


def _span(rows: Sequence[Row]) -> str:
    first, last = rows[0]["step"], rows[-1]["step"]
    return f"step {last}" if first == last else f"steps {first} to {last}"


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return list(_numbers(rows, name))


def _numbers(rows: Sequence[Row], name: str) -> Iterator[float]:
    for row in rows:
        if _is_number(row.get(name)):
            yield float(row[name])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
