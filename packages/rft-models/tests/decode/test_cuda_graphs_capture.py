"""Recording a step as a CUDA graph, with doubles of torch's streams and graphs: what waits for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_models.decode.cuda_graphs import CudaGraphs


class Stream:
    """Notes what it waits for."""

    def __init__(self, name: str, noted: list[Any]) -> None:
        self.name, self.noted = name, noted

    def wait_stream(self, other: Stream) -> None:
        self.noted.append(f"{self.name} waits for {other.name}")


class Graph:
    """Notes what is done with it."""

    def __init__(self, noted: list[Any]) -> None:
        self.noted = noted

    def capture_begin(self, **options: Any) -> None:
        self.noted.append(("begin", options))

    def capture_end(self) -> None:
        self.noted.append("end")

    def replay(self) -> None:
        self.noted.append("replay")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything that streams and graphs are asked for, in order."""
    found: list[Any] = []
    present = Stream("the present one", found)
    pools = iter(("pool 0", "pool 1"))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        found.append(f"on {stream.name}")
        yield
        found.append("back")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream("its own", found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: present)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(found))
    monkeypatch.setattr(torch.cuda, "stream", on)
    return found


BEGIN = ("begin", {"pool": "pool 0", "capture_error_mode": "thread_local"})


def test_a_step_is_captured_behind_the_work_under_way_and_the_work_after_it_waits(noted: list[Any]) -> None:
    logits = torch.ones(2)

    def forward() -> Tensor:
        noted.append("forward")
        return logits

    graphs = CudaGraphs()
    replay = graphs.record(forward)
    order = ["its own waits for the present one", "on its own", BEGIN, "forward", "end", "back"]
    assert noted == [*order, "the present one waits for its own"]
    noted.clear()
    assert replay() is logits
    assert replay() is logits
    assert noted == ["replay", "replay"], "the step itself is run by the device alone"
    graphs.record(forward)
    assert BEGIN in noted, "all recordings are in one pool"


def test_a_capture_that_breaks_is_closed(noted: list[Any]) -> None:
    def broken() -> Tensor:
        raise RuntimeError("a step that cannot be captured")

    with pytest.raises(RuntimeError, match="cannot be captured"):
        CudaGraphs().record(broken)
    assert noted[-2:] == [BEGIN, "end"]


def test_recordings_after_the_last_one_has_gone_are_in_a_pool_of_their_own(noted: list[Any]) -> None:
    graphs = CudaGraphs()
    first, second = graphs.record(lambda: torch.ones(2)), graphs.record(lambda: torch.ones(2))
    del first
    third = graphs.record(lambda: torch.ones(2))
    del second, third
    graphs.record(lambda: torch.ones(2))
    pools = [note[1]["pool"] for note in noted if note[0] == "begin"]
    assert pools == ["pool 0", "pool 0", "pool 0", "pool 1"], "torch refuses a pool whose graphs are gone"


@pytest.mark.gpu
def test_a_gpu_records_again_after_its_recordings_have_gone() -> None:
    graphs, numbers = CudaGraphs(), torch.arange(4.0, device="cuda")
    for turn in range(3):
        replay = graphs.record(lambda turn=turn: numbers * turn)
        assert replay().tolist() == [0.0, turn, 2.0 * turn, 3.0 * turn]
        del replay
