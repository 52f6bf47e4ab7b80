"""Settings of `rft-train genrec recommend`; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rft.config.rules.sourced_values import SourcedValues
from rft_core.errors import Problem
from rft_genrec.settings.catalogue import CatalogueSettings
from rft_genrec.settings.eval import BeamSettings
from rft_models.settings import WeightsSettings


@dataclass(frozen=True, kw_only=True)
class ServedRecommenderSettings(WeightsSettings):
    """The model that recommends, and where it lives."""

    pretrain: str
    """Directory of a model that was trained on the IDs of the catalogue."""


@dataclass(frozen=True, kw_only=True)
class RecommendationSettings:
    """Histories, and how many items are recommended."""

    histories: str = ""
    """File of histories, one JSON object a line: {"user": ..., "history": [3, 14]}; items are numbers of the catalogue,
    the newest last."""

    recommendations: str = ""
    """File for the recommendations, one JSON object a line, in the order of the histories."""

    top_k: int = field(default=10, metadata={"minimum": 1})
    """Items that are recommended."""

    skip_unknown: bool = False
    """Leave items that the catalogue lacks out of a history, with a note, instead of refusing that history."""


@dataclass(frozen=True, kw_only=True)
class RecommendationServingSettings:
    """The server, its address and its limits."""

    serve: bool = False
    """Answer requests over HTTP until the command is stopped, instead of reading a file."""

    host: str = "127.0.0.1"
    """Address to listen on; any but this machine's own (127.0.0.1, ::1, localhost) needs a token:
    RFT_REMOTE_TOKEN."""

    port: int = field(default=8000, metadata={"minimum": 0, "maximum": 65535})
    """Port to listen on; 0 = any free one, which is printed."""

    serve_batch_size: int = field(default=16, metadata={"minimum": 0})
    """Most histories of several waiting requests that are searched together; 0 = a search each request."""

    max_waiting_requests: int = field(default=256, metadata={"minimum": 1})
    """Requests that may wait; further ones are refused for the moment (HTTP 503 with Retry-After)."""

    max_request_mib: float = field(default=4.0, metadata={"above": 0.0})
    """Largest request, in MiB."""

    max_request_histories: int = field(default=1024, metadata={"minimum": 1})
    """Most histories in one request."""

    request_read_timeout: float = field(default=60.0, metadata={"above": 0.0})
    """Seconds in which a request must have arrived."""


@dataclass(frozen=True, kw_only=True)
class GenrecRecommendSettings:
    """Recommend items for histories, of a file or over HTTP."""

    catalogue: CatalogueSettings
    model: ServedRecommenderSettings
    recommendation: RecommendationSettings = field(default_factory=RecommendationSettings)
    beams: BeamSettings = field(default_factory=BeamSettings)
    serving: RecommendationServingSettings = field(default_factory=RecommendationServingSettings)


_OF_A_SERVER = [
    *("host", "port", "serve_batch_size", "max_waiting_requests"),
    *("max_request_mib", "max_request_histories", "request_read_timeout"),
]


def recommend_rules(given: SourcedValues) -> Iterator[Problem]:
    """Yield the contradictions of `genrec recommend`."""
    values = given.values
    files = [name for name in ("histories", "recommendations") if values[name]]
    if values["serve"] and files:
        why = "a server answers requests; it reads and writes no file"
        yield given.make_problem("genrec.serve_files", ["serve", *files], why, f"leave {files[0]} out")
    if not values["serve"] and len(files) < 2:
        why = "histories are read from one file and answered in another, or come over HTTP"
        missing = ["recommendations"] if files == ["histories"] else ["histories"]
        yield given.make_problem("genrec.no_histories", [*missing, "serve"], why, "--serve, or --histories in.jsonl")
    if values["top_k"] > values["num_beams"]:
        why = "no more items are ranked than there are beams"
        do = f"--num_beams {values['top_k']}"
        yield given.make_problem("genrec.top_k", ["top_k", "num_beams"], why, do)


def recommend_notes(given: SourcedValues, defaults: dict[str, object]) -> list[str]:
    """Return a note for each setting of the server that is given without one."""
    values = given.values
    idle = [] if values["serve"] else [name for name in _OF_A_SERVER if values[name] != defaults[name]]
    return [f"{name} has no effect without --serve" for name in idle]
