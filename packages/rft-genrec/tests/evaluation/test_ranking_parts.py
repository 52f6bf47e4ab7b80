"""Files of rankings of several ranks: taken up, merged, and refused where they are not of this evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_core.exact_records import exact_bytes
from rft_dist.collectives import SingleProcess
from rft_genrec.evaluation.ranking_parts import Parts, append, merged
from rft_genrec.evaluation.rankings import Ranking

MANIFEST = {"model": "m", "num_beams": 5}


def ranking(number: int) -> Ranking:
    return Ranking(f"t:{number}", ((number,),), (-1.0,))


class TwoRanks(SingleProcess):
    """Gives the bytes of another rank beside this one's."""

    def __init__(self, other: bytes) -> None:
        super().__init__()
        self.other = other

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data, self.other]


def sent(rankings: list[Ranking]) -> bytes:
    return exact_bytes([one.as_record() for one in rankings])


def test_a_start_takes_up_what_killed_ranks_have_ranked(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "parts", MANIFEST)
    assert parts.take() == []
    for rank in range(2):
        append(parts.begin(rank, 2), [ranking(rank)])
    with (tmp_path / "parts" / "rank_1_of_2.jsonl").open("a") as file:
        file.write('{"sample_id": "t:9", "pla')  # killed in the middle of a line
    assert sorted(one.sample_id for one in parts.take()) == ["t:0", "t:1"]
    # the next start, with another number of ranks, finds one file
    assert [file.name for file in (tmp_path / "parts").iterdir()] == ["done.jsonl"]
    append(parts.begin(0, 1), [ranking(2)])
    assert len(parts.take()) == 3
    parts.remove()
    assert not parts.folder.exists()


def test_a_damaged_row_is_ranked_again(tmp_path: Path) -> None:
    parts = Parts(tmp_path, MANIFEST)
    file = parts.begin(0, 1)
    append(file, [ranking(0)])
    file.write_text(file.read_text() + '{"sample_id": "t:1", "places": [[1]], "scores": []}\n')
    append(file, [ranking(2)])
    assert [one.sample_id for one in parts.take()] == ["t:0", "t:2"]


def test_rankings_of_another_evaluation_are_refused(tmp_path: Path) -> None:
    append(Parts(tmp_path, MANIFEST).begin(0, 1), [ranking(0)])
    with pytest.raises(DataError, match="num_beams differ"):
        Parts(tmp_path, {**MANIFEST, "num_beams": 6}).take()


def test_ranks_together_have_every_sample_in_its_order(tmp_path: Path) -> None:
    other = sent([ranking(1), ranking(3)])
    found = merged(TwoRanks(other), [ranking(2), ranking(0)], [f"t:{n}" for n in range(4)])
    assert found == [ranking(n) for n in range(4)]


@pytest.mark.parametrize(("own", "word"), [([0], "1 missing"), ([0, 1, 2], "more than once"), ([0, 2, 5], "foreign")])
def test_other_rows_than_the_samples_are_refused(own: list[int], word: str) -> None:
    other = sent([ranking(1)])
    with pytest.raises(DataError, match=word):
        merged(TwoRanks(other), [ranking(n) for n in own], ["t:0", "t:1", "t:2"])
