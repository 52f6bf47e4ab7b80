"""The web application of a reward server: `POST /score`, `GET /health`, a token, and limits on what it reads."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from rft.serving.addresses import is_loopback
from rft.serving.request_items import BadRequest, as_answer, read_request
from rft.serving.scoring_queue import QueueFull, ScoringQueue
from rft_core.errors import OutageError, RftError
from rft_core.secrets import scrub_text
from rft_trainer.records.scores import RewardItem, Score

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
_RETRY_AFTER = {"Retry-After": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationOptions:
    """Names, limits and token of an application."""

    names: Sequence[str]
    """Parts of the reward, as `/health` tells them."""
    token: str = ""
    """That requests must bring; empty = none."""
    host: str = "127.0.0.1"
    """That the server listens on."""
    max_bytes: int
    max_responses: int
    read_seconds: float
    columns: Sequence[str] = ()
    """That requests must bring."""
    trial_columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the made-up prompt by which a client tries the server."""


def make_application(queue: ScoringQueue, options: ApplicationOptions) -> FastAPI:
    """Return the application over a queue."""
    # no pages of documentation: they would load scripts from elsewhere
    application = FastAPI(title="RFT reward server", openapi_url=None, docs_url=None, redoc_url=None)

    async def score(request: Request) -> Response:
        try:
            check_caller(request, options)
            body = await read_body(request, options)
            asked = read_request(
                body, most=options.max_responses, needed=options.columns, trial_columns=options.trial_columns
            )
            scores = await queued_scores(request, queue, asked.items) if asked.items else []
        except BadRequest as problem:
            headers = _RETRY_AFTER if problem.code == 503 else None
            return JSONResponse({"error": problem.detail}, problem.code, headers)
        return JSONResponse(as_answer(scores, asked.ignored, asked.prompt_ids))

    async def health() -> Response:
        counters = queue.counters
        facts: dict[str, object] = {
            "status": "ready" if queue.is_alive else "closing",
            "rewards": list(options.names),
            "requests": counters.requests,
            "responses": counters.responses,
            "unscored": counters.unscored,
            "failures": counters.failures,
            "waiting": queue.num_waiting,
            "seconds": round(time.monotonic() - counters.started, 3),
        }
        return JSONResponse(facts, 200 if queue.is_alive else 503)

    async def front_page() -> Response:
        return PlainTextResponse(
            f"Rewards: {', '.join(options.names)}.\n"
            'POST /score with JSON: {"prompts": ["1+1="], "responses": ["2"], "labels": ["2"]}\n'
            "GET /health for figures.\n"
        )

    # get_reward is the path of OpenRLHF's servers
    for path in ("/score", "/get_reward"):
        application.add_api_route(path, score, methods=["POST"])
    application.add_api_route("/health", health, methods=["GET"])
    application.add_api_route("/", front_page, methods=["GET"])
    return application


def check_caller(request: Request, options: ApplicationOptions) -> None:
    """Raise `BadRequest` without the token, and where a page of the web makes a browser ask this machine."""
    if options.token:
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {options.token}".encode()):
            raise BadRequest(401, "the token is missing or another one; clients send RFT_REMOTE_TOKEN")
    elif is_loopback(options.host):
        named = request.url.hostname or ""
        if not is_loopback(named):
            raise BadRequest(403, f"the request is for the host {named[:80]!r}, and this server is {options.host}")
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequest(415, f"the content type is {kind[:80]!r}; application/json is expected")


async def read_body(request: Request, options: ApplicationOptions) -> bytes:
    """Return the body, read as far as it is allowed to go; raise `BadRequest` for one that is too large or too slow."""
    too_large = BadRequest(413, f"a request may hold {options.max_bytes} bytes (--max_request_mib)")
    stated = request.headers.get("Content-Length", "")
    if stated.isdecimal() and int(stated[:20]) > options.max_bytes:
        raise too_large
    parts = bytearray()
    try:
        async with asyncio.timeout(options.read_seconds), _chunks(request) as chunks:
            async for chunk in chunks:
                parts += chunk
                if len(parts) > options.max_bytes:
                    raise too_large
    except TimeoutError as error:
        raise BadRequest(408, f"the request did not arrive within {options.read_seconds:g} s") from error
    return bytes(parts)


@contextlib.asynccontextmanager
async def _chunks(request: Request) -> AsyncGenerator[AsyncGenerator[bytes]]:
    async with contextlib.aclosing(request.stream()) as chunks:
        yield chunks


async def queued_scores(request: Request, queue: ScoringQueue, items: Sequence[RewardItem]) -> list[Score]:
    """Wait for the scores; the request of a client that has gone is not scored. Raises `BadRequest` without scores."""
    try:
        scores = queue.add(items)
    except QueueFull as error:
        raise BadRequest(503, "too many requests wait; come back") from error
    except RftError as error:
        raise BadRequest(503, error.problem.what) from error
    waiting = asyncio.wrap_future(scores)
    while True:
        done, _ = await asyncio.wait([waiting], timeout=_LOOK_SECONDS)
        if done:
            break
        if await request.is_disconnected():
            scores.cancel()
            raise BadRequest(499, "the client has gone")
    try:
        return waiting.result()
    except asyncio.CancelledError as error:
        raise BadRequest(503, "the server is closing") from error
    except OutageError as error:
        raise BadRequest(503, scrub_text(error.problem.what)) from error
    except Exception as error:
        _LOG.exception("a request of %d responses failed", len(items))
        raise BadRequest(500, scrub_text(f"{type(error).__name__}: {error}")) from error
