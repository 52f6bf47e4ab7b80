"""The page of findings."""

from rft.doctor.findings import Section, as_record, page, verdict_line
from rft.installation.facts import MachineFact

SECTIONS = [
    Section(
        "devices",
        (MachineFact("driver", "580"), MachineFact("GPU 0", "old", "problem", "no kernel image", "another torch")),
    ),
    Section("machine", (MachineFact("memory", "1 GiB", "note", "little"),)),
]


def test_a_page_says_what_is_wrong_and_what_mends_it() -> None:
    assert list(page(SECTIONS)) == [
        "devices",
        "  ok      driver: 580",
        "  PROBLEM GPU 0: old",
        "          no kernel image",
        "          do: another torch",
        "",
        "machine",
        "  note    memory: 1 GiB",
        "          little",
        "",
        "1 problem, 1 to note: GPU 0",
    ]


def test_the_last_line_says_when_nothing_is_wrong() -> None:
    assert verdict_line([]) == "nothing stands in the way of a run"
    assert verdict_line(SECTIONS[1:]) == "nothing stands in the way of a run, 1 to note"
    assert as_record(SECTIONS)["sections"][0]["findings"][1]["do"] == "another torch"
