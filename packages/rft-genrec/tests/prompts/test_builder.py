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


def test_templates_put_the_ids_into_other_words() -> None:
    found = {name: PromptBuilder(IDS, 2, name).prompt([0, 1]) for name in ("tokens", "instruction", "chat")}  # pyright: ignore[reportArgumentType]
    assert found["tokens"] == "<a_0><b_1><a_2><b_0>"
    assert "### Input:\n<a_0><b_1>, <a_2><b_0>\n\n### Response:\n" in found["instruction"]
    assert found["chat"].endswith("Write the next item.\n<a_0><b_1>, <a_2><b_0>")
    assert len({PromptBuilder(IDS, 2, name).digest for name in ("tokens", "instruction", "chat")}) == 3  # pyright: ignore[reportArgumentType]


class Tokenizer:
    """Characters, with a beginning."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [1] * add_special_tokens + [ord(character) for character in text]

    def render_chat(self, messages: object, *, add_generation_prompt: bool) -> str:
        assert add_generation_prompt
        return f"[{messages}]"


def test_the_tokens_of_a_prompt_are_those_of_training() -> None:
    plain = PromptBuilder(IDS, 1).token_ids(Tokenizer(), [0])
    assert plain == [1, *map(ord, "<a_0><b_1>")]
    chat = PromptBuilder(IDS, 1, "chat").token_ids(Tokenizer(), [0])
    assert "".join(map(chr, chat)).startswith("[[{'role': 'user', 'content': 'These are")
