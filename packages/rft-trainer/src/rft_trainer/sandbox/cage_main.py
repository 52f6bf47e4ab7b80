"""The program inside the cage: runs a submitted program on the inputs of its tests, and sends back what it gave.

It is given to Python as text (`python -c`), uses the standard library alone, and knows no expected value: whether a
result is right is found out outside. Everything here may be read and changed by the submitted program, which can gain
nothing by it: whatever it sends is a claim that is compared with the expected value.

Line in:   {"nonce": ..., "program": ..., "tests": [{"call": name, "args": [...], "kwargs": [...]} or {"stdin": text}],
            "memory_bytes": ..., "cpu_seconds": ..., "file_bytes": ..., "num_files": ..., "num_processes": ...}
Lines out: {"nonce": ..., "ready": true}, then for each test {"nonce": ..., "test": index} with "value" (encoded), or
           "printed", or "error".
"""

from __future__ import annotations

import io
import os
import resource
import sys
import types
from _json import encode_basestring_ascii, make_scanner
from importlib.machinery import SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:  # the import of `typing` would cost a caged start of Python some milliseconds
    from typing import Any

MAX_DEPTH = 64
"""Nesting of a value that crosses the wall."""
_MAX_ERROR = 300
_OUTPUT = "/tmp/.output"
_INPUT = "/tmp/.input"
_PROGRAM = "/tmp/program.py"


def encode(value: Any, depth: int = 0) -> list[Any]:
    """Return a value of Python's own types as JSON: [kind, payload], without any loss.

    Raises:
        TypeError: another type, or a value that is nested too deep.
    """
    if depth > MAX_DEPTH:
        raise TypeError(f"a value that is nested more than {MAX_DEPTH} levels deep")
    if value is None:
        return ["none"]
    if isinstance(value, bool):
        return ["bool", bool(value)]
    # as hexadecimal digits: neither JSON nor a limit on decimal digits stands in the way
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", [float.hex(value.real), float.hex(value.imag)]]
    if isinstance(value, str):
        return ["str", str.__str__(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    for kind, name in ((list, "list"), (tuple, "tuple"), (set, "set"), (frozenset, "set")):
        if isinstance(value, kind):
            return [name, [encode(each, depth + 1) for each in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(key, depth + 1), encode(each, depth + 1)] for key, each in value.items()]]
    raise TypeError(f"a value of type {type(value).__name__}")


def decode(encoded: Any) -> Any:
    """Return the value again, for the arguments of a call."""
    kind: str = encoded[0]
    payload: Any = encoded[1] if len(encoded) > 1 else None
    if kind in ("none", "bool", "str"):
        return payload
    if kind == "int":
        return int(payload, 16)
    if kind == "float":
        return float.fromhex(payload)
    if kind == "complex":
        return complex(*map(float.fromhex, payload))
    if kind == "bytes":
        return bytes.fromhex(payload)
    if kind == "dict":
        return {decode(key): decode(each) for key, each in payload}
    return {"list": list, "tuple": tuple, "set": set}[kind](map(decode, payload))


class _Scanner:
    """Options of the scanner of `_json`."""

    strict, memo = True, {}
    object_hook = object_pairs_hook = parse_constant = None
    parse_int, parse_float = int, float


def loads(text: str) -> Any:
    """Parse JSON with the scanner of the package `json`, whose import takes half of a start of Python."""
    options: Any = _Scanner  # the scanner reads attributes and asks for no class
    scan: Any = make_scanner(options)
    return scan(text, 0)[0]


def dumps(value: Any) -> str:
    """Return a reply as JSON: mappings, lists, texts, booleans and small integers."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{dumps(key)}:{dumps(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumps, value)) + "]"
    if value is True or value is False:
        return "true" if value else "false"
    return encode_basestring_ascii(value) if isinstance(value, str) else str(value)


def main() -> None:
    """Set the limits, then run every test in turn."""
    requests, replies = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(requests, "rb") as stream:
        request = loads(stream.readline().decode())

    def send(reply):
        line = memoryview(dumps({"nonce": request["nonce"], **reply}).encode() + b"\n")
        while line:
            line = line[os.write(replies, line) :]

    _limit(request)
    # fresh ends of 0, 1 and 2: what the program prints reaches neither the parent nor its terminal
    _redirect("")
    _write(_PROGRAM, request["program"])
    send({"ready": True})
    calls = any("call" in test for test in request["tests"])
    module, error = None, ""
    if calls:
        module, error = _guarded(lambda: _run("solution"))
    for index, test in enumerate(request["tests"]):
        if error:
            send({"test": index, "error": error})
        elif "call" in test:
            send({"test": index, **_called(module, test)})
        else:
            send({"test": index, **_printed(test["stdin"])})


def _limit(request):
    """Set hard limits, which nothing in the cage can raise again."""
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, request["memory_bytes"]),
        (resource.RLIMIT_CPU, request["cpu_seconds"]),
        (resource.RLIMIT_FSIZE, request["file_bytes"]),
        (resource.RLIMIT_NOFILE, request["num_files"]),
        (resource.RLIMIT_NPROC, request["num_processes"]),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _redirect(text):
    """Let the program read `text` and print to an empty file."""
    _write(_INPUT, text)
    for path, flags, number in ((_INPUT, os.O_RDONLY, 0), (_OUTPUT, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 1)):
        opened = os.open(path, flags, 0o600)
        # the program may have closed the number, which `open` then gives again
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
    os.dup2(1, 2)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8", errors="replace")
    sys.stdout, sys.stderr = _writer(1), _writer(2)


def _write(path, text):
    with open(path, "wb") as stream:
        stream.write(text.encode("utf-8", "surrogatepass"))


def _writer(number):
    stream = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
    return io.TextIOWrapper(stream, encoding="utf-8", errors="replace")


def _run(name):
    """Run the program as a module of that name."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    SourceFileLoader(name, _PROGRAM).exec_module(module)
    return module


def _guarded(function):
    """Return (result, "") of the function, or (None, what it raised): nothing that it raises ends this program."""
    try:
        return function(), ""
    except SystemExit as error:
        return None, f"SystemExit: the program ended itself with {error.code!r}"[:_MAX_ERROR]
    except BaseException as error:  # noqa: BLE001 - of the submitted program, whose failure is a result
        return None, _error_line(error)


def _error_line(error):
    """Return the error as a line; its own words may raise as well."""
    try:
        line = getattr(error, "__traceback__", None)
        while line is not None and line.tb_next is not None:
            line = line.tb_next
        place = f" (line {line.tb_lineno})" if line is not None and line.tb_frame.f_code.co_filename == _PROGRAM else ""
        return f"{type(error).__name__}: {error}"[:_MAX_ERROR] + place
    except BaseException:  # noqa: BLE001 - a class of the submitted program may raise whatever it likes
        return type(error).__name__[:_MAX_ERROR]


def _called(module, test):
    """Call the function of that name, of the program or of its class Solution."""

    def call():
        function = getattr(module, test["call"], None)
        if function is None and hasattr(module, "Solution"):
            function = getattr(module.Solution(), test["call"], None)
        if function is None:
            raise NameError(f"the program has no function {test['call']}")
        arguments, named = [decode(each) for each in test["args"]], {key: decode(each) for key, each in test["kwargs"]}
        return encode(function(*arguments, **named))

    value, error = _guarded(call)
    return {"error": error} if error else {"value": value}


def _printed(text):
    """Run the whole program with `text` as its input, and return what it printed."""
    _redirect(text)

    def run():
        try:
            _run("__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        sys.stdout.flush()

    _, error = _guarded(run)
    if error:
        return {"error": error}
    output, error = _guarded(lambda: os.pread(1, 1 << 24, 0).decode("utf-8", "replace"))
    return {"error": error} if error else {"printed": output}


if __name__ == "__main__":
    main()
    # without the destructors and threads of the program, which would have the last word
    os._exit(0)
