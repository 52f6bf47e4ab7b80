"""Ledger of the prompts trained on: every prompt exactly once an epoch, across kills and resumes.

A prompt's turn in an epoch is an entry. It is reserved when a rollout is planned for it, then
generated, scored and trained. A checkpoint stores the ledger beside the weights; what was in
flight at that moment is not in those weights, so after loading it is reserved again, first and in
its old order. Nothing is counted twice and nothing is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rft_core.errors import CheckpointError, OptionsError
from rft_trainer.data.prompts import HASH_SCHEME

_VERSION = 1


class EntryState(StrEnum):
    """State of a ledger entry; `DROPPED` is final like `TRAINED`: used up without an update, with a reason."""

    RESERVED = "reserved"
    GENERATED = "generated"
    SCORED = "scored"
    TRAINED = "trained"
    DROPPED = "dropped"


_NEXT = {
    EntryState.RESERVED: EntryState.GENERATED,
    EntryState.GENERATED: EntryState.SCORED,
    EntryState.SCORED: EntryState.TRAINED,
}


@dataclass(frozen=True, slots=True, order=True)
class LedgerEntry:
    """One prompt's turn: its epoch, its position in that epoch's order, and its global prompt index."""

    epoch: int
    position: int
    prompt_index: int


class Ledger:
    """Ledger that hands out prompts and tracks each until it is trained on.

    Args:
        num_prompts: prompts of an epoch.
        num_episodes: epochs until the ledger is finished.
        order: prompt indices of an epoch, in order; a function of the epoch alone.
        data_hash: what the prompts hash to; a state of other data is refused.
        seed: what `order` was made with; a state of another seed is refused.

    Example::

        ledger = Ledger(3, 1, lambda epoch: [2, 0, 1], data_hash="abc", seed=1)
        batch = ledger.reserve(2)            # prompts 2 and 0
        ledger.advance(batch, EntryState.GENERATED)
    """

    def __init__(
        self,
        num_prompts: int,
        num_episodes: int,
        order: Callable[[int], Sequence[int]],
        *,
        data_hash: str,
        seed: int,
    ) -> None:
        for name, value in (("prompts", num_prompts), ("num_episodes", num_episodes)):
            if value < 1:
                raise OptionsError(
                    code="ledger.nothing_to_do",
                    what=f"{name} = {value}; at least 1 is needed",
                    where="--num_episodes" if name == "num_episodes" else "--prompt_data",
                    why="a run needs a prompt and an episode",
                    do="--num_episodes 1" if name == "num_episodes" else "--prompt_data train.jsonl",
                )
        self.num_prompts, self.num_episodes = num_prompts, num_episodes
        self.data_hash, self.seed = data_hash, seed
        self._order = order
        self._orders: dict[int, Sequence[int]] = {}
        self._next = (0, 0)
        self._states: dict[LedgerEntry, EntryState] = {}
        self._waiting: list[LedgerEntry] = []
        self._num_trained = 0
        self._dropped: Counter[str] = Counter()

    @property
    def finished(self) -> bool:
        """Return whether every entry of every episode is trained or dropped."""
        return not self._states and not self._waiting and self._next[0] >= self.num_episodes

    @property
    def epoch(self) -> int:
        """The first epoch with an entry that is neither trained nor dropped; `num_episodes` when finished."""
        open_epochs = [entry.epoch for entry in (*self._states, *self._waiting)]
        return min([*open_epochs, self._next[0]])

    def reserve(self, num: int) -> list[LedgerEntry]:
        """Reserve up to `num` entries, all of one epoch: returned ones first, then new ones in order.

        Shorter at the end of an epoch, empty when everything has been handed out.
        """
        if num < 1:
            raise ValueError(f"cannot reserve {num} prompts")
        # an older epoch is completed first: what came back from a stop or a refill may belong to it
        epoch = self._waiting[0].epoch if self._waiting else self._next[0]
        entries = [entry for entry in self._waiting[:num] if entry.epoch == epoch]
        del self._waiting[: len(entries)]
        # new entries only of the same epoch: a batch never spans two
        if self._next[0] == epoch < self.num_episodes:
            entries += self._fresh(num - len(entries))
        self._states.update(dict.fromkeys(entries, EntryState.RESERVED))
        return entries

    def advance(self, entries: Iterable[LedgerEntry], state: EntryState) -> None:
        """Advance entries by one state: to generated, scored or trained. A skipped state is a `ValueError`."""
        entries = list(entries)
        # all are checked before any moves, so that an error leaves the ledger unchanged
        for entry in entries:
            current = self._entry_state(entry)
            if _NEXT[current] is not state:
                raise ValueError(f"{entry} is {current}: its next state is {_NEXT[current]}, not {state}")
        for entry in entries:
            if state is EntryState.TRAINED:
                del self._states[entry]
                self._num_trained += 1
            else:
                self._states[entry] = state
        self._forget_orders()

    def drop(self, entries: Iterable[LedgerEntry], reason: str) -> None:
        """Use entries up without training on them, counted under `reason` (a filter, an unscored rollout)."""
        for entry in list(entries):
            self._entry_state(entry)
            del self._states[entry]
            self._dropped[reason] += 1
        self._forget_orders()

    def give_back(self, entries: Iterable[LedgerEntry]) -> None:
        """Return entries in flight, to be reserved again before anything new."""
        for entry in list(entries):
            self._entry_state(entry)
            del self._states[entry]
            self._waiting.append(entry)
        # by epoch and position: what is given back is handed out in the order that it had
        self._waiting.sort()

    def counts(self) -> dict[str, int]:
        """Count the entries in each state so far; those that wait to be handed out again count as reserved."""
        by_state = Counter(self._states.values())
        counts = {str(state): by_state[state] for state in EntryState}
        counts[EntryState.RESERVED] += len(self._waiting)
        counts[EntryState.TRAINED] = self._num_trained
        counts[EntryState.DROPPED] = sum(self._dropped.values())
        return counts

    def dropped(self) -> dict[str, int]:
        """Return the number of entries used up without training, by reason."""
        return dict(self._dropped)

    def state(self) -> dict[str, Any]:
        """Return plain JSON: everything before `next` that is not listed under `in_flight` is used up."""
        return {
            "version": _VERSION,
            "data_hash": self.data_hash,
            "hash_scheme": HASH_SCHEME,
            "seed": self.seed,
            "num_prompts": self.num_prompts,
            "num_episodes": self.num_episodes,
            "next": list(self._next),
            "in_flight": sorted([e.epoch, e.position, e.prompt_index] for e in (*self._states, *self._waiting)),
            "trained": self._num_trained,
            "dropped": dict(self._dropped),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored state; what was in flight waits to be reserved again.

        More or fewer episodes than before are accepted. Raises `CheckpointError` for a state of
        other data, another seed or another form.
        """
        self._check_identity(state)
        epoch, position = (int(value) for value in state["next"])
        waiting = sorted(LedgerEntry(*(int(value) for value in entry)) for entry in state["in_flight"])
        dropped = {str(reason): int(num) for reason, num in state["dropped"].items()}
        # the counts must add up: a state that lost or doubled a prompt is refused here, and not found at the end
        handed_out = epoch * self.num_prompts + position
        used_up = int(state["trained"]) + sum(dropped.values())
        if used_up + len(waiting) != handed_out or len(set(waiting)) != len(waiting):
            raise _refused(
                "ledger.inconsistent",
                f"{used_up} used up + {len(waiting)} in flight is not the {handed_out} handed out",
                "every prompt that was handed out is either used up or in flight",
            )
        for entry in waiting:
            handed = 0 <= entry.position < self.num_prompts and (entry.epoch, entry.position) < (epoch, position)
            # the order itself is not stored: it is computed again, and must give the same prompts
            if not handed or self._order_of(entry.epoch)[entry.position] != entry.prompt_index:
                raise _refused(
                    "ledger.order",
                    f"prompt {entry.prompt_index} stood at position {entry.position} of epoch {entry.epoch}",
                    "the order of an epoch must be the one the checkpoint was made with",
                )
        # only after every check, so that a refused state changes nothing
        self._states, self._next, self._waiting = {}, (epoch, position), waiting
        self._num_trained, self._dropped = int(state["trained"]), Counter(dropped)
        self._forget_orders()

    def _fresh(self, num: int) -> list[LedgerEntry]:
        epoch, position = self._next
        order = self._order_of(epoch)
        stop = min(position + num, self.num_prompts)
        self._next = (epoch, stop) if stop < self.num_prompts else (epoch + 1, 0)
        return [LedgerEntry(epoch, index, int(order[index])) for index in range(position, stop)]

    def _order_of(self, epoch: int) -> Sequence[int]:
        if epoch not in self._orders:
            order = self._order(epoch)
            if len(order) != self.num_prompts:
                raise ValueError(f"the order of epoch {epoch} has {len(order)} of {self.num_prompts} prompts")
            self._orders[epoch] = order
        return self._orders[epoch]

    def _forget_orders(self) -> None:
        # an order has a number for each prompt: those of past epochs are not kept
        for epoch in [epoch for epoch in self._orders if epoch < self._next[0]]:
            del self._orders[epoch]

    def _entry_state(self, entry: LedgerEntry) -> EntryState:
        if entry not in self._states:
            raise ValueError(f"{entry} is not in flight")
        return self._states[entry]

    def _check_identity(self, state: Mapping[str, Any]) -> None:
        # the number before the hash: where it differs, the prompts are others, however they were hashed
        ours = {"version": _VERSION, "num_prompts": self.num_prompts, "data_hash": self.data_hash, "seed": self.seed}
        whys = {
            "version": "the ledger of the checkpoint has another form",
            "data_hash": "the prompts are not those the checkpoint was made with",
            "seed": "the order of the prompts follows from the seed",
            "num_prompts": "the prompts are not those the checkpoint was made with",
        }
        keys = {*ours, "next", "in_flight", "trained", "dropped"}
        # form first: the values below are read by name
        if missing := sorted(keys - state.keys()):
            raise _refused("ledger.form", f"the stored ledger lacks {', '.join(missing)}", whys["version"])
        for name, value in ours.items():
            if name == "data_hash" and state[name] != value and state.get("hash_scheme") != HASH_SCHEME:
                raise _hashed_otherwise(value, state)
            if state[name] != value:
                raise _refused(f"ledger.{name}", f"{name} is {value!r}, the checkpoint has {state[name]!r}", whys[name])


def _hashed_otherwise(ours: object, state: Mapping[str, Any]) -> CheckpointError:
    scheme = state.get("hash_scheme")
    return CheckpointError(
        code="ledger.hash_scheme",
        what=f"data_hash is {ours!r} by hash scheme {HASH_SCHEME}, the checkpoint has {state['data_hash']!r} by "
        + (f"hash scheme {scheme!r}" if scheme is not None else "the unnumbered scheme of an earlier version"),
        where="ledger of the checkpoint",
        why="another version of the program hashed the rows: the hashes cannot tell whether the prompts are the same",
        state="the checkpoint is untouched; nothing was started",
        do="where the prompt data, key names and prompt_max_len are those that the run's config.yaml records, "
        "the same command with --accept_changes prompt_data",
    )


def _refused(code: str, what: str, why: str) -> CheckpointError:
    return CheckpointError(
        code=code,
        what=what,
        where="ledger of the checkpoint",
        why=why,
        state="the checkpoint is untouched; nothing was started",
        do="give the prompt data, key names, prompt_max_len and seed that the run's config.yaml records",
    )
