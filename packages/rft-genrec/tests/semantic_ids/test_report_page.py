"""The report as one file."""

from html.parser import HTMLParser

import torch

from rft_genrec.semantic_ids.codebooks import Quantiser
from rft_genrec.semantic_ids.give_ids import measured
from rft_genrec.semantic_ids.report_page import bars, page


class Tags(HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str | None] = []

    def handle_starttag(self, tag: str, attrs) -> None:
        self.names.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]


def test_the_page_holds_everything_it_shows() -> None:
    points = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    quantiser = Quantiser("rqkmeans", (points[:8], points[8:12] / 4))
    codes = quantiser.codes(points)
    report = measured(points, codes, [tuple(row) for row in codes.tolist()], quantiser, neighbours=3)
    found = page("<tools>", report)
    tags = Tags()
    tags.feed(found)
    assert tags.links == []
    assert tags.names.count("svg") == 3
    assert tags.names.count("rect") == 8 + 4 + 4
    assert "&lt;tools&gt;" in found
    assert f"{report['collision_rate']:.2%}" in found
    assert "0 bars" in bars([])
