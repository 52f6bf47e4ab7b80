"""Recommendations from Python, for a file, and over HTTP, of a decoder with random weights."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

import pytest

from rft_core.errors import DataError, OptionsError
from rft_genrec.serving.batch import recommend_file
from rft_genrec.serving.recommendation_server import serving
from rft_genrec.serving.recommendations import Recommendations
from rft_genrec.settings.eval import BeamSettings
from rft_genrec.settings.recommend import RecommendationServingSettings, RecommendationSettings


@pytest.fixture(scope="module")
def shop(ring: Path, ring_model: Path) -> Recommendations:
    return Recommendations.open(ring_model, ring, beams=BeamSettings(num_beams=8), device="cpu")


def test_items_have_titles_and_falling_scores(shop: Recommendations) -> None:
    [found] = shop.top([[3, 4]], k=5)
    assert len(set(found.items)) == 5
    assert found.titles == tuple(f"item {item}" for item in found.items)
    assert list(found.scores) == sorted(found.scores, reverse=True)
    assert found.note == ""


def test_fewer_items_are_the_beginning_of_more(shop: Recommendations) -> None:
    assert shop.top([[3, 4]], k=2)[0].items == shop.top([[3, 4]], k=8)[0].items[:2]


def test_cold_and_unknown_histories_are_answered_with_a_note(shop: Recommendations) -> None:
    cold, left_out = shop.top([[], [3, 99]], k=2, skip_unknown=True)
    assert cold.note == "the history is empty: the items that are taken most"
    assert left_out.note == "left out 1 unknown items: 99"
    assert left_out.items == shop.top([[3]], k=2)[0].items
    with pytest.raises(OptionsError, match="holds item 99"):
        shop.top([[3, 99]], k=2)


def test_more_items_than_beams_are_refused(shop: Recommendations) -> None:
    with pytest.raises(OptionsError, match="9 with 8 beams"):
        shop.top([[3]], k=9)


def test_every_request_is_timed(shop: Recommendations) -> None:
    before = shop.latencies.num
    shop.top([[1], [2]], k=1)
    found = shop.latencies
    assert found.num == before + 2
    assert 0 < found.p50 <= found.p95


def test_a_file_is_answered_line_by_line(shop: Recommendations, tmp_path: Path) -> None:
    lines = ['{"user": "a", "history": [3]}', "nonsense", "", '{"user": "b", "history": [77]}', '{"history": []}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out.jsonl"
    done = recommend_file(shop, tmp_path / "in.jsonl", out, k=2, batch_size=2, skip_unknown=False)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert (done.num, done.num_errors) == (4, 2)
    assert rows[0]["user"] == "a"
    assert rows[0]["items"] == list(shop.top([[3]], k=2)[0].items)
    assert "no JSON" in rows[1]["error"]
    assert rows[2] == {"user": "b", "error": "unknown item 77: the catalogue has the items 0 to 39"}
    assert len(rows[3]["titles"]) == 2
    with pytest.raises(DataError, match="cannot be read"):
        recommend_file(shop, tmp_path / "none", out, k=2, batch_size=2, skip_unknown=False)


def test_requests_are_answered_over_http(shop: Recommendations) -> None:
    settings = RecommendationServingSettings(serve=True, port=0, max_request_histories=3)
    with serving(shop, settings, RecommendationSettings(top_k=3)) as server:
        connection = http.client.HTTPConnection(server.url.split("/")[2], timeout=60)

        def ask(body: object) -> tuple[int, dict[str, object]]:
            text = body if isinstance(body, str) else json.dumps(body)
            connection.request("POST", "/recommend", text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

        status, found = ask({"history": [3, 4], "k": 2})
        assert status == 200
        [one] = found["recommendations"]  # type: ignore[misc]
        assert one["items"] == list(shop.top([[3, 4]], k=2)[0].items)  # type: ignore[index]
        status, found = ask({"histories": [[3], {"user": "b", "history": [50]}]})
        assert status == 200
        right, wrong = found["recommendations"]  # type: ignore[misc]
        assert len(right["items"]) == 3  # type: ignore[index]
        assert wrong == {"user": "b", "error": "unknown item 50: the catalogue has the items 0 to 39"}
        refused = [
            ({"history": [50]}, "unknown item 50"),
            ("nonsense", "no JSON"),
            ({"k": 2}, "history or histories"),
            ({"history": [1], "k": 9}, "from 1 to 8"),
            ({"histories": [[1]] * 4}, "at most 3"),
        ]
        for body, word in refused:
            status, found = ask(body)
            assert status == 400
            assert word in str(found["error"])
        connection.request("GET", "/health")
        health = json.loads(connection.getresponse().read())
        assert health["status"] == "ready"
        assert health["histories"] == 2
