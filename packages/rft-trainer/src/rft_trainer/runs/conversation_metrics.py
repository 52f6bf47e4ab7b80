"""Conversations as metrics of a step and as readable rows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rft_trainer.records.rollouts import Rollout
from rft_trainer.records.scores import RewardStatus


def conversation_metrics(rollouts: Sequence[Rollout]) -> dict[str, object]:
    """Compute metrics of turns, tool calls and environments over a step's rollouts; empty without conversations.

    turn/count_mean, turn/count_max   sampled turns of a rollout
    turn/limit_share                  rollouts that ended because they had all the turns they may have
    turn/observation_tokens_mean      tokens of a rollout that the environment put in
    turn/call_share                   sampled turns with a well-formed tool call
    tool/calls_mean                   well-formed calls of a rollout
    tool/well_formed_share            of all calls, those that could be read (left out where there was none)
    environment/<status>_share        rollouts whose environment ended ok, failed, timeout or crashed
    """
    conversations = [rollout for rollout in rollouts if rollout.turns]
    if not conversations:
        return {}
    sampled = [[turn for turn in rollout.turns if turn.sampled] for rollout in conversations]
    turns = [turn for group in sampled for turn in group]
    calls, malformed = sum(turn.num_calls for turn in turns), sum(turn.num_malformed for turn in turns)
    metrics: dict[str, object] = {
        "turn/count_mean": fmean(map(len, sampled)),
        "turn/count_max": max(map(len, sampled)),
        "turn/limit_share": fmean(rollout.finish_reason == "turns" for rollout in conversations),
        "turn/observation_tokens_mean": fmean(len(r.completion_ids) - r.num_sampled for r in conversations),
        "turn/call_share": sum(turn.num_calls > 0 for turn in turns) / max(len(turns), 1),
        "tool/calls_mean": calls / len(conversations),
    }
    if calls + malformed:
        metrics["tool/well_formed_share"] = calls / (calls + malformed)
    for status in (RewardStatus.OK, RewardStatus.FAILED, RewardStatus.TIMEOUT, RewardStatus.CRASHED):
        metrics[f"environment/{status}_share"] = fmean(rollout.status is status for rollout in conversations)
    return metrics


def conversation_rows(rollout: Rollout) -> dict[str, object]:
    """Return the addition to the row of a conversation: its turns."""
    if not rollout.turns:
        return {}
    turns: list[dict[str, object]] = [
        {
            "who": "policy" if turn.sampled else "environment",
            "text": turn.text,
            "num_tokens": turn.num_tokens,
            **(
                {"reward": turn.reward, "calls": turn.num_calls, "malformed": turn.num_malformed}
                if turn.sampled
                else {}
            ),
        }
        for turn in rollout.turns
    ]
    return {"turns": turns}
