"""Findings on packages that add commands."""

from rft.config.commands import PackageRecord
from rft.doctor.plug_ins import plug_ins


def test_packages_that_add_commands_are_listed_and_one_that_cannot_be_used_is_noted() -> None:
    records = [
        PackageRecord("ours-data", "ours", record=object()),
        PackageRecord("ours-sft", "ours", record=object()),
        PackageRecord("theirs", "theirs-1", fault="theirs:X: ImportError"),
    ]
    mine, other = plug_ins(records)
    assert (mine.subject, mine.value, mine.verdict) == ("ours", "adds ours data, ours sft", "ok")
    assert (other.subject, other.verdict, other.why) == ("theirs-1", "note", "theirs:X: ImportError")
