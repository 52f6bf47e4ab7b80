"""The builder of prompts."""

from rft_genrec.catalogue.records import SemanticIds
from rft_genrec.prompts.builder import PromptBuilder

IDS = SemanticIds((("<a_0>", "<b_1>"), ("<a_2>", "<b_0>"), ("<a_2>", "<b_1>")))


def test_a_prompt_tells_the_newest_items() -> None:
    builder = PromptBuilder(IDS, max_history=2)
    assert builder.prompt([2, 0, 1]) == "<a_0><b_1><a_2><b_0>"
    assert PromptBuilder(IDS, max_history=0).prompt([2, 0, 1]) == "<a_2><b_1><a_0><b_1><a_2><b_0>"
    assert builder.response(2) == "<a_2><b_1>"


def test_the_digest_changes_with_what_decides_a_prompt() -> None:
    other = SemanticIds((("<a_0>", "<b_1>"), ("<a_2>", "<b_1>"), ("<a_2>", "<b_0>")))
    digests = {PromptBuilder(IDS).digest, PromptBuilder(other).digest, PromptBuilder(IDS, max_history=3).digest}
    assert len(digests) == 3
