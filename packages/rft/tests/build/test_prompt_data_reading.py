"""Which rows are read, by which settings: sources, limits, splits, keys, images, held-out rows and given prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.build.images import ImageReading
from rft.build.prompt_data import (
    PreparedPrompts,
    as_prompts,
    data_notes,
    demonstrations,
    given_prompts,
    held_out_text,
    hold_out,
    read_held_out,
    read_training,
    with_label_column,
)
from rft.settings import RlSettings
from rft_core.errors import DataError, OptionsError
from rft_models.settings import ModelSettings
from rft_models.tiny_models.text import build_bpe_tokenizer
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.columns import MissingColumnError
from rft_trainer.data.images import ImageColumn
from rft_trainer.data.prompts import PromptRow, content_hash
from rft_trainer.data.rendering import RenderedPrompt
from rft_trainer.records.rollouts import Prompt, TrainingSample
from rft_trainer.settings.data import DataSettings, EvalDataSettings, GenerateDataSettings, SftDataSettings
from rft_trainer.settings.images import GenerateImageSettings
from rft_trainer.settings.rewards import RewardModelSettings, RlRewardSettings

Write = Callable[..., str]


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    return HfTokenizer(build_bpe_tokenizer(["1+1=2"], 258))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows of texts, whose label and output follow from them, and returns the file's path."""

    def file(name: str, texts: Sequence[str], **more: Any) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        rows = [
            {"input": text, "other": f"o{text}", "label": f"l{text}", "output": f"a{text}", **more} for text in texts
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return file


def read(
    tokenizer: HfTokenizer, path: str, limit: int = 50, reading: ImageReading | None = None, **changes: Any
) -> Any:
    settings = SftDataSettings(prompt_data=path, **changes)
    return read_training(
        settings,
        settings,
        tokenizer,
        label_key="label",
        output_key="output",
        prompt_max_len=limit,
        images=reading or ImageReading(),
    )


def texts(found: PreparedPrompts | Sequence[RenderedPrompt]) -> list[str]:
    return [row.text for row in (found.rendered if isinstance(found, PreparedPrompts) else found)]


def test_training_without_a_file_is_refused(tokenizer: HfTokenizer) -> None:
    with pytest.raises(OptionsError) as caught:
        read(tokenizer, "")
    assert caught.value.problem.code == "data.no_prompt_data"


def test_a_row_has_its_label_its_output_and_the_number_of_its_line(tokenizer: HfTokenizer, write: Write) -> None:
    found = read(tokenizer, write("a.jsonl", ["x", "y"]))
    assert [(r.prompt_id, r.text, r.label, r.output, r.source, r.index) for r in found.rendered] == [
        ("a:0", "x", "lx", "ax", "a", 0),
        ("a:1", "y", "ly", "ay", "a", 1),
    ]
    assert found.limit == 50
    assert texts(read(tokenizer, write("a.jsonl", ["x"]), input_key="other")) == ["ox"]


def test_settings_of_the_text_reach_the_rows(tokenizer: HfTokenizer, write: Write) -> None:
    assert texts(read(tokenizer, write("a.jsonl", ["x"]), input_template="now {}!")) == ["now x!"]
    path = write("a.jsonl", ["x"])
    spoken = texts(read(tokenizer, path, apply_chat_template=True, system_prompt="Be brief."))[0]
    assert "Be brief." in spoken
    assert "Be brief." not in texts(read(tokenizer, path, apply_chat_template=True))[0]


def test_sources_have_their_probabilities_and_without_any_every_row_comes_once(
    tokenizer: HfTokenizer, write: Write
) -> None:
    path = f"{write('a.jsonl', ['x', 'y', 'z'])},{write('b.jsonl', ['u'])}"
    plain = read(tokenizer, path)
    assert (plain.mixture.sizes, plain.mixture.probabilities) == ((3, 1), None)
    mixed = read(tokenizer, path, prompt_data_probs="0.25,0.75")
    assert (mixed.mixture.sizes, mixed.mixture.probabilities) == ((3, 1), (0.25, 0.75))
    part = mixed.mixture_of(["a:2", "b:0", "a:0"])
    assert (part.sizes, part.probabilities) == ((2, 1), (0.25, 0.75))


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (2, ["a:0", "b:0"]),
        (3, ["a:0", "a:1", "b:0"]),
        (4, ["a:0", "a:1", "a:2", "b:0"]),
        (5, ["a:0", "a:1", "a:2", "b:0", "b:1"]),
        (6, ["a:0", "a:1", "a:2", "a:3", "b:0", "b:1"]),
        (7, ["a:0", "a:1", "a:2", "a:3", "a:4", "b:0", "b:1"]),
        (9, ["a:0", "a:1", "a:2", "a:3", "a:4", "a:5", "b:0", "b:1", "b:2"]),
        (50, ["a:0", "a:1", "a:2", "a:3", "a:4", "a:5", "b:0", "b:1", "b:2"]),
    ],
)
def test_a_limit_takes_the_first_rows_of_each_source_in_proportion_to_its_size(
    tokenizer: HfTokenizer, write: Write, limit: int, kept: list[str]
) -> None:
    path = f"{write('a.jsonl', 'abcdef')},{write('b.jsonl', 'uvw')}"
    found = [row.prompt_id for row in read(tokenizer, path, max_samples=limit).rendered]
    assert found == kept


def test_the_split_chooses_the_files_of_a_directory(tokenizer: HfTokenizer, write: Write) -> None:
    folder = Path(write("set/train.jsonl", ["x"])).parent
    write("set/test.jsonl", ["y"])
    assert texts(read(tokenizer, str(folder))) == ["x"]
    assert texts(read(tokenizer, str(folder), prompt_split="test")) == ["y"]
    alone = Path(write("one/rows.jsonl", ["z"])).parent
    assert texts(read(tokenizer, str(alone), prompt_split="")) == ["z"]


def test_the_hash_is_of_the_rows_that_are_used(tokenizer: HfTokenizer, write: Write) -> None:
    path = write("a.jsonl", ["x", "y" * 30, "z"])
    whole = read(tokenizer, path)
    used = read(tokenizer, path, limit=8)
    assert [name for name, _ in used.left_out] == ["a:1"]
    assert (used.mixture.sizes, whole.mixture.sizes) == ((2,), (3,))
    assert whole.data_hash == content_hash(whole.loaded.prompts) != used.data_hash
    assert used.data_hash == content_hash([row for row in whole.loaded.prompts if row.index != 1])
    assert used.limit == 8


class Exchange(ImageReading):
    """Turns the order of the rows round."""

    __slots__ = ()

    def arranged(self, rows: Sequence[PromptRow]) -> Sequence[PromptRow]:
        return list(reversed(rows))


def test_images_are_exchanged_among_the_rows_that_were_chosen(tokenizer: HfTokenizer, write: Write) -> None:
    path = write("a.jsonl", ["x", "y", "z"])
    assert texts(read(tokenizer, path, reading=Exchange(), max_samples=2)) == ["y", "x"]
    settings = EvalDataSettings()
    found = read_held_out(
        path, "", 2, settings, tokenizer, label_key=None, output_key=None, prompt_max_len=50, images=Exchange()
    )
    assert texts(found) == ["y", "x"]


def test_a_column_of_images_must_be_there(tokenizer: HfTokenizer, write: Write) -> None:
    path, reading = write("a.jsonl", ["x"]), ImageReading(ImageColumn("picture", -1, False))
    with pytest.raises(DataError):
        read(tokenizer, path, reading=reading)
    with pytest.raises(DataError):
        held_out(tokenizer, path, reading=reading)
    data = GenerateDataSettings(prompt_data=path)
    with pytest.raises(DataError):
        given_prompts(data, tokenizer, 50, GenerateImageSettings(images_key="picture"))
    with pytest.raises(DataError):
        given_prompts(GenerateDataSettings(prompt="x"), tokenizer, 50, GenerateImageSettings(image="absent.png"))


def held_out(
    tokenizer: HfTokenizer,
    path: str,
    limit: int = 0,
    *,
    split: str = "",
    most: int = 50,
    reading: ImageReading | None = None,
    **changes: Any,
) -> tuple[RenderedPrompt, ...]:
    settings = EvalDataSettings(**changes)
    return read_held_out(
        path,
        split,
        limit,
        settings,
        tokenizer,
        label_key="label",
        output_key="output",
        prompt_max_len=most,
        images=reading or ImageReading(),
    )


def test_held_out_rows_are_the_first_ones(tokenizer: HfTokenizer, write: Write) -> None:
    path = write("a.jsonl", ["x", "y", "z"])
    assert texts(held_out(tokenizer, path)) == ["x", "y", "z"]
    assert texts(held_out(tokenizer, path, 2)) == ["x", "y"]
    assert texts(held_out(tokenizer, path, 9)) == ["x", "y", "z"]
    [row] = held_out(tokenizer, path, 1, input_key="other", input_template="<{}>")
    assert (row.text, row.label, row.output) == ("<ox>", "lx", "ax")
    folder = Path(write("set/train.jsonl", ["x"])).parent
    write("set/test.jsonl", ["y"])
    assert texts(held_out(tokenizer, str(folder), split="test")) == ["y"]


def test_held_out_data_that_cannot_be_read_are_told_by_their_own_settings(
    tokenizer: HfTokenizer, write: Write, tmp_path: Path
) -> None:
    write("sets/train.jsonl", ["x"])
    write("sets/dev.jsonl", ["x"])
    settings = EvalDataSettings(eval_data="e")
    for path, split, do in (
        (tmp_path / "sets" / "trian.jsonl", "", f"--eval_data {tmp_path}/sets/train.jsonl"),
        (tmp_path / "sets", "test", "--eval_split dev"),
    ):
        with pytest.raises((DataError, OptionsError)) as caught:
            read_held_out(
                str(path), split, 0, settings, tokenizer, label_key="label", output_key=None, prompt_max_len=9
            )
        assert caught.value.problem.do == do


def test_columns_of_held_out_rows_are_told_by_their_own_settings(tokenizer: HfTokenizer, write: Write) -> None:
    path = write("a.jsonl", ["x"])
    settings = DataSettings(input_key="input", eval_input_key="othr")
    text = held_out_text(settings)
    with pytest.raises(MissingColumnError) as caught:
        read_held_out(path, "", 0, text, tokenizer, label_key="label", output_key=None, prompt_max_len=9)
    problem = caught.value.problem
    assert (problem.do, caught.value.flag) == ("--eval_input_key other", "--input_key")
    assert "--eval_input_key" in problem.why
    [row] = read_held_out(
        path,
        "",
        0,
        held_out_text(replace(settings, eval_input_key="other")),
        tokenizer,
        label_key="label",
        output_key=None,
        prompt_max_len=9,
    )
    assert row.text == "ox"
    assert held_out_text(DataSettings(input_key="input")).input_key == "input"


def test_a_held_out_row_that_does_not_fit_is_an_error_and_not_left_out(tokenizer: HfTokenizer, write: Write) -> None:
    path = write("a.jsonl", ["x", "y" * 9, "z" * 30, "w" * 20])
    lengths = [len(row.token_ids) for row in held_out(tokenizer, path)]
    with pytest.raises(DataError) as caught:
        held_out(tokenizer, path, most=5)
    problem = caught.value.problem
    assert (problem.code, problem.do) == ("eval.prompt_too_long", f"--prompt_max_len {lengths[2]}")
    assert "3 of 4" in problem.what
    assert "a:2" in problem.what
    assert len(held_out(tokenizer, path, most=lengths[2])) == 4


def test_a_prompt_is_given_as_text_or_as_a_file_and_not_as_both(tokenizer: HfTokenizer, write: Write) -> None:
    path = write("a.jsonl", ["x", "y", "z"])
    [one] = given_prompts(GenerateDataSettings(prompt="hello", input_template="{}?"), tokenizer, 50)
    assert (one.prompt_id, one.text, one.source, one.label) == ("prompt:0", "hello?", "prompt", None)
    assert one.token_ids == tuple(tokenizer.encode("hello?"))
    rows = given_prompts(GenerateDataSettings(prompt_data=path, input_key="other"), tokenizer, 50)
    assert [(row.prompt_id, row.text) for row in rows] == [("a:0", "ox"), ("a:1", "oy"), ("a:2", "oz")]
    some = given_prompts(GenerateDataSettings(prompt_data=path, max_samples=2), tokenizer, 50)
    assert [row.text for row in some] == ["x", "y"]
    for data in (GenerateDataSettings(), GenerateDataSettings(prompt="x", prompt_data=path)):
        with pytest.raises(OptionsError) as caught:
            given_prompts(data, tokenizer, 50)
        assert caught.value.problem.code == "generate.one_source"


def test_given_prompts_come_from_their_split(tokenizer: HfTokenizer, write: Write) -> None:
    folder = Path(write("set/train.jsonl", ["x"])).parent
    write("set/test.jsonl", ["y"])
    data = GenerateDataSettings(prompt_data=str(folder))
    assert [row.text for row in given_prompts(data, tokenizer, 50)] == ["x"]
    assert [row.text for row in given_prompts(replace(data, prompt_split="test"), tokenizer, 50)] == ["y"]


def test_a_given_prompt_that_is_too_long_is_refused_with_the_limit_that_takes_all(
    tokenizer: HfTokenizer, write: Write
) -> None:
    data = GenerateDataSettings(prompt_data=write("a.jsonl", ["x", "y" * 9, "z" * 30, "w" * 20]))
    lengths = [len(row.token_ids) for row in given_prompts(data, tokenizer, 50)]
    assert len(given_prompts(data, tokenizer, max(lengths))) == 4
    with pytest.raises(OptionsError) as caught:
        given_prompts(data, tokenizer, lengths[1] - 1)
    problem = caught.value.problem
    assert (problem.code, problem.do) == ("generate.prompt_too_long", f"--prompt_max_len {max(lengths)}")
    assert problem.what.startswith(f"a:1 has {lengths[1]} tokens")


def test_a_prompt_of_the_loop_has_all_of_the_rendered_one() -> None:
    media: Any = object()
    messages = ({"role": "user", "content": "t"},)
    row = RenderedPrompt("a:3", "t", (1, 2), "l", "o", "a", 3, media, messages)
    assert as_prompts([row]) == [Prompt("a:3", (1, 2), "t", "l", "a", media, messages)]


def test_prepared_prompts_are_those_that_fit(tokenizer: HfTokenizer, write: Write) -> None:
    found = read(tokenizer, write("a.jsonl", ["x", "y" * 30]), limit=8)
    assert [(one.prompt_id, one.text, one.label) for one in found.prompts()] == [("a:0", "x", "lx")]


def samples_of(count: int) -> list[TrainingSample]:
    return [TrainingSample(f"a:{number}", (number, 1), 1, 0.0) for number in range(count)]


def test_rows_are_held_out_by_the_seed_and_both_parts_keep_their_order() -> None:
    samples = samples_of(20)
    training, held = hold_out(samples, 5, seed=3)
    assert (len(training), len(held)) == (15, 5)
    assert sorted([*training, *held], key=samples.index) == samples
    for part in (training, held):
        assert part == sorted(part, key=samples.index)
    assert hold_out(samples, 5, seed=3) == (training, held)
    assert hold_out(samples, 5, seed=4)[1] != held
    assert hold_out(samples, 4, seed=3)[1] == [one for one in held if one in hold_out(samples, 4, seed=3)[1]]
    assert hold_out(samples, 0, seed=3) == (samples, [])
    assert len(hold_out(samples, 19, seed=3)[0]) == 1


@pytest.mark.parametrize(
    ("count", "there", "do"), [(20, 20, 1), (50, 40, 2), (2, 2, 1), (1, 1, 0), (100, 60, 3), (0, 0, 0)]
)
def test_at_least_one_row_is_left_to_train_on(count: int, there: int, do: int) -> None:
    with pytest.raises(OptionsError) as caught:
        hold_out(samples_of(there), count, seed=0)
    problem = caught.value.problem
    assert (problem.code, problem.do) == ("data.held_out_rows", f"--held_out_rows {do}")


def rendered(name: str, tokens: tuple[int, ...], output: str, media: Any = None) -> RenderedPrompt:
    return RenderedPrompt(name, "t", tokens, None, output, "a", 0, media)


def test_a_demonstration_knows_where_its_output_begins_and_its_images(tokenizer: HfTokenizer) -> None:
    media: Any = object()
    [sample], _ = demonstrations([rendered("a:0", (5, 6, 7), "12", media)], tokenizer, 50)
    assert len(sample.token_ids) > 3
    assert sample == TrainingSample("a:0", sample.token_ids, 3, 0.0, media=media)


@pytest.mark.parametrize("order", [[9, 30, 20], [30, 9], [7]])
def test_a_limit_that_leaves_no_demonstration_is_refused_with_the_one_that_keeps_all(
    tokenizer: HfTokenizer, order: list[int]
) -> None:
    rows = [rendered(f"a:{place}", (5,) * length, "1") for place, length in enumerate(order)]
    [whole], left_out = demonstrations(rows[:1], tokenizer, 50)
    assert left_out == []
    extra = len(whole.token_ids) - order[0]
    with pytest.raises(DataError) as caught:
        demonstrations(rows, tokenizer, 5)
    problem = caught.value.problem
    assert (problem.code, problem.do) == ("data.all_too_long", f"--max_len {max(order) + extra}")


def without_labels(path: str, **groups: Any) -> RlSettings:
    data = DataSettings(prompt_data=path)
    return replace(RlSettings(model=ModelSettings(pretrain="m"), data=data), **groups)


def reader(tokenizer: HfTokenizer, settings: RlSettings) -> Callable[[str], PreparedPrompts]:
    def of(label_key: str) -> PreparedPrompts:
        return read_training(
            settings.data, settings.data, tokenizer, label_key=label_key, output_key=None, prompt_max_len=50
        )

    return of


def test_rows_without_a_label_column_are_read_where_no_reward_compares_with_it(
    tokenizer: HfTokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"input": "x"}\n{"input": "y"}\n')
    models = RewardModelSettings(reward_pretrain="r")
    settings = without_labels(str(file), reward_models=models)
    found, column = with_label_column(reader(tokenizer, settings), settings)
    assert ([row.label for row in found.rendered], column) == ([None, None], "")
    # a function is given the labels, and a row that lacks what others have is a mistake
    compared = without_labels(str(file), reward_models=models, reward=RlRewardSettings(reward="exact"))
    with pytest.raises(MissingColumnError):
        with_label_column(reader(tokenizer, compared), compared)
    file.write_text('{"input": "x", "label": "1"}\n{"input": "y"}\n')
    with pytest.raises(MissingColumnError):
        with_label_column(reader(tokenizer, settings), settings)


def test_notes_tell_of_template_end_token_and_rows_in_both_sets(tokenizer: HfTokenizer, write: Write) -> None:
    training = read(tokenizer, write("a.jsonl", ["x", "y", "z"])).rendered
    plain, chat = SftDataSettings(), SftDataSettings(apply_chat_template=True)
    assert data_notes(chat, tokenizer, training) == ()
    (note,) = data_notes(plain, tokenizer, training)
    assert "--apply_chat_template" in note
    held_out = read(tokenizer, write("b.jsonl", ["y", "q", "z"])).rendered
    (note,) = data_notes(chat, tokenizer, training, held_out)
    assert note.startswith("2 of 3 held-out prompts")
    # the same text asks about another picture
    pictured = [replace(row, media=object()) for row in held_out]  # pyright: ignore[reportArgumentType]
    assert data_notes(chat, tokenizer, training, pictured) == ()
    endless = SimpleNamespace(has_chat_template=False, eos_ids=())
    (note,) = data_notes(plain, endless, training)  # pyright: ignore[reportArgumentType]
    assert "no end token" in note
