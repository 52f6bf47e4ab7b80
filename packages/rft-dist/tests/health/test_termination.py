"""Errors of broken collectives, and the end of a process for another one."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from rft_core.errors import DataError, PeerError
from rft_dist.health import termination
from rft_dist.health.termination import StoppedByPeer, comes_from_peers, flush, raise_in_main


def test_what_a_broken_collective_raises_is_told_from_errors_of_ones_own() -> None:
    def peer(code: str) -> PeerError:
        return PeerError(code=code, what="w", where="r", why="y")

    class DistError(RuntimeError):
        """Stands for torch's, and `Backend` for one of its kinds."""

    class Backend(DistError):
        pass

    assert comes_from_peers(peer("collective.failed"))
    assert not comes_from_peers(peer("replicas.weights_differ"))
    assert not comes_from_peers(DataError(code="collective.failed", what="w", where="r", why="y"))
    assert comes_from_peers(DistError("x"))
    assert comes_from_peers(Backend("x"))
    assert comes_from_peers(RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer"))
    assert not comes_from_peers(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not comes_from_peers(ValueError("gloo/"))


def test_another_thread_raises_in_the_main_one() -> None:
    def wait_for_it() -> None:
        helper = threading.Thread(target=raise_in_main, args=(StoppedByPeer,))
        helper.start()
        helper.join()
        for _ in range(1000):
            pass

    with pytest.raises(StoppedByPeer):
        wait_for_it()


@pytest.mark.parametrize("error", [OSError("no space"), ValueError("closed"), None])
def test_both_streams_are_flushed_also_where_one_is_closed(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    flushed: list[str] = []

    def stream(name: str) -> SimpleNamespace:
        def flush() -> None:
            flushed.append(name)
            if error is not None:
                raise error

        return SimpleNamespace(flush=flush)

    monkeypatch.setattr(termination, "sys", SimpleNamespace(stdout=stream("out"), stderr=stream("err")))
    flush()
    assert flushed == ["out", "err"]
