"""The collector of cycles rests from `pause` to `go_on`, and stays as somebody else has left it."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Generator

import pytest

from rft.process import detached, garbage_collection


@pytest.fixture(autouse=True)
def _as_before() -> Generator[None]:
    yield
    # pytest's own process is to end as any other
    atexit.unregister(gc.freeze)
    garbage_collection.go_on()
    gc.enable()


def test_the_collector_rests_until_it_is_to_go_on() -> None:
    garbage_collection.pause()
    assert not gc.isenabled()
    garbage_collection.pause()
    garbage_collection.go_on()
    assert gc.isenabled()


def test_what_somebody_else_has_chosen_stays() -> None:
    gc.disable()
    garbage_collection.pause()
    garbage_collection.go_on()
    assert not gc.isenabled()
    gc.enable()
    garbage_collection.go_on()
    assert gc.isenabled()


def test_the_start_of_a_run_is_over_when_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached._State, "begun", False)
    garbage_collection.pause()
    detached.run_has_begun()
    assert gc.isenabled()
