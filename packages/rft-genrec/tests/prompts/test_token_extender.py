"""Tokens of an index file."""

import json
from pathlib import Path

import pytest

from rft_core.errors import DataError
from rft_genrec.prompts.token_extender import TokenExtender


def test_exactly_the_file_that_is_given_is_read(tmp_path: Path) -> None:
    (tmp_path / "X.index.json").write_text(json.dumps({"0": ["<wrong>"]}))
    (tmp_path / "X.faiss-rq.index.json").write_text(json.dumps({"0": ["<b_1>", "<a_2>"], "1": ["<a_10>", "<b_1>"]}))
    tokens = ["<a_10>", "<a_2>", "<b_1>"]
    assert TokenExtender(tmp_path / "X.faiss-rq.index.json").get_new_tokens() == tokens
    assert TokenExtender(tmp_path, "X", ".faiss-rq.index.json").get_new_tokens() == tokens


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"0": "<a>"}', '{"0": []}', '{"0": [1]}'])
def test_a_file_that_is_no_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "X.index.json").write_text(text)
    with pytest.raises(DataError) as refused:
        TokenExtender(tmp_path / "X.index.json").get_new_tokens()
    assert refused.value.problem.code == "genrec.index"
