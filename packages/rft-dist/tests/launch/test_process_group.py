"""Ranks that do not find one another are named."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

from rft_core.errors import PeerError, PreflightError
from rft_dist.collectives import SingleProcess
from rft_dist.launch.environment import RankInfo, ranks_from_environment
from rft_dist.launch.process_group import backend_for, start_process_group, stop_process_group
from rft_dist.launch.rendezvous import meet

CPU = torch.device("cpu")


def info(rank: int, world_size: int, port: int) -> RankInfo:
    """As four variables by hand give it."""
    values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "RANK": f"{rank}", "WORLD_SIZE": f"{world_size}"}
    return ranks_from_environment(values)


class Joining(threading.Thread):
    """A rank that tries to meet the others in a thread of its own."""

    def __init__(self, place: RankInfo, seconds: float) -> None:
        super().__init__(daemon=True)
        self.place, self.seconds, self.error = place, seconds, None
        self.store = None
        self.start()

    def run(self) -> None:
        try:
            self.store = meet(self.place, self.seconds, {})
        except PeerError as error:
            self.error = error


def test_a_single_process_joins_nothing() -> None:
    collectives = start_process_group(ranks_from_environment({}), CPU)
    assert isinstance(collectives, SingleProcess)
    assert not torch.distributed.is_initialized()
    stop_process_group()


def test_the_backend_follows_the_device_unless_gloo_is_forced() -> None:
    cuda = torch.device("cuda", 0)
    assert backend_for(CPU, {}) == "gloo"
    assert backend_for(cuda, {}) == "nccl"
    assert backend_for(cuda, {"NCCL_BACKEND": "gloo"}) == "gloo"
    with pytest.raises(PreflightError, match="NCCL_BACKEND = nccl, device = cpu") as caught:
        backend_for(CPU, {"NCCL_BACKEND": "nccl"})
    assert caught.value.problem.code == "launch.backend_needs_cuda"


def test_ranks_that_do_not_come_are_named(free_port: int) -> None:
    with pytest.raises(PeerError, match=r"after 0.3.*present 0, missing 1, 2") as caught:
        start_process_group(info(0, 3, free_port), CPU, environment={"NCCL_TIMEOUT": "0.3"})
    assert caught.value.problem.code == "launch.rendezvous_incomplete"
    assert not torch.distributed.is_initialized()


def test_a_master_that_does_not_answer_is_named(free_port: int) -> None:
    with pytest.raises(PeerError, match=f"cannot reach 127.0.0.1:{free_port} within 0.5 s") as caught:
        start_process_group(info(1, 2, free_port), CPU, environment={"NCCL_TIMEOUT": "0.5"})
    assert caught.value.problem.code == "launch.cannot_reach_master"


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PeerError, match=f"cannot listen at 127.0.0.1:{port}") as caught:
            meet(info(0, 2, port), 0.5, {})
        assert caught.value.problem.code == "launch.cannot_listen"


def test_a_rank_that_two_processes_claim_is_refused(free_port: int) -> None:
    first = [Joining(info(rank, 3, free_port), 1.5) for rank in (0, 1)]
    with pytest.raises(PeerError) as caught:
        wait_for(first[1], lambda: meet(info(1, 3, free_port), 1.5, {}))
    assert caught.value.problem.code == "launch.duplicate_rank"
    for thread in first:
        thread.join()
        assert thread.error is not None
        assert thread.error.problem.what.endswith("present 0, 1, missing 2")


def wait_for(thread: Joining, action) -> None:
    """Run `action` once the thread has announced its rank."""
    thread.join(timeout=0.5)
    action()


def test_ranks_that_were_told_different_world_sizes_are_refused(free_port: int) -> None:
    other = Joining(info(0, 2, free_port), 2.0)
    with pytest.raises(PeerError, match="WORLD_SIZE = 3 on rank 1, 2 on rank 0") as caught:
        meet(info(1, 3, free_port), 2.0, {})
    assert caught.value.problem.code == "launch.world_size_differs"
    other.join()
    assert other.error is not None
    assert "WORLD_SIZE = 2 on rank 0, 3 on rank 1" in other.error.problem.what
