"""A file of JSON lines that grows."""

import json
from pathlib import Path

from rft.dashboard.growing_rows import GrowingRows, last_rows


def written(*steps: int) -> str:
    return "".join(json.dumps({"step": step}) + "\n" for step in steps)


def test_each_look_gives_the_whole_lines_that_are_new(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    reader = GrowingRows(file)
    assert reader.new_rows() == []
    file.write_text(written(1, 2) + '{"step": 3')
    assert reader.new_rows() == [{"step": 1}, {"step": 2}]
    assert reader.new_rows() == []
    with file.open("a") as opened:
        opened.write("}\nno record\n[1]\n")
    assert reader.new_rows() == [{"step": 3}]
    assert reader.generation == 0


def test_rows_that_a_resume_cut_back_begin_a_new_generation(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(written(1, 2, 3))
    reader = GrowingRows(file)
    reader.new_rows()
    file.write_text(written(1))
    assert (reader.new_rows(), reader.generation) == ([{"step": 1}], 1)
    # cut back and written again to a greater length between two looks
    file.write_text(written(7, 8, 9))
    assert (len(reader.new_rows()), reader.generation) == (3, 2)
    file.unlink()
    assert (reader.new_rows(), reader.generation) == ([], 3)


def test_a_large_file_is_read_in_several_looks_and_a_line_that_is_too_long_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(written(*range(10)) + "x" * 100 + "\n" + written(99))
    reader = GrowingRows(file, most_bytes=40)
    found: list[int] = []
    for _ in range(20):
        found += [row["step"] for row in reader.new_rows()]
    assert found == [*range(10), 99]
    assert not reader.is_behind


def test_the_end_of_a_file_is_read_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(written(*range(1000)) + '{"step"')
    assert [row["step"] for row in last_rows(file, 40)] == [998, 999]
    assert len(last_rows(file, 1 << 20)) == 1000
    assert last_rows(tmp_path / "absent", 40) == []
