"""Tests notice faults: what the faults are, how they are run, sixty in the equations and a few in other packages."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "ci"))

from mutation import tree  # noqa: E402
from mutation.operators import mutants  # noqa: E402

FAULTS = {
    "y = a - -b * c": [
        ("sign", "y = a + -b * c"),
        ("sign", "y = a - b * c"),
        ("product", "y = a - -b / c"),
    ],
    "y = (a +  # less\n    b)": [("sign", "y = (a - # less")],
    "y += x; z /= 2": [
        ("sign", "y -= x; z /= 2"),
        ("product", "y += x; z *= 2"),
        ("constant", "y += x; z /= 3"),
    ],
    "y = a / (b + 1e-6)": [
        ("product", "y = a * (b + 1e-6)"),
        ("denominator", "y = a / (((b + 1e-6) + 1))"),
        ("sign", "y = a / (b - 1e-6)"),
        ("constant", "y = a / (b + 1.1e-06)"),
    ],
    "y = a // n": [("denominator", "y = a // (n + 1)")],
    "y = f(0.0, 3, 20.0, True, None, 'a')": [
        ("constant", "y = f(0.1, 3, 20.0, True, None, 'a')"),
        ("constant", "y = f(0.0, 4, 20.0, True, None, 'a')"),
        ("constant", "y = f(0.0, 3, 22.0, True, None, 'a')"),
    ],
    "def f(a: Literal[1] = 1, *, b: float = 0.5) -> int: pass": [
        ("default", "def f(a: Literal[1] = 2, *, b: float = 0.5) -> int: pass"),
        ("default", "def f(a: Literal[1] = 1, *, b: float = 0.55) -> int: pass"),
    ],
    "class A:\n    low: float = 0.2": [("default", "low: float = 0.22")],
    "y = a < b <= c": [("comparison", "y = a <= b <= c"), ("comparison", "y = a < b < c")],
    "y = (a > b) + (c >= d)": [
        ("comparison", "y = (a >= b) + (c >= d)"),
        ("sign", "y = (a > b) - (c >= d)"),
        ("comparison", "y = (a > b) + (c > d)"),
    ],
    "y = a == b, c != d, e is f, g in h": [
        ("comparison", "y = a != b, c != d, e is f, g in h"),
        ("comparison", "y = a == b, c == d, e is f, g in h"),
    ],
    "y = a and b or c": [("connective", "y = a or b or c"), ("connective", "y = a and b and c")],
    "if a: pass": [("condition", "if (not (a)): pass")],
    "while not a: pass": [("condition", "while (not (not a)): pass")],
    "y = [b if c else d for b in e if f]": [
        ("condition", "y = [b if (not (c)) else d for b in e if f]"),
        ("condition", "y = [b if c else d for b in e if (not (f))]"),
    ],
    "y = max(a.amin(), torch.minimum(b, c))": [
        ("extremum", "y = min(a.amin(), torch.minimum(b, c))"),
        ("extremum", "y = max(a.amax(), torch.minimum(b, c))"),
        ("extremum", "y = max(a.amin(), torch.maximum(b, c))"),
    ],
    "y = torch.where(m, a, b)": [("mask", "y = (a)")],
    "y = a.where(m, b).masked_fill(n, c)": [
        ("mask", "y = (a).masked_fill(n, c)"),
        ("mask", "y = (a.where(m, b))"),
    ],
    "def f():\n    return a & b": [("left", "return (a)"), ("right", "return (b)")],
    "def f():\n    return a | b": [("left", "return (a)"), ("right", "return (b)")],
    "a &= b": [("left", "pass")],
    "y = a.detach() * (b.detach() < c)": [
        ("detach", "y = (a) * (b.detach() < c)"),
        ("product", "y = a.detach() / (b.detach() < c)"),
        ("comparison", "y = a.detach() * (b.detach() <= c)"),
    ],
    "y = a.clamp(low, max=b)": [
        ("clamp", "y = (a)"),
        ("bound", "y = a.clamp((low + 1), max=b)"),
        ("bound", "y = a.clamp(low, max=(b + 1))"),
    ],
    "y = torch.clamp(a, min=1)": [("clamp", "y = (a)"), ("constant", "y = torch.clamp(a, min=2)")],
    '"""1 + 1"""': [],
    "SourcedNumber = int | float": [],
    "y = cast('1 + 1', x)": [],
    "assert a < b, f'{a - b}' + str(1)": [("comparison", "assert a <= b, f'{a - b}' + str(1)")],
    "raise Error(1 + 1)": [],
    "y = f'{a + 1}' + b": [],
    "if TYPE_CHECKING: y = 1": [],
    "from a import b": [],
}


WIDER = {
    "y = f(a, True)": [("boolean", "y = f(a, False)")],
    "os.fsync(handle)": [("statement", "pass")],
    "log.info(1 + 1)": [],
    "print(a, b)": [],
    "if a: f.g()": [
        ("branch", "if False: f.g()"),
        ("condition", "if (not (a)): f.g()"),
        ("statement", "if a: pass"),
    ],
    "if a: y = b\nelse: y = c": [("condition", "if (not (a)): y = b")],
    "y = f(a, b=c, d=e)": [("keyword", "y = f(a, d=e)"), ("keyword", "y = f(a, b=c)")],
    "y = f(a=b, c=d)": [("keyword", "y = f(a=b)")],
    "y = zip(a, b, strict=True)": [("order", "y = zip(b, a, strict=True)")],
    "y = f(a.b, c, d=1)": [
        ("order", "y = f(c, a.b, d=1)"),
        ("keyword", "y = f(a.b, c)"),
        ("constant", "y = f(a.b, c, d=2)"),
    ],
    "y = isinstance(a, b)": [],
    "raise OptionsError(code='a', what=f(1 + 1))": [],
    "y = refused(code='a', what=f(1 + 1))": [],
    "def refused(a: int = 1) -> OptionsError:\n    if a: b()\n    return c": [],
    "y = nearest_names(a, b, count=2, cutoff=0.5)": [],
    "def f(a: int = 1) -> int: ...": [],
    "fault_point(A)": [],
    "_STORE_SECONDS = 1.0": [],
    "time.sleep(0.05)": [("statement", "pass")],
    "y = Thread(target=f, name='a')": [],
    "def f(a: int = 2, *, timeout: float = 600.0) -> int: g(a)": [
        ("default", "def f(a: int = 3, *, timeout: float = 600.0) -> int: g(a)"),
        ("statement", "def f(a: int = 2, *, timeout: float = 600.0) -> int: pass"),
    ],
    "y = f(a, timeout=2.0)": [("keyword", "y = f(a)")],
    "_MOST_SECONDS = 1.0 + a": [
        ("constant", "_MOST_SECONDS = 1.1 + a"),
        ("sign", "_MOST_SECONDS = 1.0 - a"),
    ],
}


@pytest.mark.parametrize("source", WIDER)
def test_outside_of_the_equations_order_effects_and_options_are_changed_too(source: str) -> None:
    text = f"# 数 is three bytes\n{source}\n".encode()
    found = mutants("m", text, wider=True)
    assert [(mutant.operator, mutant.lines(text)[1]) for mutant in found] == WIDER[source]


@pytest.mark.parametrize("source", FAULTS)
def test_every_place_of_a_fault_is_found_and_nothing_else(source: str) -> None:
    text = f"# 数 is three bytes\n{source}\n".encode()
    found = mutants("m", text)
    assert [(mutant.operator, mutant.lines(text)[1]) for mutant in found] == FAULTS[source]


def test_an_id_names_the_place_and_what_its_line_says() -> None:
    [first, second] = mutants("a.b", b"x = 1\ny = x + z\n")
    assert first.id.rpartition(":")[0] == "a.b:1:4:constant"
    assert second.id.rpartition(":")[0] == "a.b:2:6:sign"
    [*_, moved] = mutants("a.b", b"x = 1\n\n\ny = x + z\n")
    assert moved.unplaced == second.unplaced
    [*_, other] = mutants("a.b", b"x = 1\ny = w + z\n")
    assert other.unplaced != second.unplaced


@pytest.mark.parametrize("module", tree.mutated_modules())
def test_every_mutant_of_a_module_is_another_program(module: str) -> None:
    source = tree.mutated_modules()[module].read_bytes()
    same = ast.dump(ast.parse(source))
    for mutant in mutants(module, source):
        assert ast.dump(ast.parse(mutant.applied(source))) != same, mutant.id


def test_every_module_with_mutants_has_tests_that_import_it() -> None:
    without = [name for name, found in tree.all_mutants().items() if found and not any_test_of(name)]
    assert without == []


def any_test_of(module: str) -> bool:
    files = tree.tests_of(module)
    return bool(files.by_name or files.others)


@pytest.fixture
def selected() -> Iterator[Callable[[str], None]]:
    """Selects a package, until the test ends."""
    yield tree.select
    tree.select(tree.EQUATIONS)


@pytest.mark.parametrize("package", tree.OTHERS)
def test_every_mutant_of_another_package_is_another_program(package: str, selected: Callable[[str], None]) -> None:
    selected(package)
    modules = tree.mutated_modules()
    assert len(modules) > 10
    number = 0
    for module, path in modules.items():
        source = path.read_bytes()
        found = mutants(module, source, wider=True)
        number += len(found)
        same = ast.dump(ast.parse(source))
        for mutant in found[:: max(1, len(found) // 2)]:  # a few of each module
            assert ast.dump(ast.parse(mutant.applied(source))) != same, mutant.id
    assert number > 1000


def test_a_module_meets_its_own_file_of_tests_or_that_of_its_line(selected: Callable[[str], None]) -> None:
    selected("rft-trainer")
    tests, wider = ROOT / "packages/rft-trainer/tests", tree.mutated_modules()
    own = [tests / f"update/test_optimizer_step{topic}.py" for topic in ("", "_passes")]
    assert tree.tests_of("update.optimizer_step").by_name == own
    covered = {name: file for name, file in tree.covered_by().items() if file.startswith("packages/rft-trainer/")}
    module, file = next((name, file) for name, file in covered.items() if name.removeprefix("rft_trainer.") in wider)
    assert tree.tests_of(module.removeprefix("rft_trainer.")).by_name == [ROOT / file]
    assert tests / "loops/test_rl.py" in tree.tests_of("update.optimizer_step").others
    assert "settings.batches" not in tree.mutated_modules()
    selected("rft-models")
    assert "decode.hf_generate" not in tree.mutated_modules(), "whole runs alone cover it"


@pytest.fixture
def proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Writes a file of equivalents in place of the real one."""
    file = tmp_path / "equivalents.json"
    monkeypatch.setattr(tree, "EQUIVALENTS", file)
    return lambda entries: (file.write_text(json.dumps(entries)), None)[1]


def test_an_equivalent_moves_with_its_line_and_ends_with_it(proofs: Callable[[dict[str, str]], None]) -> None:
    before, after = (mutants("m", text) for text in (b"x = a + b\n", b"\n\nx = a + b\n"))
    proofs({before[0].id: "they are equal"})
    assert tree.equivalents({"m": after}) == {after[0].id: "they are equal"}
    for changed in (b"x = a + c\n", b"x = a + b\nx = a + b\n\nx = 1\n"):
        found = mutants("m", b"\n" + changed)
        with pytest.raises(tree.Refused, match="is no mutant any more"):
            tree.equivalents({"m": found})


def test_an_equivalent_without_a_proof_is_refused(proofs: Callable[[dict[str, str]], None]) -> None:
    found = mutants("m", b"x = a + b\n")
    proofs({found[0].id: " "})
    with pytest.raises(tree.Refused, match="has no proof"):
        tree.equivalents({"m": found})


def test_of_sixty_mutants_the_tests_kill_nearly_all(tmp_path: Path) -> None:
    file = tmp_path / "outcomes.jsonl"
    words = [sys.executable, str(ROOT / "ci/mutate.py"), "--sample", "60", "--seed", "7", "--json", str(file)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    outcomes = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(outcomes) == 60
    assert {outcome["verdict"] for outcome in outcomes} <= {"killed", "survived", "timeout"}
    by_test = [outcome for outcome in outcomes if "::test_" in outcome["killer"]]
    assert len(by_test) >= 50, "nearly all are noticed by a test, not by an import that fails"


QUICK = ("--module", "evaluation.evaluator", "--module", "runs.checkpointing", "--module", "rollouts.collector")
"""Modules of rft-trainer whose tests take a second."""


@pytest.mark.parametrize(
    ("package", "modules"),
    [("rft-trainer", QUICK), *(pytest.param(name, (), marks=pytest.mark.full, id=name) for name in tree.OTHERS)],
)
def test_of_a_few_mutants_of_another_package_most_are_noticed(
    package: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    """How many in all, the long matrix says (`ci/full.sh`); of so few one more or less may be an equivalent."""
    file = tmp_path / "outcomes.jsonl"
    words = ["--package", package, *modules, "--sample", "4", "--seed", "7", "--required", "0.5", "--json", str(file)]
    command = [sys.executable, str(ROOT / "ci/mutate.py"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert len(file.read_text().splitlines()) == 4
