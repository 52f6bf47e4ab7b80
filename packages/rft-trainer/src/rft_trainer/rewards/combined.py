"""Combination of several rewards: those that wait for a server start first, the rest is computed meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rft_core.errors import OptionsError
from rft_trainer.records.scores import Reward, RewardItem, Score
from rft_trainer.rewards.registry import part_names


@dataclass(frozen=True, slots=True)
class RewardComponent:
    """One reward of a combination, by name."""

    name: str
    reward: Reward
    waits: bool = False
    """Whether its time goes by in waiting for others, so that it may run beside the rest."""
    routed: tuple[str, ...] = ()
    """Names of its parts, where it is several that judge the rows of some sources each."""

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of its parts: its own, or those of the rewards behind its routes."""
        return self.routed or (self.name,)


class NoReward:
    """Reward of a run that learns from its teacher alone: 0 for every response."""

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        """Score the items."""
        return [Score(0.0) for _ in items]

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class CombinedReward:
    """Sum of the parts, or, with `weights`, the weighted sum of everything in their breakdowns.

    A response has a reward only where every part has one: a sum without a part is the sum of another task.
    """

    def __init__(self, parts: Sequence[RewardComponent], weights: Mapping[str, float] | None = None) -> None:
        """Store the parts and their weights.

        Args:
            parts: with different names.
            weights: by names of breakdowns; a part that it does not name counts nothing. None: each part once.
        """
        assert len({part.name for part in parts}) == len(parts), [part.name for part in parts]
        self._parts = tuple(parts)
        self._weights = weights

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        """Score the items; raise `OptionsError` where a weight names something that no breakdown has."""
        rows = list(zip(*self._all(items), strict=True))
        breakdowns = [self._breakdown(row) for row in rows]
        self._check_weights(breakdowns)
        return [self._sum(row, breakdown) for row, breakdown in zip(rows, breakdowns, strict=True)]

    def close(self) -> None:
        """Close the reward of every part."""
        for part in self._parts:
            part.reward.close()

    def _all(self, items: Sequence[RewardItem]) -> list[list[Score]]:
        """Return the scores of each part, in order."""
        waiting = [part for part in self._parts if part.waits]
        with ThreadPoolExecutor(max(len(waiting), 1), "reward") as threads:
            # the servers work while the rest is computed in this thread
            begun = {part.name: threads.submit(part.reward, items) for part in waiting}
            try:
                here = {part.name: part.reward(items) for part in self._parts if not part.waits}
                return [here[part.name] if part.name in here else begun[part.name].result() for part in self._parts]
            except BaseException:
                # whoever waits for a server that is away would keep the error here for as long
                for part in waiting:
                    part.reward.close()
                raise

    def _breakdown(self, row: Sequence[Score]) -> dict[str, float]:
        """Merge the breakdowns of all parts; a part without a breakdown is one entry under its name."""
        breakdown: dict[str, float] = {}
        for part, score in zip(self._parts, row, strict=True):
            own = dict(score.breakdown)
            if not own and score.value is not None:
                own = {part.name: score.value}
            breakdown |= own
        return breakdown

    def _sum(self, row: Sequence[Score], breakdown: Mapping[str, float]) -> Score:
        for part, score in zip(self._parts, row, strict=True):
            # the first part without a value gives its reason; the breakdown still shows what the others gave
            if score.value is None:
                detail = f"{part.name}: {score.detail}"
                return Score(None, score.status, breakdown=breakdown, detail=detail, failure=score.failure)
        if self._weights is None:
            value = sum(score.value for score in row if score.value is not None)
        else:
            value = sum(weight * breakdown.get(name, 0.0) for name, weight in self._weights.items())
        return Score(value, breakdown=breakdown, steps=next((score.steps for score in row if score.steps), ()))

    def _check_weights(self, breakdowns: Sequence[Mapping[str, float]]) -> None:
        known = {name for breakdown in breakdowns for name in breakdown}
        unknown = sorted(name for name in set(self._weights or {}) - known if not self._may_be_absent(name))
        # only where every response has parts: a failed one may lack the part that is named
        if unknown and known and all(len(breakdown) for breakdown in breakdowns):
            raise unknown_parts(self._weights or {}, unknown, known, "no weight of the model was changed by this step")

    def _may_be_absent(self, name: str) -> bool:
        """Return whether a part judges the rows of some sources, of which a call may hold none."""
        routed = (name for part in self._parts for name in part.routed)
        return any(name == part or name.startswith(f"{part}/") for part in routed)


def unknown_parts(
    weights: Mapping[str, float], unknown: Sequence[str], known: Collection[str], state: str
) -> OptionsError:
    """Return the error that `weights` names parts that are not there; the remedy keeps the weights of those that are.

    Args:
        weights: by names of parts.
        unknown: those of them that no part has.
        known: names of all parts.
        state: what the error leaves behind.
    """
    # a reward by its name may give a part of another name: exact gives correctness
    meant = {name: entries[0] for name in unknown if len(entries := part_names(name)) == 1 and entries[0] in known}
    kept = {meant.get(name, name): weight for name, weight in weights.items() if name in known or name in meant}
    outermost = sorted(name for name in known if name.rpartition("/")[0] not in known)
    kept = kept or dict.fromkeys(outermost, 1.0)
    return OptionsError(
        code="reward.unknown_part",
        what=f"reward_weights names {', '.join(unknown)}; the parts are {', '.join(sorted(known))}",
        where="--reward_weights",
        why="a weight for a part that does not exist would have no effect, unnoticed",
        state=state,
        do="--reward_weights " + ",".join(f"{name}={weight:g}" for name, weight in kept.items()),
    )
