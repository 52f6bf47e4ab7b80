"""Rows of the tasks."""

from rft_genrec.catalogue.records import Catalogue, Item, Sample, SemanticIds
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.prompts.tasks import TASKS, TaskInput, sequence_rows, shared_beginnings

IDS = SemanticIds((("<a>", "<b>"), ("<c>",), ("<c>",), ("<a>", "<d>", "<e>")))
TOOLS = Catalogue("tools", (Item("Hammer"), Item("Saw"), Item("Saw"), Item("Red axe")))
SAMPLES = (Sample("train:0", "A", (0, 1), 3), Sample("train:1", "B", (), 0))


def given(template: str = "tokens") -> TaskInput:
    return TaskInput(TOOLS, PromptBuilder(IDS, 2, template), SAMPLES)  # pyright: ignore[reportArgumentType]


def test_each_task_asks_for_one_thing_and_no_prompt_holds_its_answer() -> None:
    found = {name: list(rows(given())) for name, rows in TASKS.items()}
    assert [(row.prompt, row.response) for row in found["history"]] == [("<a><b><c>", "<a><d><e>")]
    assert [(row.prompt, row.response) for row in found["fusion"]] == [("<a><b><c>\nNext title: ", "Red axe")]
    assert [row.response for row in found["title"]] == ["Hammer", "Saw", "Red axe"]  # two items share an ID
    assert [row.response for row in found["id"]] == ["<a><b>", "<c>", "<a><d><e>"]  # and a title
    assert found["titles"][0].prompt.startswith('"Hammer", "Saw"\n')
    assert found["titles_to_id"][0].response == "<a><d><e>"
    for template in ("tokens", "instruction", "chat"):
        rows = [row for make in TASKS.values() for row in make(given(template))]
        assert all(row.response not in row.prompt for row in rows)
        assert len({row.prompt for row in rows}) == len(rows)


def test_a_sequence_is_learned_once_in_windows() -> None:
    rows = list(sequence_rows(PromptBuilder(IDS, max_history=2), {"A": (0, 1, 2, 3, 0, 1), "B": (2,)}))
    assert [(row.prompt, row.response) for row in rows] == [
        ("<a><b>", "<c><c>"),
        ("<c>", "<a><d><e><a><b>"),
        ("<a><b>", "<c>"),
    ]
    assert len(list(sequence_rows(PromptBuilder(IDS, max_history=0), {"A": (0, 1, 2, 3, 0, 1)}))) == 1


def test_an_id_that_another_begins_with_is_found() -> None:
    assert shared_beginnings(IDS) is None
    assert shared_beginnings(SemanticIds((("<a>",), ("<a>", "<b>")))) == (("<a>",), ("<a>", "<b>"))
