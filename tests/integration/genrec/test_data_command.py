"""`rft-train genrec data` from the command line to the files, for every source and every setting."""

from __future__ import annotations

import gzip
import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from rft.config.schema import schema
from rft_cli.main import main
from rft_genrec.catalogue.minionerec_files import read_dataset
from rft_genrec.catalogue.records import Item

COMMAND = "genrec-data"
DAY = 86_400
MONTH = 1_475_280_000
"""Seconds since 1970 of 2016-10-01 in UTC."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with reviews of six people on six tools, and a film directory."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "reviewerID": f"U{user}",
            "asin": f"B{(user + turn) % 6}",
            "unixReviewTime": MONTH + DAY * (7 * user + 20 * turn),
            "reviewText": f"text {user} {turn}",
            "summary": "good",
            "overall": 5.0,
        }
        for user in range(6)
        for turn in range(6)
    ]
    rows += [rows[0] | {"unixReviewTime": MONTH + 200 * DAY}, rows[1] | {"asin": "RARE"}, rows[2] | {"asin": "LONG"}]
    rows.append({"reviewerID": "ONCE", "asin": "B0", "unixReviewTime": MONTH})
    items = [
        {"asin": f"B{n}", "title": f"Tool &amp; {n}", "description": ["<b>d</b>", "e"], "brand": "X"} for n in range(6)
    ]
    items += [{"asin": "RARE", "title": "Rare"}, {"asin": "LONG", "title": "w " * 21}]
    items[0] |= {"category": ["Tools", "Saws"]}
    Path("Tools_5.json.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    Path("bad.json").write_text("\n".join(map(json.dumps, [*rows, {"reviewerID": "U1", "asin": "B1"}])))
    Path("meta.json").write_text("\n".join(map(json.dumps, items)))
    keys = ("reviewerID", "asin", "unixReviewTime")
    names = {item["asin"]: item["title"] for item in items}
    lines = [
        ",".join([*(str(row[key]) for key in keys), *(names[row["asin"]] + word for word in "abcd")]) for row in rows
    ]
    Path("t.csv").write_text("\n".join(["user,item,timestamp,title,description,brand,categories", *lines]) + "\n")
    moved = [line.split(",") for line in lines]
    shuffled = [
        ",".join([u, i, t, title, d, b, c, d + "2", b + "2", c + "2", i, u, t]) for u, i, t, title, d, b, c in moved
    ]
    heading = "user,item,timestamp,title,description,brand,categories,d2,b2,c2,user2,item2,time2"
    Path("t2.csv").write_text("\n".join([heading, *shuffled]).replace("2016", "2016") + "\n")
    Path("items.csv").write_text("item,title\n" + "".join(f"{name},Other {name}\n" for name in names))
    return tmp_path


AMAZON = "--source amazon --input Tools_5.json.gz --items_file meta.json"
TABLE = "--source table --input t2.csv --user_k 2 --item_k 2"
MADE = "--source synthetic --users 30"


@dataclass(frozen=True, slots=True)
class Case:
    """A value of a setting that is not the default, and what else both commands have."""

    words: str
    given: str = AMAZON
    problem: str = ""
    """Code of the refusal, where the value is refused."""


CASES = {
    "source": Case("--source synthetic", MADE.replace("synthetic", "table --input t.csv")),
    "input": Case("--input bad.json --bad_rows skip"),
    "items_file": Case("--items_file items.csv", TABLE),
    "dataset_name": Case("--dataset_name mine"),
    "bad_rows": Case("--bad_rows skip", AMAZON.replace("Tools_5.json.gz", "bad.json")),
    "user_column": Case("--user_column user2", TABLE),
    "item_column": Case("--item_column item2", TABLE),
    "time_column": Case("--time_column d2", TABLE, "genrec.cell"),
    "title_column": Case("--title_column d2", TABLE),
    "description_column": Case("--description_column d2", TABLE),
    "brand_column": Case("--brand_column b2", TABLE),
    "categories_column": Case("--categories_column c2", TABLE),
    "title_filter": Case("--no_title_filter --user_k 2 --item_k 1", f"{AMAZON} --user_k 2 --item_k 1"),
    "start_date": Case("--start_date 2016-10-02", f"{AMAZON} --user_k 2"),
    "end_date": Case("--end_date 2017-01-15", f"{AMAZON} --user_k 2 --item_k 2"),
    "min_items": Case("--min_items 6", f"{AMAZON} --start_date 2017-01-01 --user_k 2 --item_k 2"),
    "repeats": Case("--repeats merge"),
    "user_k": Case("--user_k 7", problem="genrec.file"),
    "item_k": Case("--item_k 1"),
    "split": Case("--split leave_last_out"),
    "valid_share": Case("--valid_share 0.3"),
    "test_share": Case("--test_share 0.3"),
    "max_history": Case("--max_history 2"),
    "users": Case("--users 31", MADE),
    "personas": Case("--personas 2", MADE),
    "seed": Case("--seed 7", MADE),
    "save_path": Case("--save_path Tools_5.json.gz", problem="genrec.file"),
    "write_reviews": Case("--write_reviews"),
}


def run(words: str, capsys: pytest.CaptureFixture[str], target: str) -> tuple[int, list[str], dict[str, str], str]:
    """Exit code, lines, digests of the files, and the code of the first problem of a command."""
    code = main([*shlex.split(f"genrec data --json_errors --save_path {target}"), *shlex.split(words)])
    out, err = capsys.readouterr()
    problems = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    folder = Path(target)
    files = (
        {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(folder.iterdir())
            if folder.is_dir()
        }
        if folder.is_dir()
        else {}
    )
    return code, out.splitlines(), files, problems[0]["problem"]["code"] if problems else ""


def test_every_setting_has_a_case() -> None:
    assert set(CASES) == set(schema(COMMAND))


@pytest.mark.parametrize("name", CASES)
def test_a_setting_acts_or_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[name]
    _, _, before, _ = run(case.given, capsys, "one")
    code, _, after, problem = run(f"{case.given} {case.words}", capsys, "two")
    assert problem == case.problem
    assert (code == 0) is (not problem)
    assert before != after


def test_reviews_become_a_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, files, _ = run(f"{AMAZON} --write_reviews --dataset_name Tools", capsys, "out/tools")
    assert code == 0
    assert lines[0] == "read: 7 users, 8 items, 40 interactions"
    assert "with a title: 7 users, 7 items, 39 interactions" in lines
    assert "of users with 5 and items with 5: 6 users, 6 items, 37 interactions after 2 rounds" in lines
    assert "train targets after the first test target: 0 of 24 (0.0 %)" in lines
    assert set(files) == {
        *("info.txt", "train.csv", "valid.csv", "test.csv", "Tools.item.json", "Tools.user2id", "Tools.item2id"),
        *("Tools.train.inter", "Tools.valid.inter", "Tools.test.inter", "Tools.inter.json", "Tools.review.json"),
    }
    dataset = read_dataset("out/tools")
    assert dataset.catalogue.items[0] == Item("Tool & 0", "d e", "X", ("Tools", "Saws"))
    assert [len(dataset.of(split)) for split in ("train", "valid", "test")] == [24, 3, 4]
    first = dataset.of("train")[0]
    assert (first.user, first.history, first.target) == ("A0", (0,), 1)
    assert len(json.loads(Path("out/tools/Tools.review.json").read_text())) == 37
    assert not [path for path in Path("out").iterdir() if path.name.startswith(".")]


def test_the_time_zone_of_the_machine_changes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"{AMAZON} --start_date 2016-10-08 --user_k 1 --item_k 1"
    _, _, here, _ = run(words, capsys, "one")
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    assert run(words, capsys, "two")[2] == here


def test_a_directory_that_was_written_is_read_and_written_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, first, _ = run(f"{MADE} --dataset_name made", capsys, "one")
    code, lines, again, _ = run("--source minionerec --input one", capsys, "two")
    assert code == 0
    assert again.items() <= first.items()
    assert set(first) - set(again) == {"made.inter.json", "made.user2id", "made.item2id", "truth.json"}
    assert lines[0].startswith("made: 900 items")


def test_a_directory_with_files_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Path("full").mkdir()
    Path("full/mine").write_text("x")
    code, _, files, problem = run(MADE, capsys, "full")
    assert (code, problem, list(files)) == (4, "genrec.file", ["mine"])


def test_without_a_directory_the_report_is_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["genrec", "data", *MADE.split()]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert {path.name for path in Path().iterdir() if path.is_dir()} == set()
