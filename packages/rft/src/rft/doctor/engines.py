"""Findings on inference engines and on the cage of programs that a model writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rft.installation.facts import MachineFact
from rft_core.errors import PreflightError
from rft_engine.registry import EngineKind
from rft_trainer.sandbox.isolation import proven_python


def engines(
    kinds: Iterable[EngineKind], version_of: Callable[[str], str | None], *, has_gpu: bool
) -> list[MachineFact]:
    """Return a finding on each engine: whether it can be chosen here."""
    return [_engine(kind, version_of, has_gpu=has_gpu) for kind in kinds]


def _engine(kind: EngineKind, version_of: Callable[[str], str | None], *, has_gpu: bool) -> MachineFact:
    subject = f"engine {kind.name}"
    if not kind.package:
        return MachineFact(subject, "ready, part of RFT")
    names = [kind.package, *filter(None, (kind.cpu_extra,))]
    found = next(((name, version) for name in names if (version := version_of(name))), None)
    if found is None:
        extra = kind.cpu_extra if kind.cpu_extra and not has_gpu else kind.package
        return MachineFact(subject, f"not installed; to have it: uv sync --extra {extra}")
    if kind.needs_gpu and not has_gpu:
        return MachineFact(subject, f"{found[0]} {found[1]}", "note", kind.needs_gpu, "--engine_type native")
    if found[1].partition("+")[0] != kind.tested_version:
        why = f"the tests ran with {kind.tested_version}; a difference may come from here"
        return MachineFact(subject, f"{found[0]} {found[1]}", "note", why)
    return MachineFact(subject, f"{found[0]} {found[1]}")


def cage(prove: Callable[[], object] = proven_python) -> MachineFact:
    """Return a finding on the cage in which the reward `code` runs programs: a program in it has tried its walls."""
    try:
        prove()
    except PreflightError as error:
        why = f"{error.problem.why}; only the reward `code`, which runs what a model wrote, needs it"
        return MachineFact("cage of programs", error.problem.what, "note", why, error.problem.do)
    return MachineFact("cage of programs", "its walls hold")
