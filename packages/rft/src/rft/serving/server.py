"""A reward server that is started, waited for and closed: a socket, a thread of uvicorn, and the reward behind it."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from rft.build.rewards import build_reward
from rft.hub.run_settings import with_model_directories
from rft.process.machine import open_machine
from rft.reward_kinds import build_order
from rft.reward_names import all_functions, rule_columns
from rft.serving.addresses import is_loopback
from rft.serving.scoring_queue import Counters, ScoringQueue
from rft.settings import EvalSettings, ServeRewardSettings, ServingSettings
from rft_core.errors import OptionsError, ServiceError, install_command
from rft_models.settings import WeightsSettings
from rft_trainer.records.scores import Reward
from rft_trainer.rewards.routes import routes_of
from rft_trainer.rewards.servers.http_client import TOKEN

_START_SECONDS = 30.0
_CLOSE_SECONDS = 10
_LOOK_SECONDS = 0.02


class RewardServer:
    """A server that answers until it is closed.

    Example::

    with start_server(settings) as server:
        print(server.url)
    """

    def __init__(
        self, url: str, names: list[str], queue: ScoringQueue, stop: Callable[[], None], *, token_variable: str = ""
    ) -> None:
        self.url = url
        """For `--remote_rm_url`."""
        self.names = names
        """Of the rewards."""
        self.token_variable = token_variable
        """Variable of the environment whose value clients send; empty where none is asked for."""
        self._queue = queue
        self._stop = stop

    @property
    def counters(self) -> Counters:
        """Figures since the start."""
        return self._queue.counters

    def close(self) -> None:
        """Answer what has been begun, and end the server and its reward."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_server(settings: ServeRewardSettings, *, reward: Reward | None = None) -> RewardServer:
    """Build the rewards of the settings and serve them.

    Args:
        settings: of the command.
        reward: takes the place of the named function.

    Raises:
        OptionsError: another address than this machine's without a token, an address that cannot be listened on,
            packages that are missing, and what `rft.build.rewards.build_reward` refuses.
        ServiceError: the server did not begin.
    """
    serving = settings.serving
    token = checked_token(serving.host)
    require_packages()
    with ExitStack() as begun:
        # before the models are loaded: an address that is taken shows itself at once
        listening = begun.enter_context(listening_socket(serving.host, serving.port))
        scored = with_model_directories(_as_evaluation(settings))
        machine = begun.enter_context(open_machine(settings.model.device))
        columns = {name: "" for name in _needed_columns(serving, scored)}
        log = Path(serving.reward_log) if serving.reward_log else None
        built = build_reward(scored, machine, function=reward, columns=columns, log=log)
        queue = ScoringQueue(built, most_waiting=serving.max_waiting_requests, batch_size=serving.serve_batch_size)
        begun.callback(queue.close)
        names = _part_names(scored, reward)
        begun.enter_context(_uvicorn(queue, names, serving, scored, token, listening))
        port = int(listening.getsockname()[1])
        host = f"[{serving.host}]" if ":" in serving.host else serving.host
        return RewardServer(
            f"http://{host}:{port}/score", names, queue, begun.pop_all().close, token_variable=TOKEN if token else ""
        )
    raise AssertionError


def checked_token(host: str) -> str:
    """Return the token that requests must bring; none is needed where only this machine can ask.

    Raises:
        OptionsError: others can ask, and there is no token.
    """
    token = os.environ.get(TOKEN, "")
    if not token and not is_loopback(host):
        raise OptionsError(
            code="serving.no_token",
            what=f"host = {host}, and {TOKEN} is not set",
            where="--host",
            why="whoever reaches that address could use what is served, and see its answers",
            state="nothing was started",
            do=f"export {TOKEN}={secrets.token_hex(16)}, here and where the requests come from",
        )
    return token


def require_packages(where: str = "rft-train serve-reward") -> None:
    """Raise `OptionsError` where the packages of a server are missing."""
    try:
        import fastapi
        import uvicorn
    except ImportError as error:
        raise OptionsError(
            code="serving.no_packages",
            what=f"a server needs {error.name}, which is not installed",
            where=where,
            why="requests over HTTP are answered by FastAPI and uvicorn",
            do=install_command("serve"),
        ) from error
    del fastapi, uvicorn


@contextmanager
def listening_socket(host: str, port: int) -> Generator[socket.socket]:
    """Listen on an address while the block runs.

    Raises:
        OptionsError: it cannot be listened on.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        taken = f"--port {port + 1}, or --port 0 for any free one"
        raise OptionsError(
            code="serving.address",
            what=f"cannot listen on {host} port {port}: {error.strerror or error}",
            where="--host, --port",
            why="another program listens there, or the address is none of this machine",
            state="nothing was started",
            do=taken if port else "--host 127.0.0.1",
        ) from error
    with listening:
        yield listening


@contextmanager
def _uvicorn(
    queue: ScoringQueue,
    names: list[str],
    serving: ServingSettings,
    scored: EvalSettings,
    token: str,
    listening: socket.socket,
) -> Generator[None]:
    """Answer requests for rewards while the block runs."""
    from rft.serving.application import ApplicationOptions, make_application

    options = ApplicationOptions(
        names=names,
        token=token,
        host=serving.host,
        max_bytes=int(serving.max_request_mib * 2**20),
        max_responses=serving.max_request_responses,
        read_seconds=serving.request_read_timeout,
        columns=_needed_columns(serving, scored),
        trial_columns=_trial_columns(scored),
    )
    with answering(make_application(queue, options), listening, max_waiting=serving.max_waiting_requests):
        yield


@contextmanager
def answering(application: Any, listening: socket.socket, *, max_waiting: int) -> Generator[None]:
    """Answer requests in a thread while the block runs.

    Args:
        application: of ASGI.
        listening: where requests come in.
        max_waiting: requests that may wait; further ones are answered by the application itself.

    Raises:
        ServiceError: the server did not begin.
    """
    import uvicorn

    config = uvicorn.Config(
        application,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        # beyond the requests that wait, so that their answers are this application's
        limit_concurrency=2 * max_waiting + 64,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), name="uvicorn", daemon=True)
    thread.start()
    until = time.monotonic() + _START_SECONDS
    while not server.started and thread.is_alive() and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    try:
        if not server.started:
            raise ServiceError(
                code="serving.start",
                what="the server did not begin to answer",
                where=f"port {listening.getsockname()[1]}",
                why="uvicorn ended, or took too long",
                state="nothing is served",
                do="--port 0",
            )
        yield
    finally:
        server.should_exit = True
        thread.join()


def _as_evaluation(settings: ServeRewardSettings) -> EvalSettings:
    """Return the settings as those of a command that scores responses."""
    model = settings.model
    weights = WeightsSettings(pretrain="", bf16=model.bf16, device=model.device)
    return EvalSettings(
        model=weights, reward=settings.reward, reward_models=settings.reward_models, judge=settings.judge
    )


def _part_names(settings: EvalSettings, reward: Reward | None) -> list[str]:
    named = [str(getattr(reward, "name", "reward"))] if reward is not None else all_functions(settings)
    return [*named, *(name for kind in build_order() for name in kind.names(settings))]


def _needed_columns(serving: ServingSettings, settings: EvalSettings) -> list[str]:
    """Return the columns that requests bring: those that are named, those of rules, and that of the routes."""
    routed = [settings.reward.reward_source_key] if settings.reward.reward_routes else []
    return list(dict.fromkeys([*_names(serving.reward_columns), *rule_columns(settings), *routed]))


def _trial_columns(settings: EvalSettings) -> dict[str, Any]:
    """Return the columns of the made-up prompt of a client's trial: options, and the first source of the routes."""
    columns: dict[str, Any] = {name: ["1", "2"] for name in rule_columns(settings)}
    routes = routes_of(settings.reward)
    return columns | ({routes.key: next(iter(routes.by_source))} if routes else {})


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@contextmanager
def until_stopped() -> Generator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set; the main thread alone can ask for it."""
    event = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        event.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
