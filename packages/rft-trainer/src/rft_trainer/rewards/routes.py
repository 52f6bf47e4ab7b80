"""Routes as settings name them: which reward judges the rows of which source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from shlex import quote
from typing import Any, Protocol

from rft_core.errors import DataError, OptionsError
from rft_core.nearest_names import nearest_names
from rft_trainer.data.readers.rows import shown
from rft_trainer.installed_tasks.discovery import task_names
from rft_trainer.rewards.routed import ANY, SOURCE_KEY, Routes
from rft_trainer.rewards.rules.table import find_rule, rule_names
from rft_trainer.settings.rewards import RewardFunctionSettings


def routes_of(chosen: RewardFunctionSettings) -> Routes | None:
    """Return the routes of the settings; None where there are none.

    Raises:
        OptionsError: an entry is no SOURCE=REWARD, a source stands twice, or no reward has the name.
    """
    entries = [entry.strip() for entry in chosen.reward_routes.split(",") if entry.strip()]
    by_source: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        source, equals, text = (part.strip() for part in entry.partition("="))
        names = tuple(dict.fromkeys(name.strip() for name in text.split("+") if name.strip()))
        if not (source and equals and names):
            raise _refused(
                f"reward_routes holds {entry!r}",
                "a route is SOURCE=REWARD; routes are joined by commas, rewards of one source by +",
                f"--reward_routes '{source or 'gsm8k'}=math,{ANY}=exact'",
            )
        if source in by_source:
            why = "a row has one route, which may name several rewards"
            joined = "+".join(dict.fromkeys((*by_source[source], *names)))
            raise _refused(f"reward_routes names {source!r} twice", why, f"{source}={joined} in the place of both")
        for name in names:
            _require_name(name, chosen.reward_routes)
        by_source[source] = names
    return Routes(by_source, chosen.reward_source_key) if by_source else None


class RoutedRow(Protocol):
    """Protocol of what a route is chosen for, and told of a row to which none leads."""

    @property
    def columns(self) -> Mapping[str, Any]: ...

    @property
    def source(self) -> str: ...

    @property
    def place(self) -> str:
        """Return file:line of the row."""
        ...


def require_routes(chosen: RewardFunctionSettings, rows: Iterable[RoutedRow]) -> None:
    """Refuse rows to which no route leads, where there are routes.

    Raises:
        OptionsError: as `routes_of`.
        DataError: no route leads to a row.
    """
    routes = routes_of(chosen)
    # with a route for the rest, and the file's name for rows without the column, none is asked: there may be millions
    if routes is None or (ANY in routes.by_source and routes.key == SOURCE_KEY):
        return
    for row in rows:
        source = routes.source_of(row.columns, row.source)
        if routes.of(source) is None:
            raise _no_route(routes, row, source)


def _no_route(routes: Routes, row: RoutedRow, source: str | None) -> DataError:
    named = f"has no column {routes.key}" if source is None else f"is of the source {shown(source)}"
    nearest = nearest_names(source or "", [name for name in routes.by_source if name != ANY], count=1)
    given = ",".join(f"{name}={'+'.join(rewards)}" for name, rewards in routes.by_source.items())
    meant = "+".join(routes.by_source[nearest[0]] if nearest else next(iter(routes.by_source.values())))
    every = f"{given},{ANY if source is None else source}={meant}"
    return DataError(
        code="reward.no_route",
        what=f"a row {named}, to which no route leads; the routes are {given}",
        where=f"{row.place}:{routes.key}" if routes.key in row.columns else row.place,
        why="a row without a route would be judged by nothing" + (f"; the nearest is {nearest[0]}" if nearest else ""),
        do=f"--reward_routes {quote(every)}",
    )


def _require_name(name: str, given: str) -> None:
    if ":" in name or find_rule(name) is not None or name in task_names():
        return
    names = [*rule_names(), *task_names()]
    nearest = nearest_names(name, names, count=1)
    raise _refused(
        f"no reward is named {name!r}; there are {', '.join(names)}, and file.py:function",
        "a route leads to rewards by their names",
        f"--reward_routes {quote(given.replace(name, nearest[0])) if nearest else 'with one of these names'}",
    )


def _refused(what: str, why: str, do: str) -> OptionsError:
    return OptionsError(
        code="reward.route", what=what, where="--reward_routes", why=why, state="nothing was started", do=do
    )
