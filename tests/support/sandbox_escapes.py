"""Programs against the sandbox: ways out of it, and ways to be paid without a solution."""

from __future__ import annotations

_HEAD = """
import ctypes, os, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def probe(file, port, pid):
    try:
        return attempt(file, port, pid)
    except (OSError, MemoryError, RuntimeError):
        return None
"""


def _probe(body: str) -> str:
    return f"{_HEAD}def attempt(file, port, pid):\n" + "".join(f"    {line}\n" for line in body.split("\n"))


def _call(number: int, *arguments: str) -> str:
    """Whether a system call of x86_64 gives what is not an error."""
    return f"return libc.syscall({', '.join([str(number), *arguments])}) >= 0"


_READS = {
    "file of the host": "return open(file).read()",
    "file by a system call": "return os.read(os.open(file, os.O_RDONLY), 99)",
    "file by a link": 'os.symlink(file, "/tmp/link")\nreturn open("/tmp/link").read()',
    "file by a hard link": 'os.link(file, "/tmp/hard")\nreturn open("/tmp/hard").read()',
    "file by dots": 'return open("/python/../../../.." + file).read()',
    "file by another root": 'return open("/proc/1/root" + file).read()',
    "file by a mapping": "import mmap\nreturn mmap.mmap(os.open(file, os.O_RDWR), 0)[:9]",
    "passwd": 'return open("/etc/passwd").read()',
    "shadow": 'return open("/etc/shadow").read()',
    "home": 'return os.listdir("/root") + os.listdir("/home")',
    "sys": 'return os.listdir("/sys")',
    "proc": 'return os.listdir("/proc")',
    "own memory file": 'return open("/proc/self/mem", "rb").read(1)',
    "own environment file": 'return open("/proc/self/environ").read()',
    "disk": 'return os.open("/dev/sda", os.O_RDONLY)',
    "kernel memory": 'return open("/dev/mem", "rb").read(1)',
    "kernel log": "return libc.klogctl(3, ctypes.create_string_buffer(99), 99) > 0",
    "descriptors": 'return [n for n in range(3, 64) if os.path.isdir(f"/dev/fd/{n}")]',
    "directory descriptor": "import stat\nfor n in range(3, 64):\n    try:\n"
    "        if stat.S_ISDIR(os.fstat(n).st_mode):\n"
    "            return os.listdir(n)\n    except OSError:\n        pass",
    "secret of the environment": 'return [v for v in os.environ.values() if "4711" in v]',
}
_WRITES = {
    "file of the host": 'open(file, "w").write("x")\nreturn 1',
    "beside a file of the host": 'open(os.path.dirname(file) + "/new", "w").close()\nreturn 1',
    "remove": "os.unlink(file)\nreturn 1",
    "rename": 'os.rename(file, file + "2")\nreturn 1',
    "mode": "os.chmod(file, 0)\nreturn 1",
    "interpreter": 'open("/python/lib/os.py", "a").write("x")\nreturn 1',
    "library": 'open("/lib64/ld-linux-x86-64.so.2", "r+b").write(b"x")\nreturn 1',
    "root": 'open("/x", "w").close()\nreturn 1',
    "device": 'os.mknod("/tmp/sda", 0o60666, os.makedev(8, 0))\nreturn 1',
    "set user id": 'open("/tmp/s", "w").close()\nos.chmod("/tmp/s", 0o4777)\nos.chown("/tmp/s", 0, 0)\nreturn 1',
    "disk beyond its size": 'with open("/tmp/fill", "wb") as out:\n    for _ in range(64):\n'
    "        out.write(bytes(1 << 20))\n"
    "        out.flush()\nreturn os.path.getsize('/tmp/fill') > 32 << 20",
    "files without number": 'for n in range(300000):\n    open(f"/tmp/{n}", "w").close()\nreturn 1',
    "a sparse file": 'os.truncate(os.open("/tmp/sparse", os.O_CREAT | os.O_RDWR), 1 << 40)\nreturn 1',
}
_NETWORK = {
    "loopback": 'return bool(socket.create_connection(("127.0.0.1", port), 1))',
    "loopback 6": 'return bool(socket.create_connection(("::1", port), 1))',
    "metadata": 'return bool(socket.create_connection(("169.254.169.254", 80), 1))',
    "unix": "return socket.socket(socket.AF_UNIX).fileno()",
    "abstract unix": 'return socket.socketpair()[0].send(b"x")',
    "netlink": "return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).fileno()",
    "vsock": "return socket.socket(40, socket.SOCK_STREAM).fileno()",
    "raw": "return socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).fileno()",
    "packet": "return socket.socket(17, socket.SOCK_RAW, 3).fileno()",
    "names": 'return socket.getaddrinfo("localhost", port)and socket.gethostbyname("example.org")',
}
_PROCESSES = {
    "fork": "return os.fork() + 1",
    "clone": _call(56, "17", "0", "0", "0", "0"),
    "clone3": _call(435, "0", "0"),
    "vfork": _call(58),
    "spawn": 'return os.posix_spawn("/python/bin/python3", ["python3", "-c", "pass"], {})',
    "daemon": "os.setsid()\nreturn os.fork() + 1",
    "a bomb": "while True:\n    os.fork()",
    "zombies": "for _ in range(1000):\n"
    "    os.posix_spawn('/python/bin/python3', ['python3', '-c', 'pass'], {})\nreturn 1",
    "kill": "os.kill(pid, 0)\nreturn 1",
    "kill all": "os.kill(-1, 0)\nreturn len(os.listdir('/proc'))",
    "priority": "return libc.setpriority(0, pid, -20) == 0",
    "trace": "return libc.ptrace(16, pid, 0, 0) == 0",
    "memory of another": "return libc.process_vm_readv(pid, 0, 0, 0, 0, 0) >= 0",
    "a descriptor of another": _call(434, "pid", "0"),
    "threads without number": "threading.stack_size(1 << 16)\nfor n in range(500):\n"
    "    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\nreturn 1",
}
_KERNEL = {
    "user namespace": "return libc.unshare(0x10000000) == 0",
    "mount namespace": "return libc.unshare(0x20000) == 0",
    "mount": 'return libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0',
    "bind": 'return libc.mount(b"/", b"/tmp", None, 4096, None) == 0',
    "remount": 'return libc.mount(None, b"/", None, 32, None) == 0',
    "new mounts": _call(429, "-100", 'b"/"', "1"),
    "chroot": 'return libc.chroot(b"/tmp") == 0',
    "pivot": _call(155, 'b"/tmp"', 'b"/tmp"'),
    "root": "return libc.setuid(0) == 0 or libc.setresuid(0, 0, 0) == 0",
    "capabilities": "return libc.prctl(47, 2, 0, 0, 0) == 0 or libc.prctl(24, 0, 0, 0, 0) == 0 and os.getuid() == 0",
    "keys": _call(250, "0", "-4", "1"),
    "io_uring": _call(425, "4", "0"),
    "perf": _call(298, "0", "0", "-1", "-1", "0"),
    "bpf": _call(321, "0", "0", "0"),
    "userfaultfd": _call(323, "0"),
    "inotify": "return libc.inotify_init1(0) >= 0",
    "fanotify": _call(300, "0", "0"),
    "modules": _call(313, "0", 'b""', "0"),
    "another table of calls": _call(0x40000000 + 57),
    "handles": _call(304, "-100", "0", "0"),
    "shared memory": "return libc.shmget(0, 1 << 20, 0o1600) >= 0",
    "message queue": _call(68, "0", "0o1600"),
    "memfd": 'return os.memfd_create("x")',
    "memory": "return len(bytearray(8 << 30))",
    "limits": "return libc.prlimit(0, 9, (ctypes.c_ulong * 2)(2**40, 2**40), None) == 0",
    "the clock": "return libc.settimeofday((ctypes.c_long * 2)(0, 0), None) == 0",
    "the name of the host": 'return libc.sethostname(b"x", 1) == 0',
    "terminal input": 'import fcntl\nreturn [n for n in range(3) if fcntl.ioctl(n, 0x5412, b"x") == 0]',
}
_PYTHON = {
    "classes": "found = [c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen']\n"
    "return [c(['/bin/true']) for c in found]",
    "frames": "frame, seen = sys._getframe(), ''\nwhile frame:\n"
    "    seen += repr(frame.f_locals) + repr(frame.f_globals)\n"
    "    frame = frame.f_back\nreturn 'host-secret' + '-4711' in seen",
    "all objects": "import gc\nreturn any('host-secret' + '-4711' in repr(one)[:500] for one in gc.get_objects())",
    "a spin": "while True:\n    pass",
    "a spin against signals": "import signal\nfor n in (2, 14, 15, 24):\n    signal.signal(n, signal.SIG_IGN)\n"
    "while True:\n    pass",
    "output": "while True:\n    sys.stdout.write('x' * 100000)",
    "output everywhere": "while True:\n    for n in range(1, 64):\n        try:\n            os.write(n, b'x' * 9999)\n"
    "        except OSError:\n            pass",
    "codes of a terminal": "print('\\x1b]0;x\\x07\\x1b[2J%s%n{0.__class__}')\nreturn None",
    "a crash": "ctypes.string_at(0)",
    "another program": "os.execv('/bin/sh', ['sh', '-c', 'echo x > ' + file])",
    "the loader": "return ctypes.CDLL('/usr/lib/x86_64-linux-gnu/libutil.so.1') and os.path.exists('/usr/bin')",
}
PROBES = {
    f"{kind}: {name}": _probe(body)
    for kind, table in (
        ("read", _READS),
        ("write", _WRITES),
        ("network", _NETWORK),
        ("processes", _PROCESSES),
        ("kernel", _KERNEL),
        ("python", _PYTHON),
    )
    for name, body in table.items()
}
"""Name -> program with `probe(file, port, pid)`, which returns what it got, or nothing."""

_CLAIM = """
import json, os, sys
frame, nonce = sys._getframe(), "0" * 32
while frame:
    request = frame.f_locals.get("request")
    nonce = request["nonce"] if isinstance(request, dict) and "nonce" in request else nonce
    frame = frame.f_back
for said in CLAIMS:
    for test in range(3):
        line = json.dumps({"nonce": nonce, "test": test, **said}).encode() + b"\\n"
        for fd in range(1, 64):
            try:
                os.write(fd, line)
            except OSError:
                pass
os._exit(0)
"""
FORGERIES = {
    "exit": "import sys\nsys.exit(0)",
    "leave": "import os\nos._exit(0)",
    "leave in the call": "def f(x):\n    import os\n    os._exit(0)",
    "leave at the end": "import atexit, os\natexit.register(os._exit, 0)",
    "another program": "import os\nos.execv('/python/bin/python3', ['python3', '-c', 'print(1)'])",
    "abort": "import os\nos.abort()",
    "said to be passed": _CLAIM.replace(
        "CLAIMS", '[{"passed": True}, {"reward": 1}, {"ok": 1, "value": ["bool", True]}]'
    ),
    "said to be none": _CLAIM.replace("CLAIMS", '[{"value": None}, {"value": []}, {"value": ["none"]}, {}]'),
    "said without end": _CLAIM.replace("CLAIMS", '[{"value": ["str", "x" * 9000000]}]'),
    "printed": "print('PASSED', 'OK', '1.0', '3 passed in 0.01s')\ndef f(x):\n    print('PASSED')",
    "equal to all": "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()",
    "an integer equal to all": "class A(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\n"
    "def f(x): return A(5)",
    "a text equal to all": "class A(str):\n    def __eq__(self, other): return True\ndef f(x): return A()",
    "builtins": "import builtins\nbuiltins.bool = builtins.all = builtins.any = lambda *a: True\ndef f(x): return 5",
    "the judge's names": "import sys\nsys.modules['__main__'].encode = lambda *a: ['bool', True]\ndef f(x): return 5",
    "the encoder": "import json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\ndef f(x): return 5",
    "the files of the tests": "import os\ndef f(x):\n    seen = []\n    for folder, _, names in os.walk('/tmp'):\n"
    "        seen += [open(os.path.join(folder, name)).read() for name in names]\n    return seen",
    "the last run's files": "import os\ndef f(x):\n    if os.path.exists('/tmp/answer'):\n"
    "        return open('/tmp/answer').read()\n"
    "    open('/tmp/answer', 'w').write('1.0')",
    "the frames of the judge": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        if 'expected' in frame.f_locals:\n            return frame.f_locals['expected']\n"
    "        frame = frame.f_back",
    "a thread that goes on": "import threading, time\ndef f(x):\n"
    "    threading.Thread(target=time.sleep, args=(100,)).start()",
    "not a number": "def f(x):\n    return float('nan')",
    "everything at once": "def f(x):\n    return list(range(1000))",
}
"""Name -> program that solves no test of `f(x)`, whose results are numbers from 14 on."""
