"""Answers of the dashboard: a path and its parameters in, plain JSON out, in which no text can steer a reader."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from rft.dashboard.open_runs import TABLES, KnownPoints, OpenRuns
from rft.dashboard.run_comparison import MOST_COMPARED, compared, setting_differences
from rft.dashboard.run_entries import RunEntry, run_entry
from rft.dashboard.run_facts import FactStore
from rft.dashboard.run_folders import RequestRefused, RunFolders
from rft.dashboard.sample_pages import SampleQuery, real_or_none, sample_page, whole_or_none
from rft.dashboard.token_pages import TokenPages
from rft_core.terminal_text import visible
from rft_trainer.rollout_files.selection import RowFilter

Parameters = Mapping[str, Sequence[str]]
"""Of a query, as `urllib.parse.parse_qs` gives them."""
_MOST_CURVES = 64
_TRUNCATED = "length"
"""Why a response ended that was cut off."""


class DashboardAnswers:
    """All answers over the runs of some folders.

    Example::

        answers = DashboardAnswers(RunFolders([Path("runs")]))
        answers.of("/api/runs", {})["runs"][0]["state"]     # "running"
    """

    def __init__(self, folders: RunFolders) -> None:
        self._folders = folders
        self._open, self._facts, self._tokens = OpenRuns(), FactStore(), TokenPages(folders)
        self._routes: dict[str, Callable[[Parameters], dict[str, Any]]] = {
            "/api/runs": self._list,
            "/api/run": self._run,
            "/api/curves": self._curves,
            "/api/compare": self._compare,
            "/api/samples": self._samples,
            "/api/tokens": self._shaded,
        }

    def of(self, path: str, parameters: Parameters) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            RequestRefused: no such path, no such run, a parameter of another form, or a file out of the folders.
        """
        route = self._routes.get(path)
        if route is None:
            raise RequestRefused(404, "there is no such page")
        return cast("dict[str, Any]", harmless(route(parameters)))

    def _list(self, parameters: Parameters) -> dict[str, Any]:
        del parameters
        entries = [self._entry(digest) for digest in self._folders.runs()]
        entries.sort(key=lambda entry: -entry.touched)
        return {
            "now": time.time(),
            "folders": [str(root) for root in self._folders.roots],
            "is_cut": self._folders.is_cut,
            "runs": [entry.as_record() for entry in entries],
        }

    def _entry(self, digest: str) -> RunEntry:
        path = self._folders.runs()[digest]
        place = self._folders.place(path)
        try:
            self._folders.check(path)
            return run_entry(digest, place, path)
        except RequestRefused as refused:
            why = refused.detail
        except OSError as error:
            why = error.strerror or "it cannot be read"
        return RunEntry(id=digest, name=path.name, place=place, state="unreadable", why=why)

    def _run(self, parameters: Parameters) -> dict[str, Any]:
        return {"now": time.time(), **self._facts.facts(self._folders.run(_one(parameters, "run")))}

    def _curves(self, parameters: Parameters) -> dict[str, Any]:
        run = self._folders.run(_one(parameters, "run"))
        names = parameters.get("name", ())
        if len(names) > _MOST_CURVES:
            raise RequestRefused(400, f"a request may ask for {_MOST_CURVES} curves")
        return self._open.curves(run, names, {kind: _known(parameters, kind) for kind in TABLES})

    def _compare(self, parameters: Parameters) -> dict[str, Any]:
        digests = list(dict.fromkeys(parameters.get("run", ())))
        if not 2 <= len(digests) <= MOST_COMPARED:
            raise RequestRefused(400, f"2 to {MOST_COMPARED} runs are compared, and {len(digests)} were named")
        runs = [self._folders.run(digest) for digest in digests]
        shown = [{"id": digest, **record} for digest, record in zip(digests, compared(runs), strict=True)]
        names = dict.fromkeys(name for run in runs for name in self._open.names(run))
        curves = dict.fromkeys(name for run in runs for name in self._facts.facts(run)["curves"])
        drawn = [name for name in curves if name in names]
        return {"runs": shown, "names": list(names), "curves": drawn, "settings": setting_differences(runs)}

    def _samples(self, parameters: Parameters) -> dict[str, Any]:
        run = self._folders.run(_one(parameters, "run"))
        chosen = RowFilter(
            step=whole_or_none(_optional(parameters, "step"), "step"),
            prompt_id=_optional(parameters, "group"),
            status=_optional(parameters, "status"),
            finish_reason=_TRUNCATED if _optional(parameters, "truncated") == "yes" else "",
            reward_min=real_or_none(_optional(parameters, "reward_min"), "reward_min"),
            reward_max=real_or_none(_optional(parameters, "reward_max"), "reward_max"),
        )
        before = whole_or_none(_optional(parameters, "before"), "before")
        return sample_page(
            self._folders, run, SampleQuery(rows=chosen, text=_optional(parameters, "text"), before=before)
        )

    def _shaded(self, parameters: Parameters) -> dict[str, Any]:
        run = self._folders.run(_one(parameters, "run"))
        step = whole_or_none(_one(parameters, "step"), "step")
        assert step is not None, "it is not empty"
        return self._tokens.tokens(run, step, _one(parameters, "group"), _one(parameters, "quantity"))


def harmless(value: Any) -> Any:
    """Return plain JSON in which a number that is none is null, and in which texts are as a terminal may show them.

    Marks of direction and control characters would change what stands beside them in a browser as well.
    """
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {visible(str(name)): harmless(one) for name, one in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [harmless(one) for one in cast("Sequence[Any]", value)]
    return value


def encoded(answer: Mapping[str, Any]) -> bytes:
    """Return an answer as JSON."""
    return json.dumps(answer, separators=(",", ":"), allow_nan=False).encode()


def _known(parameters: Parameters, kind: str) -> KnownPoints:
    texts = _optional(parameters, kind).split(",")
    if len(texts) != 3:
        return KnownPoints()
    generation, width, complete = (whole_or_none(text, kind) or 0 for text in texts)
    return KnownPoints(generation=generation, rows_a_point=width, complete=complete)


def _one(parameters: Parameters, name: str) -> str:
    value = _optional(parameters, name)
    if not value:
        raise RequestRefused(400, f"{name} is missing")
    return value


def _optional(parameters: Parameters, name: str) -> str:
    return next(iter(parameters.get(name, ())), "")
