"""Two evaluations of the same prompts, paired: the change, its interval, a test, and the prompts that changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rft_algos.evaluation.paired_tests import mcnemar_exact, sign_flip_test
from rft_algos.statistics import Interval, paired_difference_interval
from rft_core.errors import DataError
from rft_core.keyed_random import derive_key

MCNEMAR, SIGN_FLIPS = "McNemar's exact test", "sign-flip permutation test"


@dataclass(frozen=True, slots=True)
class PairedChange:
    """A measure of both evaluations over the prompts that both scored."""

    before: float
    after: float
    interval: Interval
    """Of the mean difference, after - before, with its 95 % ends."""
    p_value: float
    test: str


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """An evaluation (`after`) against another (`before`) of the same prompts."""

    accuracy: PairedChange
    reward: PairedChange
    num_pairs: int
    """Prompts that both scored."""
    num_unpaired: int
    """Prompts that one of them did not score."""
    num_better: int
    """Prompts with more right answers than before."""
    num_worse: int
    changed: tuple[Mapping[str, Any], ...]
    """Prompts whose share of right answers or whose mean reward changed, with both."""

    def as_record(self, other: str) -> dict[str, Any]:
        """Return it as JSON; `other` names what it is compared with."""
        return {"with": other, **asdict(self)}


def compare_rows(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], *, seed: int, where: str
) -> PairedComparison:
    """Compare readable rows of two evaluations prompt by prompt.

    Of right and wrong answers the test is McNemar's exact one; of shares of several samples, and of rewards, it is the
    sign-flip permutation test, its patterns drawn by the seed.

    Raises:
        DataError: they are not of the same prompts with the same labels, or fewer than two prompts have both scores.
    """
    ours, theirs = _grouped(after), _grouped(before)
    _require_same_prompts(theirs, ours, where)
    pairs = {name: (_scores(theirs[name]), _scores(ours[name])) for name in ours}
    scored = {name: (old, new) for name, (old, new) in pairs.items() if old is not None and new is not None}
    if len(scored) < 2:
        raise _refused(f"{len(scored)} prompts have a reward in both", where, "a paired interval needs at least two")
    accuracies = [(old[0], new[0]) for old, new in scored.values()]
    rewards = [(old[1], new[1]) for old, new in scored.values()]
    changed = [
        {
            "prompt_id": name,
            "correct": [old[0], new[0]],
            "reward": [old[1], new[1]],
            "responses": [[row.get("response") for row in side[name]] for side in (theirs, ours)],
        }
        for name, (old, new) in scored.items()
        if old != new
    ]
    return PairedComparison(
        accuracy=_change(accuracies, derive_key(seed, "paired accuracy")),
        reward=_change(rewards, derive_key(seed, "paired reward"), binary=False),
        num_pairs=len(scored),
        num_unpaired=len(pairs) - len(scored),
        num_better=sum(new > old for old, new in accuracies),
        num_worse=sum(new < old for old, new in accuracies),
        changed=tuple(changed),
    )


def _grouped(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(row.get("prompt_id")), []).append(row)
    return groups


def _require_same_prompts(
    theirs: Mapping[str, Sequence[Mapping[str, Any]]], ours: Mapping[str, Sequence[Mapping[str, Any]]], where: str
) -> None:
    missing = next((name for name in ours if name not in theirs), None)
    foreign = next((name for name in theirs if name not in ours), None)
    if missing is not None or foreign is not None:
        found = f"{missing} is missing" if missing is not None else f"{foreign} is not among the data"
        raise _refused(found, where, "a paired comparison is of the same prompts")
    for name, rows in ours.items():
        if rows[0].get("label") != theirs[name][0].get("label"):
            labels = f"{str(theirs[name][0].get('label'))[:40]!r} and {str(rows[0].get('label'))[:40]!r}"
            raise _refused(f"{name} has the labels {labels}", where, "it is another row under the same name")


def _scores(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """(share of right answers, mean reward) of the samples of a prompt that have a reward; None without any."""
    scored = [row for row in rows if row.get("reward") is not None]
    if not scored:
        return None
    return fmean(_is_correct(row) for row in scored), fmean(float(row["reward"]) for row in scored)


def _is_correct(row: Mapping[str, Any]) -> bool:
    if row.get("correct") is not None:
        return bool(row["correct"])
    # rows of `rollouts/`, and those written by hand
    return float((row.get("breakdown") or {}).get("correctness", row["reward"])) >= 1.0


def _change(pairs: Sequence[tuple[float, float]], key: int, *, binary: bool = True) -> PairedChange:
    old, new = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    interval = paired_difference_interval(old, new)
    if binary and all(value in (0.0, 1.0) for value in (*old, *new)):
        won, lost = (sum(b - a == sign for a, b in pairs) for sign in (1, -1))
        return PairedChange(fmean(old), fmean(new), interval, mcnemar_exact(won, lost), MCNEMAR)
    p_value = sign_flip_test([b - a for a, b in pairs], key=key)
    return PairedChange(fmean(old), fmean(new), interval, p_value, SIGN_FLIPS)


def _refused(what: str, where: str, why: str) -> DataError:
    return DataError(
        code="eval.not_comparable",
        what=what,
        where=where,
        why=why,
        do="evaluate both with the same --eval_data, and compare their rows",
    )
