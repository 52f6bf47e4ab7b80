"""The dashboard in a browser: its scripts run, draw live curves, and show hostile texts as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import Browser, open_browser

from rft.dashboard.json_answers import DashboardAnswers
from rft.dashboard.run_folders import RunFolders
from rft.dashboard.web_server import serving
from rft_cli.records.discovery import commands

pytestmark = pytest.mark.system
CONFIG = "# rft-train rl\nrecipe:\n  command: rl\n\n# optimizer\nactor_learning_rate: {rate}   # command line\n"
HOSTILE = "<img src=x onerror=\"document.title='taken'\">\x1b[31m\u202e"
TEXT = "(document.querySelector('main')?.innerText ?? '')"


def make_run(folder: Path, name: str, rate: float) -> None:
    run = folder / name
    (run / "rollouts").mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG.format(rate=rate))
    (run / "metrics.jsonl").write_text("".join(row(step) for step in range(1, 9)))
    answers = [
        {"prompt_id": "p", "sample": 0, "prompt": HOSTILE, "response": HOSTILE, "reward": 1.0},
        {"prompt_id": "p", "sample": 1, "prompt": HOSTILE, "response": "plain", "reward": 0.0},
    ]
    file = run / "rollouts" / "step_000001.jsonl"
    file.write_text("".join(json.dumps(answer) + "\n" for answer in answers))


def row(step: int) -> str:
    return json.dumps({"step": step, "reward/mean": step / 8, "policy/entropy": 1.0, "time/train": 1.0}) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    commands()  # the program's records say which curves a command has
    make_run(tmp_path / "runs", "first", 0.001)
    make_run(tmp_path / "runs", "second", 0.01)
    return tmp_path / "runs"


@pytest.fixture
def answers(folder: Path) -> DashboardAnswers:
    return DashboardAnswers(RunFolders([folder]))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def url(answers: DashboardAnswers, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("RFT_REMOTE_TOKEN", raising=False)
    with serving(answers, "127.0.0.1", 0) as address:
        yield f"{address}#/"


def digest_of(answers: DashboardAnswers, name: str) -> str:
    return next(run["id"] for run in answers.of("/api/runs", {})["runs"] if run["name"] == name)


def test_runs_are_listed_and_one_that_begins_appears(browser: Browser, url: str, folder: Path) -> None:
    browser.open(url)
    browser.wait(f"{TEXT}.includes('first') && {TEXT}.includes('second')")
    assert "reward/mean 1" in browser.value(TEXT)
    assert browser.value("document.querySelectorAll('.state-running').length") == 2
    make_run(folder, "third", 0.1)
    browser.wait(f"{TEXT}.includes('third')")
    browser.value("document.querySelector('input[type=search]').value = 'third'")
    browser.value("document.querySelector('input[type=search]').dispatchEvent(new Event('input'))")
    assert browser.value("document.querySelectorAll('tbody tr').length") == 1


def test_curves_of_a_run_grow_while_it_is_seen(
    browser: Browser, url: str, answers: DashboardAnswers, folder: Path
) -> None:
    browser.open(f"{url}run/{digest_of(answers, 'first')}")
    browser.wait("document.querySelectorAll('canvas').length == 2")
    label = "document.querySelector('.plot').getAttribute('aria-label')"
    assert browser.value(label) == "reward/mean: first 0.125, last 1, lowest 0.125, highest 1"
    assert "Where the time went" in browser.value(TEXT)
    assert "actor_learning_rate" in browser.value(TEXT)
    browser.value("window.kept = document.querySelector('canvas')")
    with (folder / "first" / "metrics.jsonl").open("a") as file:
        file.write(row(16))
    browser.wait(f"{label}.includes('last 2')")
    # into the same figure: what a person has magnified or pointed at stays
    assert browser.value("window.kept === document.querySelector('canvas')")


def test_a_pointer_shows_the_value_and_curves_are_added_and_removed(
    browser: Browser, url: str, answers: DashboardAnswers
) -> None:
    browser.open(f"{url}run/{digest_of(answers, 'first')}")
    browser.wait("document.querySelectorAll('canvas').length == 2")
    box = browser.value(
        "(({x, y, width, height}) => [x + width, y + height / 2])"
        "(document.querySelector('.u-over').getBoundingClientRect())"
    )
    browser.point(box[0] - 2, box[1])
    browser.wait("[...document.querySelectorAll('.u-value')].some((value) => value.textContent == '1')")
    browser.value("document.querySelector('figure button').click()")
    browser.wait("document.querySelectorAll('canvas').length == 1")
    select = "document.querySelector('.filters select')"
    browser.value(f"{select}.value = 'time/train'; {select}.dispatchEvent(new Event('change'))")
    browser.wait("document.querySelectorAll('canvas').length == 2")
    assert browser.value(f"{select}.value") == ""


def test_runs_that_are_chosen_are_compared(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.wait("document.querySelectorAll('tbody tr').length == 2")
    compare = "document.querySelector('.filters button')"
    assert browser.value(f"{compare}.disabled")
    browser.value("document.querySelectorAll('tbody input').forEach((box) => box.click())")
    browser.value(f"{compare}.click()")
    browser.wait("document.querySelectorAll('canvas').length == 2")
    label = browser.value("document.querySelector('.plot').getAttribute('aria-label')")
    for name in ("first", "second"):
        assert f"{name}: first 0.125, last 1, lowest 0.125, highest 1" in label
    cells = browser.value("[...document.querySelectorAll('td')].map((cell) => cell.textContent)")
    assert {"actor_learning_rate", "0.001", "0.01"} <= set(cells)


def test_samples_are_filtered_and_their_texts_are_harmless(
    browser: Browser, url: str, answers: DashboardAnswers
) -> None:
    browser.open(f"{url}samples/{digest_of(answers, 'first')}?quantity=none")
    browser.wait(f"{TEXT}.includes('<img src=x')")
    text = browser.value(TEXT)
    assert "\\x1b[31m\\u202e" in text
    assert "plain" in text
    assert browser.value("document.querySelector('main img')") is None
    assert browser.value("document.title") != "taken"
    browser.value("document.querySelector('[name=reward_min]').value = '0.5'")
    browser.value("document.querySelector('form').requestSubmit()")
    browser.wait(f"{TEXT}.includes('1 of 2 answers')")
    assert "plain" not in browser.value(TEXT)
    assert "reward_min=0.5" in browser.value("location.hash")


def test_no_page_is_wider_than_a_phone(browser: Browser, url: str, answers: DashboardAnswers) -> None:
    first, second = (digest_of(answers, name) for name in ("first", "second"))
    for page in ("", f"run/{first}", f"compare?run={first}&run={second}", f"samples/{first}?quantity=none"):
        browser.open(url + page, width=390)
        browser.wait("document.querySelector('h1') && document.querySelector('main')?.innerText.length > 80")
        assert browser.value("document.documentElement.scrollWidth") <= 390, page


def test_a_page_says_why_it_is_refused_and_that_the_server_is_gone(browser: Browser, answers: DashboardAnswers) -> None:
    with serving(answers, "127.0.0.1", 0) as address:
        browser.open(f"{address}#/run/none")
        browser.wait("document.getElementById('pulse')?.textContent.includes('there is no such run')")
    browser.wait("document.getElementById('pulse')?.textContent.includes('does not answer')")


def test_a_token_is_asked_for_once(
    browser: Browser, answers: DashboardAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_REMOTE_TOKEN", "a-token-of-the-tests")
    with serving(answers, "127.0.0.1", 0) as address:
        browser.open(address)
        browser.wait("document.getElementById('token')")
        browser.value("document.getElementById('token').value = 'a-token-of-the-tests'")
        browser.value("document.querySelector('form').requestSubmit()")
        browser.wait(f"{TEXT}.includes('first')")
        browser.open(address)
        browser.wait(f"{TEXT}.includes('first')")
