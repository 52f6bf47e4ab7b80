"""Escapes from the sandbox of the reward `code`: each is tried by a submitted program, and none gets out or earns more.

What needs bubblewrap is here; the parts are tested in packages/rft-trainer/tests/sandbox.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.unit_tests.code import CodeLimits, CodeReward
from rft_trainer.sandbox.cage import CageEnd, CageLimits, CageRun, run_cages
from rft_trainer.sandbox.cage_main import decode, encode
from rft_trainer.sandbox.interpreter import CagedPython
from rft_trainer.sandbox.isolation import proven_python

pytestmark = pytest.mark.system

LIMITS = CageLimits(cpu_seconds=1, memory_bytes=256 << 20, wall_seconds=30.0)
TESTS = [{"call": "f", "args": [x], "expected": 3 * x + 41} for x in (0, 1, 2)]
RIGHT = "def f(x):\n    return 3 * x + 41\n"
SECRET = "expected-17-value"


@pytest.fixture(scope="module")
def python() -> CagedPython:
    return proven_python()


@pytest.fixture(scope="module")
def reward(python: CagedPython) -> CodeReward:
    return CodeReward(num_workers=2, timeout=30.0, limits=CodeLimits(1, 256 << 20), isolation=lambda: python)


def ran(python: CagedPython, program: str, *args: Any, limits: CageLimits = LIMITS) -> CageRun:
    request = {"call": "f", "args": [encode(each) for each in args], "kwargs": []}
    [run] = run_cages(python, [(limits, program, [request])], at_once=1)
    return run


def found(python: CagedPython, program: str, *args: Any) -> Any:
    """What the program returned; the text of what it raised where it could not."""
    run = ran(python, program, *args)
    assert run.end is CageEnd.DONE, run.reason
    reply = run.replies[0]
    return decode(reply["value"]) if "value" in reply else reply["error"]


def scored(reward: CodeReward, program: str, label: Any = None) -> Score:
    [score] = reward([RewardItem("rows:0", "?", program, label or TESTS, "stop", 1)])
    return score


def children_of(marker: str) -> list[int]:
    """Processes of this machine with the marker in their command line or environment."""
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in text:
                pids.append(int(entry.name))
    return pids


def gone(marker: str) -> bool:
    until = time.monotonic() + 30
    while children_of(marker) and time.monotonic() < until:
        time.sleep(0.02)
    return not children_of(marker)


def test_a_right_program_is_right_and_a_wrong_one_says_which_test_failed(reward: CodeReward) -> None:
    assert scored(reward, RIGHT) == Score(1.0, breakdown={"correctness": 1.0, "tests": 1.0})
    wrong = scored(reward, "def f(x):\n    return 41\n")
    assert (wrong.value, wrong.breakdown["tests"]) == (0.0, pytest.approx(1 / 3))
    assert wrong.detail == "1 of 3 tests passed; test 2: returned something else"


def test_programs_that_print_are_run_once_an_input(reward: CodeReward) -> None:
    label = {"inputs": ["3 4\n", "10 5"], "outputs": ["7\n", "15"]}
    assert scored(reward, "a, b = map(int, input().split())\nprint(a + b)", label).value == 1.0
    assert scored(reward, "import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit()", label).value == 1.0
    assert scored(reward, "print(sum(map(int, open(0).read().split())))", label).value == 1.0
    assert scored(reward, "import os\nos.write(1, b'7\\n')", label).breakdown["tests"] == 0.5


# 1, 2: what is outside cannot be read


def test_no_file_of_the_host_is_there(python: CagedPython, tmp_path: Path) -> None:
    with tempfile.NamedTemporaryFile("w", dir="/tmp", suffix="-canary") as canary:
        canary.write(SECRET)
        canary.flush()
        os.chmod(canary.name, 0o644)
        names = ["/etc/passwd", "/etc/shadow", canary.name, str(tmp_path), str(Path.home()), sys.prefix, __file__]
        names += ["/proc/self/root", "/sys", "/usr/bin", "/var", "/run", "/home", "/root", "/dev/sda", "/dev/shm"]
        program = "import os\ndef f(names): return [n for n in names if os.path.lexists(n)] + sorted(os.listdir('/'))"
        left = found(python, program, names)
    assert set(left) <= {"python", "dev", "tmp", "lib", "lib64"}


def test_links_and_mount_points_lead_nowhere(python: CagedPython) -> None:
    program = """
import os
def f(name):
    os.symlink(name, "/tmp/link")
    os.symlink("/proc/1/root", "/tmp/root")
    seen = []
    for path in ("/tmp/link", "/tmp/root/etc/passwd", "/../../etc/passwd", "/python/../etc/passwd"):
        try:
            seen.append(open(path).read())
        except OSError:
            pass
    return seen
"""
    assert found(python, program, "/etc/passwd") == []


# 3: the environment


def test_neither_variables_nor_other_processes_are_seen(python: CagedPython, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    program = """
import os, ctypes, glob
def f():
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    texts, index = [], 0
    while environ[index]:
        texts.append(environ[index].decode())
        index += 1
    return texts + sorted(os.environ) + glob.glob("/proc/*") + [str(os.getppid())]
"""
    seen = found(python, program)
    assert SECRET not in str(seen)
    assert {text.partition("=")[0] for text in seen} <= {
        *("LD_LIBRARY_PATH", "PYTHONHASHSEED", "MALLOC_ARENA_MAX", "PWD", "LC_CTYPE", "0", "1")
    }


# 4: what is outside cannot be written


def test_nothing_can_be_written_but_a_small_tmp(python: CagedPython) -> None:
    program = """
import os
def f():
    written = []
    for path in ("/x", "/python/x", "/python/lib/libc.so.6", "/dev/x", "/lib64/x", "/tmp/rft-written-inside"):
        try:
            open(path, "w").close()
            written.append(path)
        except OSError:
            pass
    return written
"""
    assert found(python, program) == ["/tmp/rft-written-inside"]
    assert not Path("/tmp/rft-written-inside").exists()


def test_tmp_is_bounded_and_empty_in_the_next_run(python: CagedPython) -> None:
    program = """
import os
def f():
    before = [name for name in os.listdir("/tmp") if name.startswith("fill")]
    total = 0
    try:
        for index in range(50):
            with open(f"/tmp/fill{index}", "wb") as stream:
                for _ in range(10):
                    total += stream.write(bytes(1 << 20))
                    stream.flush()
    except OSError:
        pass
    return [before, total]
"""
    for _ in range(2):
        before, total = found(python, program)
        assert before == []
        assert total <= LIMITS.temporary_bytes


# 5: the network


def test_a_server_of_this_machine_is_not_reached(python: CagedPython) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        program = """
import socket, ctypes
def f(port):
    told = []
    inet, inet6, unix = (2, ("127.0.0.1", port)), (10, ("::1", port)), (1, "/tmp/s")
    netlink, vsock = (16, (0, 0)), (40, (2, port))
    for family, address in (inet, inet6, unix, netlink, vsock):
        try:
            with socket.socket(family) as s:
                s.settimeout(1)
                s.connect(address)
            told.append(family)
        except OSError:
            pass
    told.append(ctypes.CDLL(None).socket(2, 1, 0))
    return told
"""
        assert found(python, program, server.getsockname()[1]) == [-1]
        with pytest.raises(TimeoutError):
            server.accept()


# 6, 7: processes and threads


def test_no_process_can_be_started(python: CagedPython) -> None:
    program = """
import os, subprocess, ctypes, multiprocessing
def f():
    made = []
    libc = ctypes.CDLL(None)
    tries = {
        "fork": os.fork,
        "forkpty": os.forkpty,
        "spawn": lambda: os.posix_spawn("/python/bin/python3", ["python3", "-c", "pass"], {}),
        "run": lambda: subprocess.run(["/python/bin/python3", "-c", "pass"]),
        "system": lambda: libc.system(b"/bin/true") == 0 or 1 / 0,
        "clone": lambda: libc.syscall(56, 17, 0, 0, 0, 0) >= 0 or 1 / 0,
        "clone3": lambda: libc.syscall(435, 0, 0) >= 0 or 1 / 0,
    }
    for name, way in tries.items():
        try:
            way()
            made.append(name)
        except BaseException:
            pass
    return made
"""
    assert found(python, program) == []


def test_threads_work_and_their_number_is_limited(python: CagedPython) -> None:
    program = """
import threading
def f():
    threading.stack_size(1 << 16)
    stop, count = threading.Event(), 0
    try:
        for count in range(5000):
            threading.Thread(target=stop.wait, daemon=True).start()
    except RuntimeError:
        pass
    stop.set()
    return count
"""
    assert 1 <= found(python, program) <= 64


# 8, 9, 10: memory, time, output


def test_memory_is_limited(python: CagedPython, reward: CodeReward) -> None:
    assert "MemoryError" in found(python, "def f():\n    return len(bytearray(1 << 30))")
    hoard = "def f(x):\n    all = []\n    while True:\n        all.append(bytearray(1 << 20))\n"
    score = scored(reward, hoard)
    assert score.value == 0.0
    assert "MemoryError" in score.detail


def test_memory_beside_the_address_space_cannot_be_had(python: CagedPython) -> None:
    program = """
import ctypes, os
def f():
    libc, had = ctypes.CDLL(None), []
    had += ["shm"] * (libc.shmget(0, 1 << 20, 0o1600) >= 0)
    for name, way in (("memfd", lambda: os.memfd_create("x")), ("shm_open", lambda: open("/dev/shm/x", "w"))):
        try:
            way()
            had.append(name)
        except OSError:
            pass
    return had
"""
    assert found(python, program) == []


@pytest.mark.parametrize(
    "loop",
    [
        "while True: pass",
        "import signal\nfor n in (15, 24, 2, 14):\n    signal.signal(n, signal.SIG_IGN)\nwhile True:\n    pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    ],
)
def test_a_loop_is_ended_and_is_worth_nothing(reward: CodeReward, loop: str) -> None:
    score = scored(reward, loop)
    assert (score.value, score.status) == (0.0, RewardStatus.OK)
    assert "processor time" in score.detail


def test_a_program_that_sleeps_is_ended_and_is_worth_nothing(python: CagedPython) -> None:
    limits = CageLimits(cpu_seconds=1, memory_bytes=256 << 20, wall_seconds=2.0)
    run = ran(python, "import time\ndef f():\n    time.sleep(1000)", limits=limits)
    assert (run.end, run.replies) == (CageEnd.PROGRAM, {})


def test_endless_output_is_cut(reward: CodeReward, python: CagedPython) -> None:
    label = {"inputs": [""], "outputs": ["1"]}
    assert scored(reward, "while True:\n    print('x' * 10000)", label).value == 0.0
    flood = "import os\nwhile True:\n    for fd in range(3, 64):\n        try: os.write(fd, b'x' * 9999)\n"
    flood += "        except OSError: pass"
    assert scored(reward, flood).value == 0.0
    lines = flood.replace("b'x' * 9999", "b'{}\\n' * 9999")
    run = ran(python, lines)
    assert (run.end, run.replies) == (CageEnd.PROGRAM, {})


# 11, 12: other processes


def test_no_signal_and_no_trace_reaches_another_process(python: CagedPython) -> None:
    program = """
import ctypes, os
def f(pid):
    libc, reached = ctypes.CDLL(None), []
    for other in (pid, pid - 1, 1 << 20):
        try:
            os.kill(other, 0)
            reached.append(other)
        except OSError:
            pass
    reached += ["ptrace"] * (libc.ptrace(16, pid, 0, 0) == 0)
    reached += ["memory"] * (libc.process_vm_readv(pid, 0, 0, 0, 0, 0) >= 0)
    return reached
"""
    assert found(python, program, os.getpid()) == []


def test_killing_everything_harms_the_program_alone(reward: CodeReward) -> None:
    assert scored(reward, "import os\nos.kill(-1, 9)").value == 0.0
    assert scored(reward, "import os\nos.kill(os.getpid(), 9)").value == 0.0
    assert scored(reward, "import os\nos.kill(1, 9)\n" + RIGHT).status is RewardStatus.OK
    assert scored(reward, RIGHT).value == 1.0


def test_nothing_is_left_after_a_run(python: CagedPython) -> None:
    marker = f"left-{os.getpid()}"
    program = f"""
import os, threading, time
name = "{marker}"
def f():
    os.setsid()
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return 1
"""
    ran(python, program)
    assert gone(str(python.directory))


# 13: the kernel


def test_no_system_call_gives_rights_or_another_view(python: CagedPython) -> None:
    program = """
import ctypes, os
def f():
    libc, had = ctypes.CDLL(None, use_errno=True), []
    tries = {
        "unshare user": lambda: libc.unshare(0x10000000),
        "unshare mount": lambda: libc.unshare(0x20000),
        "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
        "umount": lambda: libc.umount2(b"/tmp", 2),
        "remount": lambda: libc.mount(None, b"/", None, 32, None),
        "chroot": lambda: libc.chroot(b"/tmp"),
        "setuid": lambda: libc.setuid(0),
        "pivot": lambda: libc.syscall(155, b"/tmp", b"/tmp"),
        "keyctl": lambda: libc.syscall(250, 0, -4, 1),
        "io_uring": lambda: libc.syscall(425, 4, 0),
        "perf": lambda: libc.syscall(298, 0, 0, -1, -1, 0),
        "bpf": lambda: libc.syscall(321, 0, 0, 0),
        "userfaultfd": lambda: libc.syscall(323, 0),
        "inotify": lambda: libc.inotify_init1(0),
        "setns": lambda: libc.setns(0, 0),
        "mknod": lambda: libc.mknod(b"/tmp/sda", 0o60666, 0x800),
        "limit": lambda: libc.prlimit(0, 9, (ctypes.c_ulong * 2)(2**40, 2**40), None),
        "personality": lambda: libc.personality(0x0040000),
    }
    for name, way in tries.items():
        if way() >= 0:
            had.append(name)
    return had
"""
    assert found(python, program) == []
    assert ctypes.CDLL(None).getpid() == os.getpid()


def test_there_is_no_program_to_become_another_user_with(python: CagedPython) -> None:
    program = """
import os
def f():
    return [
        os.path.join(folder, name)
        for folder, _, names in os.walk("/")
        for name in names
        if os.lstat(os.path.join(folder, name)).st_mode & 0o6000
    ] + [str(os.getuid()), str(os.geteuid())]
"""
    assert found(python, program) == ["65534", "65534"]


# 14 to 19: a reward that was not earned


def test_early_ends_earn_nothing(reward: CodeReward) -> None:
    for program in (
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "def f(x):\n    import os\n    os._exit(0)",
        "raise SystemExit",
        "import atexit, os\natexit.register(os._exit, 0)",
        "import os\nos.abort()",
        "import ctypes\nctypes.string_at(0)",
        "import os\nos.execv('/python/bin/python3', ['python3', '-c', 'print(1)'])",
    ):
        score = scored(reward, program)
        assert (score.value, score.status, score.breakdown["tests"]) == (0.0, RewardStatus.OK, 0.0), program


def test_a_forged_verdict_earns_nothing(reward: CodeReward) -> None:
    forged = """
import os, sys, json
frame, nonce = sys._getframe(), "0" * 32
while frame:
    request = frame.f_locals.get("request")
    nonce = request["nonce"] if isinstance(request, dict) else nonce
    frame = frame.f_back
for guess in ("0" * 32, nonce):
    claims = {"passed": True}, {"value": ["bool", True]}, {"reward": 1}, {"value": ["int", "0x29"], "ok": 3}, {"ok": 1}
    for said in claims:
        for test in range(3):
            line = json.dumps({"nonce": guess, "test": test, **said}).encode() + b"\\n"
            for fd in range(3, 64):
                try:
                    os.write(fd, line)
                except OSError:
                    pass
os._exit(0)
"""
    score = scored(reward, forged)
    # with the nonce of its run a program may claim results: they are compared as those that it returns
    assert (score.value, score.status) == (0.0, RewardStatus.OK)
    assert score.breakdown["tests"] <= 1 / 3


def test_an_object_that_equals_everything_earns_nothing(reward: CodeReward) -> None:
    for program in (
        "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()",
        "class A(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef f(x): return A(5)",
        "class A(list):\n    def __eq__(self, other): return True\ndef f(x): return A()",
        "class A(str):\n    def __eq__(self, other): return True\ndef f(x): return A()",
        "import builtins\nbuiltins.bool = lambda x: True\nbuiltins.all = any = lambda x: True\ndef f(x): return 5",
        "import sys\nsys.modules['__main__'].encode = lambda *a: ['bool', True]\ndef f(x): return 5",
        "import json, _json\njson.dumps = _json.encode_basestring_ascii = lambda *a: '{}'\ndef f(x): return 5",
    ):
        assert scored(reward, program).value == 0.0, program


def test_numbers_and_nesting_out_of_bounds_earn_nothing(reward: CodeReward) -> None:
    beyond = ["float('nan')", "float('inf')", "1e999", "10 ** 200000", "-10 ** 5000", "complex('nan')", "b'41'"]
    for value in [*beyond, "'41'"]:
        score = scored(reward, f"def f(x):\n    return {value}\n")
        assert (score.value, score.status) == (0.0, RewardStatus.OK), value
    deep = "def f(x):\n    a = []\n    for _ in range(100000):\n        a = [a]\n    return a\n"
    assert "nested" in scored(reward, deep).detail
    assert "RecursionError" in scored(reward, "def f(x):\n    return f(x)\n").detail
    crash = "import sys\nsys.setrecursionlimit(10**9)\ndef f(x):\n    return f(x)\n"
    assert scored(reward, crash).value == 0.0


def test_what_is_expected_is_nowhere_in_the_sandbox(python: CagedPython, reward: CodeReward) -> None:
    search = """
import gc, sys, os
def f(x):
    seen = []
    for thing in gc.get_objects():
        try:
            seen.append(repr(thing)[:2000])
        except BaseException:
            pass
    for folder, _, names in os.walk("/tmp"):
        for name in names:
            seen.append(open(os.path.join(folder, name), errors="replace").read()[:100000])
    frame = sys._getframe()
    while frame:
        seen.append(repr(frame.f_locals)[:100000])
        frame = frame.f_back
    seen.append(" ".join(sys.orig_argv))
    text = "".join(seen)
    where = text.find("expected-" + str(17))
    return text[where:where + 20] if where >= 0 else ""
"""
    assert scored(reward, search, [{"call": "f", "args": [1], "expected": SECRET}]).value == 0.0
    assert found(python, search, 1) == ""


def test_one_response_leaves_nothing_for_the_next(reward: CodeReward) -> None:
    spoil = "import builtins\nbuiltins.seen = 1\nopen('/tmp/answer', 'w').write('41')\n" + RIGHT
    look = (
        "import builtins, os\ndef f(x):\n"
        "    return 3 * x + 41 if os.path.exists('/tmp/answer') or hasattr(builtins, 'seen') else 0\n"
    )
    scores = reward([RewardItem(f"rows:{i}", "?", text, TESTS, "stop", 1) for i, text in enumerate([spoil, look] * 2)])
    assert [score.value for score in scores] == [1.0, 0.0, 1.0, 0.0]


@pytest.fixture
def no_namespaces() -> Iterator[str]:
    """A bubblewrap that may make no namespace, first on the path."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "bwrap"
        program.write_text(
            '#!/bin/sh\n[ "$1" = --help ] && { echo --disable-userns; exit 0; }\n'
            "echo 'bwrap: Creating new namespace failed: Operation not permitted' >&2\nexit 1\n"
        )
        program.chmod(0o755)
        os.chmod(folder, 0o755)
        yield folder


def test_without_isolation_nothing_is_run(no_namespaces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rft_core.errors import PreflightError

    monkeypatch.setenv("PATH", f"{no_namespaces}:{os.environ['PATH']}")
    with pytest.raises(PreflightError, match="Creating new namespace failed") as caught:
        CodeReward()
    assert caught.value.problem.code == "sandbox.no_namespaces"
