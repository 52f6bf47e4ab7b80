"""A seccomp filter for caged programs: no other process, no socket, no memory that no limit counts.

The namespaces of the cage hide what is outside; this takes away parts of the kernel that a small program does not need
and that are not counted or separated elsewhere: sockets of virtual machines (AF_VSOCK is in no network namespace),
shared memory (outside the address space), keys, io_uring, tracing.
"""

from __future__ import annotations

import errno
import platform
import struct

_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_CLONE_THREAD = 0x10000
_FIRST_NEW_CALL = 424
"""System calls since Linux 5.1, with the same numbers everywhere: io_uring, pidfd, clone3, mounts by descriptor. C
libraries do without them where the kernel says that it has none."""
_OTHER_CALLS = 0x40000000
"""The first number of x32, a second table of the same kernel."""


_MACHINES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
"""Of each machine: its place in the rows below, its AUDIT_ARCH (linux/audit.h), and its number of clone."""

_REFUSED = {
    "fork": (57, None),
    "vfork": (58, None),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "ptrace": (101, 117),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
}
"""System calls that answer EPERM, with their numbers on x86_64 and aarch64; None where there is none."""


def has_filter(machine: str = "") -> bool:
    """Return whether there is a filter for this machine, or the one named."""
    return (machine or platform.machine()) in _MACHINES


def filter_program(machine: str = "") -> bytes:
    """Return the filter as bubblewrap takes it: instructions of classic BPF, 8 bytes each.

    Everything refused answers EPERM, and what is newer than Linux 5.0 ENOSYS. `clone` makes threads and nothing else.
    """
    place, architecture, clone = _MACHINES[machine or platform.machine()]
    numbers = [row[place] for row in _REFUSED.values()]
    code = [
        _statement(_LOAD, _ARCHITECTURE_AT),
        _jump(_JUMP_EQUAL, architecture, 1, 0),
        _statement(_RETURN, _KILL),
        _statement(_LOAD, _NUMBER_AT),
        _jump(_JUMP_AT_LEAST, _OTHER_CALLS, 0, 1),
        _statement(_RETURN, _KILL),
        _jump(_JUMP_AT_LEAST, _FIRST_NEW_CALL, 0, 1),
        _statement(_RETURN, _REFUSE | errno.ENOSYS),
    ]
    for number in (number for number in numbers if number is not None):
        code += [_jump(_JUMP_EQUAL, number, 0, 1), _statement(_RETURN, _REFUSE | errno.EPERM)]
    code += [
        _jump(_JUMP_EQUAL, clone, 1, 0),
        _statement(_RETURN, _ALLOW),
        _statement(_LOAD, _FIRST_ARGUMENT_AT),
        _jump(_JUMP_BIT, _CLONE_THREAD, 0, 1),
        _statement(_RETURN, _ALLOW),
        _statement(_RETURN, _REFUSE | errno.EPERM),
    ]
    return b"".join(code)


def _statement(code: int, value: int) -> bytes:
    return struct.pack("<HBBI", code, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
