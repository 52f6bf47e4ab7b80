"""The rollout thread: what is drawn next, with which version of the weights, and until when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rft_core.fault_points import declare, fault_point
from rft_trainer.async_rollouts.partial_rollout import PartialGroup
from rft_trainer.async_rollouts.protocols import AheadEngine, PartialRollout
from rft_trainer.async_rollouts.shared_state import LOOK_SECONDS, SharedState, TrainerRequest
from rft_trainer.data.media_cache import load_media
from rft_trainer.records.rollouts import Prompt, Sampling

POINT_GROUP_DRAWN = declare("async.group_drawn", "every sample of a prompt is drawn, none has its reward")

_ANSWERED_SHARE = 4  # a draw ends for samples that were answered when they are a quarter of those it still draws


@dataclass(slots=True)
class WorkItem:
    """What the rollout thread does next."""

    version: int
    generation: int
    groups: list[PartialGroup] = field(default_factory=list[PartialGroup])
    errand: TrainerRequest | None = None


class GenerationLoop:
    """Serves versions, draws samples and runs errands, one after another."""

    def __init__(self, board: SharedState, engine: AheadEngine, sampling: Sampling, *, deterministic: bool) -> None:
        self._board, self._engine, self._sampling, self._deterministic = board, engine, sampling, deterministic

    def run(self) -> None:
        """Until the board closes."""
        while (turn := self._next_turn()) is not None:
            noted = self._board.noted
            if self._engine.weight_version != turn.version:
                with noted(f"gives version {turn.version} to the engines"):
                    self._engine.serve(turn.version)
            if turn.errand is not None:
                with noted(f"generates with version {turn.version} for the trainer"):
                    self._carry_out(turn.errand)
            else:
                with noted(f"draws {len(turn.groups)} groups with version {turn.version}"):
                    self._draw(turn)

    def _next_turn(self) -> WorkItem | None:
        """Waits for work; None at the end."""
        board = self._board
        with board.changed:
            while not board.is_closing:
                if (turn := self._choose()) is not None:
                    board.answered = 0
                    return turn
                board.changed.wait(LOOK_SECONDS)
        return None

    def _choose(self) -> WorkItem | None:
        """What comes first: in a deterministic run older versions, elsewhere whoever waits in the trainer's thread."""
        board = self._board
        open_groups = [held for held in board.groups.values() if not held.is_whole]
        if self._deterministic:
            return self._choose_in_order(open_groups)
        if board.errands:
            return WorkItem(board.version, board.generation, errand=board.errands.popleft())
        ready = [held for held in open_groups if any(draft.can_draw for draft in held.drafts)]
        return WorkItem(board.version, board.generation, ready) if ready else None

    def _choose_in_order(self, open_groups: Sequence[PartialGroup]) -> WorkItem | None:
        """Nothing depends on the clock: a batch alone, and its next draw when all who ask are answered."""
        board = self._board
        first = min(open_groups, key=lambda held: (held.version, held.batch), default=None)
        if board.errands and (first is None or first.version >= board.errands[0].version):
            errand = board.errands.popleft()
            return WorkItem(errand.version, board.generation, errand=errand)
        if first is None:
            return None
        batch = [held for held in open_groups if held.batch == first.batch]
        if any(draft.can_ask for held in batch for draft in held.drafts):
            return None
        return WorkItem(first.version, board.generation, batch)

    def _carry_out(self, errand: TrainerRequest) -> None:
        try:
            errand.result = errand.run()
        except Exception as error:  # noqa: BLE001 - raised in the thread that asked
            errand.error = error
        with self._board.changed:
            errand.is_done = True
            self._board.moved()

    def _draw(self, turn: WorkItem) -> None:
        """All samples of the groups that can be drawn on, until they have ended or something changed."""
        board, given = self._board, self._sampling
        owners = [(held, draft) for held in turn.groups for draft in held.drafts if draft.can_draw]
        requests = [draft.request(held.prompt) for held, draft in owners]
        left = [len(owners)]
        for one in self._engine.draw(
            [asked.prefix for asked in requests],
            [asked.key for asked in requests],
            [asked.start for asked in requests],
            [asked.budget for asked in requests],
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            min_p=given.min_p,
            min_new_tokens=given.min_new_tokens,
            stop_token_ids=given.stop_token_ids,
            first_token_temperature=given.first_token_temperature,
            stop=self._stop(turn, left),
            **_media_arguments([held.prompt for held, _ in owners]),
        ):
            held, draft = owners[one.request]
            with board.changed:
                draft.add(one)
                left[0] -= 1
                self._note(held, draft)
                is_whole = held.is_whole
            if is_whole:
                fault_point(POINT_GROUP_DRAWN)
                with board.changed:
                    board.queue_if_whole(held)

    def _note(self, held: PartialGroup, draft: PartialRollout) -> None:
        self._board.touch()
        if draft.can_ask:
            self._board.changed.notify_all()

    def _stop(self, turn: WorkItem, left: Sequence[int]) -> Callable[[], bool]:
        """Whether a draw ends before its samples do; `left[0]` of them have not been handed out."""
        board = self._board
        if self._deterministic:
            return lambda: board.is_closing
        return lambda: (
            board.is_closing
            or board.generation != turn.generation
            or _ANSWERED_SHARE * board.answered >= max(left[0], 1)
        )


def _media_arguments(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What an engine is told of images: nothing where there are none, so that an engine of text needs no word."""
    if all(prompt.media is None for prompt in prompts):
        return {}
    loaded = {id(prompt): load_media(prompt.media) for prompt in {id(prompt): prompt for prompt in prompts}.values()}
    return {"media": [loaded[id(prompt)] for prompt in prompts]}
