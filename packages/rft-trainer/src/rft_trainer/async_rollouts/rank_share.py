"""Partition of the prompts over trainer ranks, and the exchange of the groups of a step.

Every rank has its own engines, threads and queue, for the prompts whose position in the epoch, modulo the number of
ranks, is its own. The ledger advances equally on all of them, so the assignment needs no communication; a step
begins with the exchange of its groups. Only the trainer's thread exchanges anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from rft_core.child_process import error_fields, error_of
from rft_core.errors import OutageError, PeerError, RftError
from rft_core.exact_records import exact_bytes, exact_value
from rft_trainer.batches.prompt_ledger import LedgerEntry
from rft_trainer.protocols import Collectives
from rft_trainer.records.rollouts import Prompt, RolloutGroup
from rft_trainer.rollouts.group_exchange import ExchangedGroups, encode_error, encode_groups, in_order


class RankPartition:
    """This rank's share of the prompts; without `collectives` there is one rank, and nothing is exchanged."""

    def __init__(self, collectives: Collectives | None) -> None:
        self._collectives = collectives
        self._size = collectives.world_size if collectives is not None else 1
        self._rank = collectives.rank if collectives is not None else 0

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the first, which writes the gathered state."""
        return self._rank == 0

    def owns(self, entry: LedgerEntry) -> bool:
        """Return whether this rank samples `entry`; also valid after a resume on another number of ranks."""
        return entry.position % self._size == self._rank

    def everyones(
        self, groups: Sequence[RolloutGroup], entries: Sequence[LedgerEntry], prompts: Sequence[Prompt]
    ) -> list[RolloutGroup]:
        """Gather the groups of all ranks in the order of `entries`; images are not sent, prompts come from `prompts`.

        Raises:
            OutageError: the reward server of another rank is away.
            PeerError: another rank has no groups, but an error.
        """
        if self._size == 1:
            return list(groups)
        assert self._collectives is not None
        parts = [ExchangedGroups(data) for data in self._collectives.gather_bytes(encode_groups(groups))]
        # the other ranks all read the same parts, so all of them raise, and the same error
        for rank, part in enumerate(parts):
            if part.error is not None:
                is_outage = part.error.get("kind") == OutageError.__name__
                raise error_of(part.error) if is_outage else _of_rank(rank, part.error)
        return in_order(parts, entries, prompts)

    def tell_error(self, error: Exception) -> None:
        """Send this rank's error instead of its groups, to the exchange in which the other ranks call `everyones`."""
        if self._collectives is not None and self._size > 1:
            with contextlib.suppress(PeerError):  # no other rank is left; this rank's own error is raised next
                self._collectives.gather_bytes(encode_error(_fields(error)))

    def all_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Gather the rows of all ranks."""
        if self._size == 1:
            return list(rows)
        return [row for part in self._gather({"rows": list(rows)}) for row in part["rows"]]

    def totals(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Sum figures over the ranks; of shares (`..._share`) return the mean."""
        if self._size == 1:
            return dict(figures)
        parts = [part["figures"] for part in self._gather({"figures": dict(figures)})]
        summed = {name: sum(part[name] for part in parts) for name in figures}
        return {name: value / self._size if name.endswith("_share") else value for name, value in summed.items()}

    def _gather(self, part: Mapping[str, Any]) -> list[dict[str, Any]]:
        assert self._collectives is not None
        return [exact_value(data) for data in self._collectives.gather_bytes(exact_bytes(part))]


def _fields(error: Exception) -> dict[str, str]:
    if isinstance(error, RftError):
        return error_fields(error)
    return {"what": f"{type(error).__name__}: {error}", "do": ""}


def _of_rank(rank: int, fields: Mapping[str, str]) -> PeerError:
    return PeerError(
        code="rollouts.other_rank",
        what=f"the rollouts of rank {rank} failed: {fields['what']}",
        where=f"rank {rank}, rollouts ahead of the trainer; its log is logs/rank_{rank}.log of the run",
        why="a step is trained on the samples of all ranks",
        state="no weight was changed by this step; the last checkpoint holds what was in flight then",
        do=fields["do"] or f"see logs/rank_{rank}.log, then rft-train resume RUN",
    )
