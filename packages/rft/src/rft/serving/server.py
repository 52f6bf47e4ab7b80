"""A reward server that is started, waited for and closed: a socket, a thread of uvicorn, and the reward behind it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rft.build.rewards import build_reward
from rft.hub.run_settings import with_model_directories
from rft.process.machine import open_machine
from rft.reward_kinds import build_order
from rft.reward_names import all_functions, rule_columns
from rft.serving.listening import checked_token, listening_socket
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
