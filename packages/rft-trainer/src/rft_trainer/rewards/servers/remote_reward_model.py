"""Reward model behind a server. Its answer is checked; an invalid answer becomes a status, never a number.

Request, POST with JSON, lists of one length::

    {"queries": ["1+1=2"], "prompts": ["1+1="], "responses": ["2"], "labels": ["2"], "prompt_ids": ["train:0"],
     "messages": [[{"role": "user", "content": "1+1="}]], "finish_reasons": ["stop"], "num_tokens": [1]}

`queries` are prompt and response as one text, `messages` are empty for prompts that are plain text. Where rows have
columns that JSON can hold there is also `"columns": [{"source": "gsm8k"}]`; where a prompt of the request has images,
`"images": [["data:image/png;base64,..."]]`, for each response those of its prompt in the order of their places, each
file whole. Answer, one entry a response, in order::

    {"rewards": [0.7]}          or with parts: {"rewards": [{"reward": 0.7, "parts": {"clear": 0.2}}]}

Beside `parts` there may be `steps`, pairs of (characters of the response up to the end of a step, its reward).
An answer may repeat the `prompt_ids` of its request, as `rft-train serve-reward` does: one with other ids is refused.
null in the place of a number says that there is no score; `{"reward": null, "status": "timeout", "detail": "..."}` says
why, with a status of `rft_trainer.records.scores.RewardStatus`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from rft_core.errors import ServiceError
from rft_core.secrets import scrub_text
from rft_core.terminal_text import visible
from rft_trainer.data.images import MARKER
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.images import HeldImages, data_uri, files_of, probe_image
from rft_trainer.rewards.servers.http_client import Endpoint, RequestFailure

_LONGEST_DETAIL = 300

PROBE_ID = "probe:0"
"""Id of the made-up prompt by which a client tries a server; its row has no columns."""
_PROBE = RewardItem(PROBE_ID, "1+1=", "2", "2", "stop", 1)

_SEEING_PROBE = RewardItem(PROBE_ID, f"{MARKER}1+1=", "2", "2", "stop", 1, media=HeldImages((probe_image(),)))


class RemoteReward:
    """Reward from one server: `batch_size` responses a request, `concurrency` requests at once."""

    def __init__(self, name: str, endpoint: Endpoint, *, batch_size: int = 32, concurrency: int = 8) -> None:
        self.name = name
        self._endpoint = endpoint
        self._batch_size = batch_size
        self._concurrency = concurrency

    def start(self, *, with_image: bool = False) -> None:
        """Ask for one score, so that a server that is not there is found before the run begins.

        `with_image`: of a prompt with an image.

        Raises:
            ServiceError: there was none.
        """
        # not waited for: a wrong address shows itself at once
        [score] = self._scores([_SEEING_PROBE if with_image else _PROBE], waits=False)
        if score.status is RewardStatus.OK:
            return
        raise ServiceError(
            code="reward.remote",
            what=f"the reward server {self.name} gave no score for one response: {score.detail}",
            where=f"--remote_rm_url {self._endpoint.url}",
            why="every response of the run would be without a reward",
            state="nothing was started",
            do=f"start the server, then try curl -d '{{...}}' {self._endpoint.url} (docs/rewards.md has the request)",
        )

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        batches = [items[start : start + self._batch_size] for start in range(0, len(items), self._batch_size)]
        if not batches:
            return []
        with ThreadPoolExecutor(min(self._concurrency, len(batches)), "remote-reward") as threads:
            try:
                return [score for scores in threads.map(self._scores, batches) for score in scores]
            except BaseException:
                self.close()  # leaving the block waits for the other threads, which may wait for the server
                raise

    def close(self) -> None:
        """End every wait for the server."""
        self._endpoint.close()

    def _scores(self, items: Sequence[RewardItem], *, waits: bool = True) -> list[Score]:
        try:
            answer = self._endpoint.post(request(items), request([_PROBE]), waits=waits)
            rewards = _rewards(answer, items)
        except RequestFailure as failure:
            # all of the request: which of them the server had scored is not known
            return [Score(None, failure.status, detail=failure.detail)] * len(items)
        return [self._score(value) for value in rewards]

    def _score(self, value: Any) -> Score:
        if isinstance(value, dict) and value.get("reward", value) is None:
            return _missing(value)
        parts = value.get("parts", {}) if isinstance(value, dict) else {}
        reward = finite_number(value.get("reward") if isinstance(value, dict) else value)
        numbers = {str(name): finite_number(part) for name, part in parts.items()} if isinstance(parts, dict) else {}
        # one bad part spoils the score: its sum with the others would be another reward
        if reward is None or not isinstance(parts, dict) or None in numbers.values():
            return Score(None, RewardStatus.FAILED, detail=f"the server answered {str(value)[:80]}")
        named = {f"{self.name}/{name}": number for name, number in numbers.items() if number is not None}
        steps = _steps(value)
        if steps is None:
            return Score(None, RewardStatus.FAILED, detail=f"the server answered {str(value)[:80]}")
        return Score(reward, breakdown={self.name: reward, **named}, steps=steps)


_STATUSES = {status.value: status for status in RewardStatus if status is not RewardStatus.OK}


def _missing(value: Mapping[str, Any]) -> Score:
    """Return the reason that a server gives for a score that is missing."""
    status = _STATUSES.get(str(value.get("status")), RewardStatus.FAILED)
    said = visible(scrub_text(str(value.get("detail", "")))[:_LONGEST_DETAIL])
    return Score(None, status, detail=said or f"the server answered {str(value)[:80]}")


def _steps(value: Any) -> tuple[tuple[int, float], ...] | None:
    """Return the steps of an entry, none where it has none; None where they are no pairs of a place and a reward."""
    found = value.get("steps", []) if isinstance(value, dict) else []
    if not isinstance(found, list):
        return None
    steps: list[tuple[int, float]] = []
    for step in cast("list[Any]", found):
        if not isinstance(step, list) or len(cast("list[Any]", step)) != 2:
            return None
        place, reward = step[0], finite_number(step[1])
        if not isinstance(place, int) or isinstance(place, bool) or place < 0 or reward is None:
            return None
        steps.append((place, reward))
    return tuple(steps)


def request(items: Sequence[RewardItem]) -> dict[str, Any]:
    """Build the request body for these responses."""
    return (
        {
            "queries": [item.prompt_text + item.response_text for item in items],
            "prompts": [item.prompt_text for item in items],
            "responses": [item.response_text for item in items],
            "labels": [item.label for item in items],
            "prompt_ids": [item.prompt_id for item in items],
            "messages": [[dict(message) for message in item.messages] for item in items],
            "finish_reasons": [item.finish_reason for item in items],
            "num_tokens": [item.num_tokens for item in items],
        }
        | _columns(items)
        | _images(items)
    )


def _columns(items: Sequence[RewardItem]) -> dict[str, Any]:
    """Return the columns of the rows that JSON can hold, where there are any: an image is sent as an image."""
    rows = [{name: value for name, value in item.columns.items() if _is_json(value)} for item in items]
    return {"columns": rows} if any(rows) else {}


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value).items()
        return all(isinstance(name, str) and _is_json(part) for name, part in pairs)
    if isinstance(value, list):
        return all(map(_is_json, cast("list[Any]", value)))
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))


def _images(items: Sequence[RewardItem]) -> dict[str, Any]:
    if all(item.media is None for item in items):
        return {}
    return {"images": [[data_uri(file) for file in files] for files in files_of(items)]}


def finite_number(value: object) -> float | None:
    """Return the value as a float, None where it is no finite number."""
    # a bool is an int in Python, and as a reward more likely a mistake of the server
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    # an integer too large for a float
    except OverflowError:
        return None


def _rewards(answer: Any, items: Sequence[RewardItem]) -> list[Any]:
    """Return the list of an answer; `RequestFailure` where it is missing, of another length or of another request."""
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        said = sorted(map(str, answer)) if isinstance(answer, dict) else type(answer).__name__
        raise RequestFailure(RewardStatus.FAILED, f'the answer has no list "rewards": {str(said)[:80]}')
    # never paired up as far as it goes: the rewards would belong to other responses
    if len(rewards) != len(items):
        raise RequestFailure(RewardStatus.FAILED, f"{len(rewards)} rewards for {len(items)} responses")
    if "prompt_ids" in answer and answer["prompt_ids"] != [item.prompt_id for item in items]:
        raise RequestFailure(RewardStatus.FAILED, f"the answer is for other prompts: {str(answer['prompt_ids'])[:80]}")
    return rewards
