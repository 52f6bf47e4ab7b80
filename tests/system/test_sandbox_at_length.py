"""H7, H8: programs that try to leave the sandbox of the reward `code`, or to be paid for nothing, by the thousand."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from support.fault_counts import counted
from support.sandbox_escapes import FORGERIES, PROBES

from rft_core.errors import PreflightError
from rft_trainer.records.scores import RewardItem, RewardStatus
from rft_trainer.rewards.unit_tests.code import CodeLimits, CodeReward
from rft_trainer.sandbox.cage import CageEnd, CageLimits, run_cages
from rft_trainer.sandbox.cage_main import decode, encode
from rft_trainer.sandbox.interpreter import CagedPython
from rft_trainer.sandbox.isolation import proven_python

pytestmark = pytest.mark.system

LIMITS = CageLimits(cpu_seconds=1, memory_bytes=256 << 20, wall_seconds=30.0)
SECRET = "host-secret-4711"
AT_ONCE = 2


@pytest.fixture(scope="module")
def python() -> CagedPython:
    return proven_python()


@pytest.fixture
def bait(tmp_path: Path) -> Iterator[tuple[Path, socket.socket]]:
    """A file that anybody may read and write, and a server, which no probe may reach."""
    folder = Path("/tmp") / f"rft-bait-{os.getpid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    file = folder / "secret"
    file.write_text(SECRET)
    file.chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield file, server
    file.unlink()
    folder.rmdir()


def nobody_left(python: CagedPython) -> bool:
    """Whether no process of a cage is left, after at most ten seconds."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if not any(str(python.directory).encode() in _command(entry) for entry in Path("/proc").iterdir()):
            return True
        time.sleep(0.02)
    return False


def _command(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes() if entry.name.isdecimal() else b""
    except OSError:
        return b""


@counted(60, 3000)
def test_h7_no_probe_gets_out(
    python: CagedPython, bait: tuple[Path, socket.socket], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each probe tries one way; it returns what it got, which is nothing, and nothing outside has changed."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    file, server = bait
    names, ends, escaped, longest = list(PROBES), Counter[str](), list[str](), 0.0
    for start in range(0, number, 20):
        chosen = [names[n % len(names)] for n in range(start, min(number, start + 20))]
        arguments = [encode(str(file)), encode(server.getsockname()[1]), encode(os.getpid())]
        request = {"call": "probe", "args": arguments, "kwargs": []}
        began = time.monotonic()
        runs = run_cages(python, [(LIMITS, PROBES[name], [request]) for name in chosen], at_once=AT_ONCE)
        longest = max(longest, time.monotonic() - began)
        for name, run in zip(chosen, runs, strict=True):
            assert run.end in (CageEnd.DONE, CageEnd.PROGRAM), (name, run)
            reply = run.replies.get(0, {})
            # a probe that is wrong itself would be contained by anything
            assert "error" not in reply, (name, reply)
            got = decode(reply["value"]) if "value" in reply else None
            escaped += [f"{name}: {got!r}"[:300]] if got else []
            ends[str(run.end)] += 1
        assert [entry.name for entry in file.parent.iterdir()] == ["secret"], chosen
        assert file.read_text() == SECRET, chosen
        with pytest.raises(BlockingIOError):
            server.accept()
    assert escaped == []
    assert nobody_left(python)
    print(f"\nH7: {number} runs of {len(names)} probes, {dict(ends)}; 20 of them took at most {longest:.1f} s")


@counted(20, 400)
def test_h8_no_reward_is_forged(python: CagedPython, number: int) -> None:
    """Programs that solve nothing are worth 0, as wrong ones are; right ones between them are worth 1."""
    reward = CodeReward(num_workers=AT_ONCE, timeout=30.0, limits=CodeLimits(1, 256 << 20), isolation=lambda: python)
    names, ends = list(FORGERIES), Counter[str]()
    for start in range(0, number, len(names)):
        rng = Random(f"h8 {start}")
        factor, offset = rng.randint(3, 9), rng.randint(11, 99)
        label = [{"call": "f", "args": [x], "expected": factor * x + offset} for x in rng.sample(range(1, 50), 3)]
        chosen = [names[n % len(names)] for n in range(start, min(number, start + len(names)))]
        right = f"def f(x):\n    return {factor} * x + {offset}\n"
        programs = [*(FORGERIES[name] for name in chosen), right]
        scores = reward([RewardItem("rows:0", "?", text, label, "stop", 1) for text in programs])
        for name, score in zip(chosen, scores[:-1], strict=True):
            assert (score.value, score.status) == (0.0, RewardStatus.OK), (name, score)
            assert score.breakdown["tests"] == 0.0, (name, score)
            ends[score.detail.partition(": ")[2][:24]] += 1
        assert scores[-1].value == 1.0, (start, scores[-1])
    assert nobody_left(python)
    print(f"\nH8: {number} of {len(names)} kinds, all worth 0: {json.dumps(ends)}")


def test_h7_without_isolation_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreflightError):
        CodeReward()
