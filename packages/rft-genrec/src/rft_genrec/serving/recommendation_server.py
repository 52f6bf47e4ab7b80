"""Recommendations over HTTP: `POST /recommend`, `GET /health`, on the queue and the server of rewards."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from rft.serving.listening import checked_token, listening_socket
from rft.serving.scoring_queue import ScoringQueue
from rft.serving.server import answering, require_packages
from rft_genrec.serving.history_rows import HistoryRow, answer, read_row
from rft_genrec.serving.recommendations import Recommendations, Recommended
from rft_genrec.settings.recommend import RecommendationServingSettings, RecommendationSettings
from rft_trainer.rewards.servers.http_client import TOKEN


@dataclass(frozen=True, slots=True)
class _Asked:
    history: tuple[int, ...]
    k: int


@dataclass(frozen=True, slots=True)
class _Answered:
    """A recommendation as the queue counts it."""

    value: Recommended


class _Shop:
    """Searches for all histories of a call; the queue has one thread, which alone uses the model."""

    def __init__(self, shop: Recommendations, skip_unknown: bool) -> None:
        self._shop, self._skip_unknown = shop, skip_unknown

    def __call__(self, asked: Sequence[_Asked]) -> list[_Answered]:
        # a shorter list is the beginning of a longer one
        most = max(one.k for one in asked)
        found = self._shop.top([one.history for one in asked], most, skip_unknown=self._skip_unknown)
        return [
            _Answered(Recommended(one.items[:k], one.titles[:k], one.scores[:k], one.note))
            for one, k in zip(found, (one.k for one in asked), strict=True)
        ]

    def close(self) -> None:
        """Close nothing: the model is its owner's."""


@dataclass(frozen=True, slots=True)
class RecommendationServer:
    """A server that answers while its block runs."""

    url: str
    """Of `POST /recommend`."""
    token_variable: str
    """Variable of the environment whose value clients send; empty where none is asked for."""
    queue: ScoringQueue


@contextmanager
def serving(
    shop: Recommendations, settings: RecommendationServingSettings, wanted: RecommendationSettings
) -> Generator[RecommendationServer]:
    """Answer requests while the block runs.

    Raises:
        OptionsError: another address than this machine's without a token, one that cannot be listened on, or packages
            that are missing.
        ServiceError: the server did not begin.
    """
    token = checked_token(settings.host)
    require_packages("rft-train genrec recommend --serve")
    with listening_socket(settings.host, settings.port) as listening:
        called: Any = _Shop(shop, wanted.skip_unknown)
        queue = ScoringQueue(called, most_waiting=settings.max_waiting_requests, batch_size=settings.serve_batch_size)
        try:
            application = make_application(shop, queue, settings, wanted, token)
            with answering(application, listening, max_waiting=settings.max_waiting_requests):
                host = f"[{settings.host}]" if ":" in settings.host else settings.host
                url = f"http://{host}:{listening.getsockname()[1]}/recommend"
                yield RecommendationServer(url, TOKEN if token else "", queue)
        finally:
            queue.close()


def make_application(
    shop: Recommendations,
    queue: ScoringQueue,
    settings: RecommendationServingSettings,
    wanted: RecommendationSettings,
    token: str,
) -> Any:
    """Return the application (FastAPI) over a queue."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    from rft.serving.application import ApplicationOptions, check_caller, queued_scores, read_body
    from rft.serving.request_items import BadRequest

    options = ApplicationOptions(
        names=["recommend"],
        token=token,
        host=settings.host,
        max_bytes=int(settings.max_request_mib * 2**20),
        max_responses=settings.max_request_histories,
        read_seconds=settings.request_read_timeout,
    )
    application = FastAPI(title="RFT recommendations", openapi_url=None, docs_url=None, redoc_url=None)

    async def recommend(request: Any) -> Any:
        try:
            check_caller(request, options)
            rows, k = _read(await read_body(request, options), shop, settings, wanted)
            asked = [_Asked(row.history, k) for row in rows if not row.error]
            answered = await queued_scores(request, queue, cast("Any", asked)) if asked else []
        except BadRequest as problem:
            return JSONResponse({"error": problem.detail}, problem.code)
        found = iter(cast("list[_Answered]", answered))
        answers = [answer(row, None if row.error else next(found).value) for row in rows]
        # a request of one history is refused as a whole where that is none
        is_wrong = len(rows) == 1 and bool(rows[0].error)
        return JSONResponse(answers[0] if is_wrong else {"recommendations": answers}, 400 if is_wrong else 200)

    async def health() -> Any:
        counters, latency = queue.counters, shop.latencies
        facts = {
            "status": "ready" if queue.is_alive else "closing",
            "items": len(shop.catalogue),
            "requests": counters.requests,
            "histories": counters.responses,
            "failures": counters.failures,
            "waiting": queue.num_waiting,
            "p50_seconds": round(latency.p50, 6),
            "p95_seconds": round(latency.p95, 6),
        }
        return JSONResponse(facts, 200 if queue.is_alive else 503)

    # FastAPI reads annotations, and the name is not known at the top of this module: it is no requirement
    recommend.__annotations__["request"] = Request
    application.add_api_route("/recommend", recommend, methods=["POST"], response_model=None)
    application.add_api_route("/health", health, methods=["GET"], response_model=None)
    return application


def _read(
    body: bytes, shop: Recommendations, settings: RecommendationServingSettings, wanted: RecommendationSettings
) -> tuple[list[HistoryRow], int]:
    """Return the histories of a request and how many items are wanted.

    Raises:
        BadRequest: it is no such JSON, or asks for too much.
    """
    from rft.serving.request_items import BadRequest

    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, f"the body is no JSON: {error}") from error
    if not isinstance(value, dict) or ("history" in value) == ("histories" in value):
        raise BadRequest(400, 'an object with history or histories is expected: {"history": [3, 14], "k": 5}')
    k = value.get("k", wanted.top_k)
    if type(k) is not int or not 1 <= k <= shop.num_beams:
        raise BadRequest(400, f"k is {k!r}; it is a number from 1 to {shop.num_beams} (--num_beams)")
    given = [value] if "history" in value else value["histories"]
    if not isinstance(given, list) or len(given) > settings.max_request_histories:
        raise BadRequest(400, f"histories is a list of at most {settings.max_request_histories} histories")
    return [read_row(one, len(shop.catalogue), skip_unknown=wanted.skip_unknown) for one in given], k
