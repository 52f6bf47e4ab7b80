"""The rollout thread: chooses what is sampled next, with which weight version, and until when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.fault_points import declare, fault_point
from rft_trainer.async_rollouts.partial_rollout import PartialGroup
from rft_trainer.async_rollouts.protocols import AsyncEngine, PartialRollout
from rft_trainer.async_rollouts.shared_state import LOOK_SECONDS, SharedState, TrainerRequest
from rft_trainer.data.media_cache import media_of

POINT_GROUP_DRAWN = declare("async.group_drawn", "every sample of a prompt is drawn, none has its reward")

_ANSWERED_SHARE = 4  # a draw ends for samples that were answered when they are a quarter of those it still draws


@dataclass(slots=True)
class WorkItem:
    """Next piece of work of the rollout thread: groups to sample, or a request of the trainer."""

    version: int
    generation: int
    groups: list[PartialGroup] = field(default_factory=list[PartialGroup])
    request: TrainerRequest | None = None


class GenerationLoop:
    """Loop of the rollout thread: serves weight versions, samples, and runs the trainer's requests, one at a time."""

    def __init__(
        self, board: SharedState, engine: AsyncEngine, sampling: SamplingOptions, *, deterministic: bool
    ) -> None:
        self._board, self._engine, self._sampling, self._deterministic = board, engine, sampling, deterministic

    def run(self) -> None:
        """Run until the shared state closes."""
        while (turn := self._next_turn()) is not None:
            noted = self._board.noted
            # only here, between two draws: within one, every token has the version that the draw began with
            if self._engine.weight_version != turn.version:
                with noted(f"gives version {turn.version} to the engines"):
                    self._engine.serve(turn.version)
            if turn.request is not None:
                with noted(f"generates with version {turn.version} for the trainer"):
                    self._carry_out(turn.request)
            else:
                with noted(f"draws {len(turn.groups)} groups with version {turn.version}"):
                    self._draw(turn)

    def _next_turn(self) -> WorkItem | None:
        """Wait for work and return it; None at the end."""
        board = self._board
        with board.changed:
            while not board.is_closing:
                # under the same lock as the choice, so that no answer is counted that this work already covers
                if (turn := self._choose()) is not None:
                    board.answered = 0
                    return turn
                board.changed.wait(LOOK_SECONDS)
        return None

    def _choose(self) -> WorkItem | None:
        """Choose the next work: older versions first in a deterministic run, else a waiting trainer's request first."""
        board = self._board
        open_groups = [group for group in board.groups.values() if not group.is_complete]
        if self._deterministic:
            return self._choose_in_order(open_groups)
        if board.requests:  # the trainer's thread waits for these
            return WorkItem(board.version, board.generation, request=board.requests.popleft())
        ready = [group for group in open_groups if any(draft.needs_generation for draft in group.drafts)]
        return WorkItem(board.version, board.generation, ready) if ready else None

    def _choose_in_order(self, open_groups: Sequence[PartialGroup]) -> WorkItem | None:
        """Choose work independently of the clock: one batch alone, continued when all its samples are answered."""
        board = self._board
        # the oldest weights first: an engine never goes back to a version that it has left
        first = min(open_groups, key=lambda group: (group.version, group.batch), default=None)
        # an evaluation waits until all samples of older versions are drawn, for the same reason
        if board.requests and (first is None or first.version >= board.requests[0].version):
            request = board.requests.popleft()
            return WorkItem(request.version, board.generation, request=request)
        if first is None:
            return None
        batch = [group for group in open_groups if group.batch == first.batch]
        # not before every answer is there: which ones came first depends on the clock
        if any(draft.awaits_environment for group in batch for draft in group.drafts):
            return None
        return WorkItem(first.version, board.generation, batch)

    def _carry_out(self, request: TrainerRequest) -> None:
        try:
            # without the lock: an evaluation takes long, and scoring goes on beside it
            request.result = request.run()
        except Exception as error:  # noqa: BLE001 - raised in the thread that asked
            request.error = error
        with self._board.changed:
            request.is_done = True
            self._board.moved()

    def _draw(self, turn: WorkItem) -> None:
        """Sample all groups of a work item that can continue, until they have ended or something changed."""
        board = self._board
        owners = [(group, draft) for group in turn.groups for draft in group.drafts if draft.needs_generation]
        requests = [draft.request(group.prompt) for group, draft in owners]
        # a list, so that the predicate below sees the number fall
        left = [len(owners)]
        for one in self._engine.draw(
            [asked.prefix for asked in requests],
            [asked.key for asked in requests],
            [asked.start for asked in requests],
            [asked.budget for asked in requests],
            self._sampling,
            media=media_of([group.prompt.media for group, _ in owners]),
            stop=self._stop(turn, left),
        ):
            group, draft = owners[one.request]
            # the lock is held only to record the tokens, never while the engine generates
            with board.changed:
                draft.add(one)
                left[0] -= 1
                self._note(group, draft)
                is_complete = group.is_complete
            # scoring begins with the first complete group, not at the end of the draw
            if is_complete:
                fault_point(POINT_GROUP_DRAWN)
                with board.changed:
                    board.queue_if_complete(group)

    def _note(self, group: PartialGroup, draft: PartialRollout) -> None:
        self._board.touch()
        if draft.awaits_environment:
            self._board.changed.notify_all()

    def _stop(self, turn: WorkItem, left: Sequence[int]) -> Callable[[], bool]:
        """Return the predicate that interrupts a draw early; `left[0]` of its samples have not been handed out."""
        board = self._board
        if self._deterministic:
            # whatever arrives meanwhile: where a draw ends must not depend on the clock
            return lambda: board.is_closing
        return lambda: (
            board.is_closing
            or board.generation != turn.generation
            or _ANSWERED_SHARE * board.answered >= max(left[0], 1)
        )
