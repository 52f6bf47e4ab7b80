"""The filter, run by a small machine of classic BPF: what it answers to each system call."""

from __future__ import annotations

import errno
import struct

import pytest

from rft_trainer.sandbox.system_calls import filter_program, has_filter

ALLOWED, KILLED = 0x7FFF0000, 0x80000000
REFUSED, UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
X86, ARM = 0xC000003E, 0xC00000B7
THREAD, PROCESS = 0x3D0F00, 17


def answer(program: bytes, number: int, architecture: int, first: int = 0) -> int:
    """What the filter returns for a call, by the rules of the kernel's interpreter."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, first, 0, 0, 0, 0, 0)
    code = list(struct.iter_unpack("<HBBI", program))
    at = accumulator = 0
    while True:
        operation, if_true, if_false, value = code[at]
        at += 1
        if operation == 0x06:
            return value
        if operation == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
            continue
        holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[operation]
        at += if_true if holds else if_false


@pytest.mark.parametrize(
    ("machine", "architecture", "clone", "socket", "mount", "read", "execve"),
    [("x86_64", X86, 56, 41, 165, 0, 59), ("aarch64", ARM, 220, 198, 40, 63, 221)],
)
def test_the_filter_lets_a_program_compute_and_make_threads_and_nothing_else(
    machine: str, architecture: int, clone: int, socket: int, mount: int, read: int, execve: int
) -> None:
    program = filter_program(machine)
    assert [answer(program, number, architecture) for number in (read, execve)] == [ALLOWED, ALLOWED]
    assert [answer(program, number, architecture) for number in (socket, mount)] == [REFUSED, REFUSED]
    assert answer(program, clone, architecture, THREAD) == ALLOWED
    assert answer(program, clone, architecture, PROCESS) == REFUSED
    # pidfd_send_signal, io_uring_setup, clone3, memfd_secret, and what will come
    assert {answer(program, number, architecture) for number in (424, 425, 435, 447, 500)} == {UNKNOWN}


def test_calls_of_another_table_end_the_program() -> None:
    program = filter_program("x86_64")
    assert answer(program, 2, 0x40000003) == KILLED  # of 32 bits, by int 0x80
    assert answer(program, 0x40000000 + 57, X86) == KILLED  # fork of x32
    assert answer(filter_program("aarch64"), 63, X86) == KILLED


def test_processes_of_x86_cannot_be_made_by_the_old_calls_either() -> None:
    assert [answer(filter_program("x86_64"), number, X86) for number in (57, 58)] == [REFUSED, REFUSED]


def test_other_machines_have_none() -> None:
    assert has_filter("x86_64")
    assert has_filter("aarch64")
    assert not has_filter("riscv64")
