"""The whole examination, and the report that is handed on."""

import json
from pathlib import Path

import pytest

from rft.config.commands import PackageRecord
from rft.doctor import examination
from rft.doctor.examination import lines, report
from rft.doctor.findings import Section
from rft.installation.facts import MachineFact
from rft.resolved import Resolved
from rft.settings import DoctorSettings, ExaminationSettings
from rft_core.errors import PreflightError


def resolved(**chosen: str) -> Resolved[DoctorSettings]:
    return Resolved("doctor", DoctorSettings(examination=ExaminationSettings(**chosen)), {}, {}, "", (), (), "")


def test_this_machine_is_examined_and_nothing_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = list(lines(resolved()))
    titles = [line for line in shown if line and not line.startswith(" ")]
    assert titles[:-1] == [
        *("interpreter", "packages", "packages for one feature alone", "packages that add commands"),
        *("devices", "engines", "machine", "ranks"),
    ]
    assert titles[-1].startswith("nothing stands in the way of a run")
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_adds_commands_is_listed_with_its_version_and_its_extras(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # pytest stands in for a package with commands: it is installed, and it has an extra
    monkeypatch.setattr(examination, "package_records", lambda: iter([PackageRecord("ours", "pytest", object())]))
    found = {section.title: section for section in examination.examine(ExaminationSettings(), {})}
    assert ("pytest", pytest.__version__) in [(fact.subject, fact.value) for fact in found["packages"].findings]
    assert any("pytest[dev]" in fact.value for fact in found["packages for one feature alone"].findings)


def test_a_problem_ends_with_an_error_after_the_page_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [Section("ranks", (MachineFact("driver", "too old", "problem", "torch wants 13", "update it"),))]
    monkeypatch.setattr(examination, "examine", lambda chosen, environment: bad)
    file = tmp_path / "report.json"
    shown: list[str] = []
    with pytest.raises(PreflightError, match="1 problem: driver") as caught:
        shown.extend(lines(resolved(share=str(file))))
    assert caught.value.problem.do == "update it"
    assert json.loads(file.read_text())["verdict"] == "1 problem: driver"


def test_a_report_holds_no_secret_and_no_home() -> None:
    key = "hf_" + "a" * 34
    home = str(Path.home())
    sections = [Section("ranks", (MachineFact("path", f"{home}/runs"), MachineFact("HF_TOKEN", key)))]
    text = report(sections)
    assert key not in text
    assert f'"{home}/' not in text
    assert json.loads(text)["sections"][0]["title"] == "ranks"
