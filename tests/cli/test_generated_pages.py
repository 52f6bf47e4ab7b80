"""What is generated in docs/ is what the code says now, and the tables behind it are whole."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import rft
import rft_algos.aliases
from rft.config.schema import schema
from rft_cli.records.discovery import with_settings
from rft_core import errors
from rft_core.errors import ExitCode, RftError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """ci/generate_reference.py as a module."""
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "ci" / "generate_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current(generator: ModuleType) -> None:
    stale = [str(path) for path, text in generator.pages().items() if path.read_text() != text]
    assert stale == [], "run: python ci/generate_reference.py"


@pytest.mark.parametrize("command", with_settings())
def test_the_reference_has_a_meaning_for_every_setting(command: str, generator: ModuleType) -> None:
    lines = generator.reference(command).splitlines()
    for name in schema(command):
        (row,) = [line for line in lines if line.startswith(f"| `--{name}` |")]
        assert len(row.split("|")[4].strip()) > 10, row


@pytest.mark.parametrize(("page", "module"), [("python-rft", rft), ("python-rft-algos", rft_algos.aliases)])
def test_the_pages_on_public_names_have_each_with_a_text(page: str, module: ModuleType) -> None:
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text()
    title = page.removeprefix("python-").replace("-", "_")
    entries = dict(re.findall(rf"^### {title}\.(\w+)\n\n(.*?)(?=^###? |\Z)", text, flags=re.M | re.S))
    assert set(entries) == set(module.__all__)
    for name, entry in entries.items():
        said = re.sub(r"```.*?```", "", entry, flags=re.S).strip()
        assert len(said) > 15, name
        assert "0x" not in entry, name


def test_the_names_of_other_trainers_stand_beside_names_that_exist_here(generator: ModuleType) -> None:
    settings = {name for command in with_settings() for name in schema(command)}
    code = "\n".join(path.read_text() for path in ROOT.glob("packages/*/src/**/*.py"))
    for concept in generator.CONCEPTS:
        assert not concept.flag or concept.flag in settings, concept
        assert concept.code in code, concept
        assert concept.trl or concept.verl or concept.openrlhf, concept


def test_the_guides_of_lightrft_name_47_flags_once_each(generator: ModuleType) -> None:
    names = [line.split()[0] for line in generator.FLAGS_FILE.read_text().splitlines()]
    assert len(names) == len(set(names)) == 47


def test_every_exit_code_but_the_reserved_one_is_that_of_an_error(generator: ModuleType) -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RftError)]
    reserved = {code for code, meaning in generator.EXIT_MEANINGS.items() if meaning.startswith("reserved")}
    assert {kind.exit_code for kind in kinds} | reserved | {ExitCode.DONE} == set(ExitCode)


ARCHITECTURE = ROOT / "docs" / "architecture.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
RELIABILITY = ROOT / "docs" / "reliability.md"
PRETRAINING = ROOT / "docs" / "pretraining-problems.md"
SOURCES = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("kernels/src/**/*.py")]


def test_every_module_and_class_on_the_page_of_the_architecture_is_there() -> None:
    words = set(re.findall(r"`([\w.]+)`", ARCHITECTURE.read_text()))
    modules = {".".join(path.with_suffix("").parts[path.parts.index("src") + 1 :]) for path in SOURCES}
    rooms = {module.rpartition(".")[0] for module in modules}
    dotted = {word for word in words if re.match(r"rft(_\w+)?\.", word)}
    assert len(dotted) > 40
    assert dotted - modules - rooms == set()
    classes = set(re.findall(r"^class (\w+)", "\n".join(path.read_text() for path in SOURCES), flags=re.M))
    assert {word for word in words if re.fullmatch(r"([A-Z][a-z]+)+", word)} - classes == set()


def test_both_tables_of_additions_have_the_same_rows() -> None:
    tables = [path.read_text().partition("\n| to add |")[2].split("\n\n")[0] for path in (ARCHITECTURE, CONTRIBUTING)]
    first, second = ([row.split(" | ")[0] for row in table.splitlines()[2:]] for table in tables)
    assert first == second
    assert len(first) == 13


def test_every_label_of_a_fault_is_explained_beside_tests_that_exist() -> None:
    page = RELIABILITY.read_text()
    explained = set(re.findall(r"^\| ([RD]\d+) \|", page, flags=re.M))
    files = [path for part in ("tests", "packages/*/tests") for path in ROOT.glob(f"{part}/**/*.py")]
    assert {label for path in files for label in re.findall(r"\b[RD]\d{1,2}\b", path.read_text())} <= explained
    templates = {label for path in SOURCES for label in re.findall(r"\(template (F\d+)\)", path.read_text())}
    assert all(f"{label} is the message" in page for label in templates)
    assert [file for file in re.findall(r"`([\w/-]+/test_\w+\.py)`", page) if not (ROOT / file).is_file()] == []


def test_every_promise_of_pretraining_is_beside_tests_that_exist_or_a_benchmark() -> None:
    rows = re.findall(r"^\| (\d[a-z]) \|(.*)$", PRETRAINING.read_text(), flags=re.M)
    letters = {"1": "abcde", "2": "abcdefg", "3": "abcdef", "4": "abcdefghij", "5": "abcdefgh", "6": "abcdefgh"}
    assert [label for label, _ in rows] == [number + letter for number in letters for letter in letters[number]]
    for label, text in rows:
        named = re.findall(r"`([\w/-]+\.py)(?:::(test_\w+))?`", text)
        assert named, f"{label} names no test"
        for file, test in named:
            assert test or file.startswith("benchmarks/"), f"{label}: {file}"
            assert f"def {test}(" in (ROOT / file).read_text() if test else (ROOT / file).is_file(), f"{label}: {test}"
