"""Findings on the interpreter and the installed packages."""

import tomllib
from pathlib import Path

import pytest

from rft.installation.packages import OWN, TESTED, interpreter, optional, requirements
from rft_engine.registry import ENGINES

ROOT = Path(__file__).parents[4]
VERSIONS = {name: "0.1.0" for name in OWN} | {"torch": "2.13.0+cu130", "pydantic": "2.1"}
REQUIRES = {
    "rft": ["torch>=2.11", "pydantic>=2.9", "pyarrow>=20", 'nothing; extra == "x"', 'old; python_version < "3"'],
    "rft-cli": ["rft>=0.1", "torch>=2.11"],
}


def test_the_tested_versions_are_those_of_the_lock() -> None:
    locked: dict[str, set[str]] = {}
    for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]:
        locked.setdefault(package["name"], set()).add(package.get("version", ""))
    engines = {kind.package: kind.tested_version for kind in ENGINES.values() if kind.package}
    tested = TESTED | engines | {kind.cpu_extra: kind.tested_version for kind in ENGINES.values() if kind.cpu_extra}
    assert {name: version for name, version in tested.items() if version not in locked[name]} == {}


def test_a_requirement_that_is_not_met_is_a_problem_with_the_command_that_meets_it() -> None:
    findings = {f.subject: f for f in requirements(VERSIONS.get, lambda name: REQUIRES.get(name, ()))}
    assert findings.keys() == {*OWN, "torch", "pydantic", "pyarrow"}
    assert findings["torch"].verdict == "ok"
    assert (findings["pydantic"].verdict, findings["pydantic"].do) == ("problem", 'uv pip install "pydantic>=2.9"')
    assert (findings["pyarrow"].value, findings["pyarrow"].why) == ("not installed", "rft needs it")


def test_another_version_than_the_tested_one_is_noted() -> None:
    findings = {f.subject: f for f in requirements(lambda name: "2.12.0", lambda name: REQUIRES.get(name, ()))}
    assert (findings["torch"].verdict, findings["torch"].do) == ("note", "")
    assert "2.13.0" in findings["torch"].why


def test_an_absent_package_of_the_project_is_a_problem() -> None:
    findings = {f.subject: f for f in requirements(lambda name: None, lambda name: ())}
    assert {f.verdict for f in findings.values()} == {"problem"}


def test_what_one_feature_needs_is_no_problem_where_it_is_absent() -> None:
    findings = {f.subject: f for f in optional({"peft": "0.1"}.get)}
    assert findings["deepspeed"].verdict == "ok"
    assert "uv sync --extra deepspeed" in findings["deepspeed"].value
    assert findings["peft"].verdict == "note"


def test_a_package_that_adds_commands_is_looked_at_with_its_requirements_and_extras() -> None:
    requires = REQUIRES | {"ours": ["rft>=0.1", "numpy>=2.0", 'vectors==0.1.0; extra == "minilm"']}
    versions = VERSIONS | {"ours": "0.3", "pyarrow": "20"}
    found = {f.subject: f for f in requirements(versions.get, lambda name: requires.get(name, ()), ["ours"])}
    assert (found["ours"].value, found["ours"].verdict) == ("0.3", "ok")
    assert (found["numpy"].verdict, found["numpy"].why) == ("problem", "ours needs it")
    assert "vectors" not in found
    extras = [{}, {"vectors": "0.1.0"}, {"vectors": "0.2.0"}]
    absent, there, other = (optional(v.get, lambda name: requires.get(name, ()), ["ours"])[-1] for v in extras)
    assert absent.verdict == "ok"
    assert 'needed for ours[minilm] alone: uv pip install "vectors==0.1.0"' in absent.value
    assert (there.value, there.verdict) == ("0.1.0", "ok")
    assert (other.verdict, other.why) == ("problem", "ours[minilm] needs ==0.1.0")


@pytest.mark.parametrize(
    ("version", "prefixes", "command", "expected"),
    [
        ((3, 11), ("/v", "/usr"), "/v/bin/rft-train", []),
        ((3, 10), ("/v", "/usr"), "/v/bin/rft-train", [("python", "problem")]),
        ((3, 14), ("/v", "/usr"), "/v/bin/rft-train", [("python", "problem")]),
        ((3, 12), ("/usr", "/usr"), "/v/bin/rft-train", [("virtual environment", "note")]),
        ((3, 12), ("/v", "/usr"), None, [("rft-train", "note")]),
        ((3, 12), ("/v", "/usr"), "/other/bin/rft-train", [("rft-train", "note")]),
    ],
)
def test_the_interpreter_is_judged(
    version: tuple[int, int], prefixes: tuple[str, str], command: str | None, expected: list[tuple[str, str]]
) -> None:
    findings = list(interpreter(version, "/v/bin/python", prefixes, command))
    assert [(f.subject, f.verdict) for f in findings if f.verdict != "ok"] == expected
    assert [f.subject for f in findings] == ["python", "virtual environment", "rft-train"]
