"""A tokenizer and the directory that it is loaded from: its ids, its files, and what it is never asked to run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers.normalizers import Lowercase

from rft_core.errors import DataError
from rft_models.tiny_models.text import build_bpe_tokenizer, build_character_tokenizer
from rft_models.tokenization import tokenizer as tokenizer_module
from rft_models.tokenization.tokenizer import HfTokenizer, load_tokenizer

ALPHABET = "0123+= "


class Plain:
    """A tokenizer without a compiled part, which records how it is called."""

    def __init__(self, eos: int | None = 1, pad: int | None = None) -> None:
        self.eos_token_id, self.pad_token_id, self.unk_token = eos, pad, None
        self.chat_template = "a template"
        self.calls: list[Any] = []

    def __len__(self) -> int:
        return 7

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        self.calls.append((text, add_special_tokens))
        return (4, 5)

    def decode(self, ids: list[int], **options: bool) -> str:
        self.calls.append((ids, options))
        return "text"

    def apply_chat_template(self, messages: list[Any], **options: Any) -> str:
        self.calls.append((messages, options))
        return "chat"

    def save_pretrained(self, directory: str) -> None:
        self.calls.append(directory)


@pytest.mark.parametrize(
    ("eos", "more", "pad", "ids", "pad_id"),
    [
        (1, [], None, (1,), 1),
        (1, [3, 1, 3], None, (1, 3), 1),
        (None, [3, 2], None, (3, 2), 3),
        (None, [], None, (), 0),
        (1, [], 6, (1,), 6),
        (1, [], 0, (1,), 0),
    ],
)
def test_a_response_ends_at_any_of_its_ids_and_padding_has_one(
    eos: int | None, more: list[int], pad: int | None, ids: tuple[int, ...], pad_id: int
) -> None:
    tokenizer = HfTokenizer(Plain(eos, pad), eos_ids=more)
    assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.vocab_size) == (ids, pad_id, 7)
    assert (tokenizer.where, tokenizer.media_words) == ("tokenizer", ())


def test_special_tokens_come_and_go_where_it_is_asked_for() -> None:
    plain = Plain()
    tokenizer = HfTokenizer(plain)
    assert tokenizer.encode("a") == tokenizer.encode("b", add_special_tokens=True) == [4, 5]
    assert tokenizer.decode((1, 2)) == "text"
    assert tokenizer.decode_batch([(3,), (4,)]) == ["text", "text"]
    as_they_are = {"clean_up_tokenization_spaces": False}
    assert plain.calls == [
        ("a", False),
        ("b", True),
        ([1, 2], {"skip_special_tokens": False, **as_they_are}),
        ([3], {"skip_special_tokens": True, **as_they_are}),
        ([4], {"skip_special_tokens": True, **as_they_are}),
    ]


def test_a_batch_is_decoded_without_special_tokens() -> None:
    tokenizer = HfTokenizer(build_character_tokenizer(ALPHABET))
    ids = tokenizer.encode("1+1=")
    assert tokenizer.decode_batch([[*ids, *tokenizer.eos_ids], []]) == ["1+1=", ""]
    assert tokenizer.decode([*ids, *tokenizer.eos_ids]) == "1+1=<eos>"
    assert tokenizer.decode([*ids, *tokenizer.eos_ids], skip_special_tokens=True) == "1+1="


@pytest.mark.parametrize("tools", [[], [{"name": "add"}]])
def test_a_chat_is_rendered_with_its_tools(tools: list[dict[str, str]]) -> None:
    plain = Plain()
    tokenizer = HfTokenizer(plain)
    tokenizer.tools = tools
    assert tokenizer.render_chat([{"role": "user"}], add_generation_prompt=True) == "chat"
    options = {"tools": tools or None, "tokenize": False, "add_generation_prompt": True}
    assert plain.calls == [([{"role": "user"}], options)]
    plain.chat_template = ""
    with pytest.raises(DataError) as caught:
        tokenizer.render_chat([], add_generation_prompt=False)
    assert caught.value.problem.code == "text.no_chat_template"
    tokenizer.save_pretrained(Path("here"))
    assert plain.calls[-1] == "here"


def test_a_character_that_has_no_token_is_refused() -> None:
    tokenizer = HfTokenizer(build_character_tokenizer(ALPHABET), where="here")
    assert tokenizer.encode("1+1=<eos>")[-1:] == list(tokenizer.eos_ids)
    with pytest.raises(DataError) as caught:
        tokenizer.encode("1+z=y")
    problem = caught.value.problem
    assert (problem.code, problem.where) == ("text.unknown_character", "here")
    assert f"'yz' are not among the tokenizer's {len(ALPHABET)}" in problem.what
    bytes_of_anything = HfTokenizer(build_bpe_tokenizer(["some text"] * 4, 270))
    assert bytes_of_anything.decode(bytes_of_anything.encode("zy")) == "zy"


# --- directories


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    HfTokenizer(build_character_tokenizer(ALPHABET)).save_pretrained(tmp_path)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(value | changes))


@pytest.mark.parametrize(
    ("generation", "eos_ids"),
    [(None, (1,)), ({}, (1,)), ({"eos_token_id": 4}, (1, 4)), ({"eos_token_id": [5, 1, 3]}, (1, 5, 3))],
)
def test_a_directory_s_tokenizer_ends_where_its_generation_ends(
    generation: dict[str, Any] | None, eos_ids: tuple[int, ...], directory: Path
) -> None:
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = load_tokenizer(str(directory))
    assert (tokenizer.eos_ids, tokenizer.where) == (eos_ids, str(directory))
    assert tokenizer.decode(tokenizer.encode("1+1=")) == "1+1="


def test_a_tokenizer_of_the_file_s_own_class_is_what_its_file_says(directory: Path) -> None:
    written = build_bpe_tokenizer(["Some Text"] * 4, 270)
    written.backend_tokenizer.normalizer = Lowercase()
    written.save_pretrained(str(directory))
    edit(directory / "config.json", model_type="qwen2")
    for kind in ("TokenizersBackend", "PreTrainedTokenizerFast"):
        edit(directory / "tokenizer_config.json", tokenizer_class=kind)
        tokenizer = load_tokenizer(directory)
        assert tokenizer.decode(tokenizer.encode("Some TEXT")) == "some text"


def test_code_beside_a_tokenizer_s_file_is_not_looked_at(directory: Path) -> None:
    edit(directory / "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.Mine", None]})
    (directory / "code.py").write_text("raise SystemExit('code of a directory was run')")
    assert load_tokenizer(directory).vocab_size == 2 + len(ALPHABET)
    (directory / "tokenizer.json").rename(directory / "vocab.json")
    with pytest.raises(DataError) as caught:
        load_tokenizer(directory)
    assert caught.value.problem.code == "models.tokenizer_needs_code"
    assert caught.value.problem.where == str(directory / "tokenizer_config.json")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_is_cut_off_is_named(name: str, directory: Path) -> None:
    (directory / name).write_text("{")
    with pytest.raises(DataError) as caught:
        load_tokenizer(directory)
    assert (caught.value.problem.code, caught.value.problem.where) == ("models.damaged_json", str(directory / name))


def test_a_file_that_is_no_tokenizer_is_damaged(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError) as caught:
        load_tokenizer(directory)
    assert (caught.value.problem.code, caught.value.problem.where) == ("models.tokenizer_damaged", str(directory))


def test_a_directory_without_a_tokenizer_names_the_model_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_tokenizer(tmp_path)
    assert (caught.value.problem.code, caught.value.problem.where) == ("models.no_tokenizer", str(tmp_path))
    assert caught.value.problem.do.startswith("copy tokenizer.json")
    for step in ("step_000002", "step_000010"):
        (tmp_path / "checkpoints" / step / "model").mkdir(parents=True)
    with pytest.raises(DataError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.problem.do == f"--pretrain {tmp_path}/checkpoints/step_000010/model"


def test_a_tokenizer_of_a_family_s_class_is_loaded_as_that_class(directory: Path) -> None:
    build_bpe_tokenizer(["Some Text"] * 4, 270).save_pretrained(str(directory))
    edit(directory / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    assert type(load_tokenizer(directory).hf_tokenizer).__name__.startswith("Qwen2Tokenizer")
    edit(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert not type(load_tokenizer(directory).hf_tokenizer).__name__.startswith("Qwen2Tokenizer")


@pytest.mark.parametrize("loader", ["AutoTokenizer", "PreTrainedTokenizerFast"])
def test_nothing_is_fetched_and_no_code_is_run_whichever_class_loads_it(
    loader: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def from_pretrained(path: str, **options: Any) -> Plain:
        asked.append((path, options))
        return Plain()

    edit(directory / "tokenizer_config.json", tokenizer_class=loader)
    monkeypatch.setattr(getattr(transformers, loader), "from_pretrained", from_pretrained)
    load_tokenizer(directory)
    assert asked == [(str(directory), {"local_files_only": True, "trust_remote_code": False})]


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("\nthe first\nand more"), "load: the first"), (ImportError(), "load: ImportError")],
)
def test_why_a_tokenizer_does_not_load_is_said_in_one_line(
    error: Exception, said: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, **options: Any) -> None:
        raise error

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "from_pretrained", refuse)
    with pytest.raises(DataError) as caught:
        load_tokenizer(directory)
    assert caught.value.problem.code == "models.tokenizer_damaged"
    assert caught.value.problem.what.endswith(said)
    assert caught.value.__cause__ is error


def changed(folder: Path, file: str, **values: Any) -> Path:
    """A directory of a tokenizer with these entries in one of its files."""
    build_character_tokenizer(ALPHABET).save_pretrained(str(folder))
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))
    return folder


@pytest.mark.parametrize("index", [2**31, 2**24, -1, "x", None, 1.5])
@pytest.mark.parametrize("place", ["model.vocab", "added_tokens"])
def test_a_token_id_that_no_vocabulary_has_is_refused_before_memory_is_taken_for_it(
    tmp_path: Path, place: str, index: Any
) -> None:
    content = json.loads((changed(tmp_path, "tokenizer.json") / "tokenizer.json").read_text())
    if place == "model.vocab":
        content["model"]["vocab"]["1"] = index
    else:
        content["added_tokens"][0]["id"] = index
    with pytest.raises(DataError) as caught:
        load_tokenizer(changed(tmp_path, "tokenizer.json", **content))
    assert caught.value.problem.code == "models.config_value"
    assert place in caught.value.problem.where


@pytest.mark.parametrize("value", ["x", float("nan"), [[1]], {}, 2**31])
def test_ids_that_end_a_response_are_numbers_of_tokens(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError) as caught:
        load_tokenizer(changed(tmp_path, "generation_config.json", eos_token_id=value))
    assert caught.value.problem.where.endswith("generation_config.json: eos_token_id")


@pytest.mark.parametrize(("name", "value"), [("tokenizer_class", 1), ("added_tokens_decoder", "x"), ("eos_token", [1])])
def test_settings_of_a_tokenizer_that_its_library_cannot_read_are_damage(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(DataError) as caught:
        load_tokenizer(changed(tmp_path, "tokenizer_config.json", **{name: value}))
    assert caught.value.problem.code == "models.tokenizer_damaged"


LOOP = "{% for i in range(100000) %}"
ENDLESS = 3 * LOOP + 3 * "{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        *(ENDLESS, "{% for i in range(10**12) %}{% endfor %}", "{{ messages[0].content + 1 }}", "{{ 1 / 0 }}"),
        *("{{ 'a' * 10000000000 }}", "{{ messages[0].content.ljust(10000000000) }}"),
    ],
)
@pytest.mark.timeout(60)
def test_a_template_that_never_ends_or_fails_is_named(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(tokenizer_module, "_MOST_SECONDS", 0.3)
    tokenizer = build_character_tokenizer(ALPHABET)
    tokenizer.chat_template = template
    with pytest.raises(DataError) as caught:
        HfTokenizer(tokenizer, where="m").render_chat([{"role": "user", "content": "1"}], add_generation_prompt=True)
    assert (caught.value.problem.code, caught.value.problem.where) == ("text.chat_template_broken", "m")


def test_passages_that_the_template_marks_are_found_in_the_rendered_text() -> None:
    tokenizer = build_character_tokenizer("abcd<>")
    said = "{% generation %}{{ m.content }}{% endgeneration %}"
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<{{ m.content }}>{% else %}" + said + "{% endif %}{% endfor %}"
    )
    found = HfTokenizer(tokenizer)
    talk = [("user", "a"), ("assistant", "bb"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": words} for role, words in talk]
    spans = found.assistant_spans(messages)
    text = found.render_chat(messages, add_generation_prompt=False)
    assert spans is not None
    assert [text[first:behind] for first, behind in spans] == ["bb", "d"]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert found.assistant_spans(messages) is None
    tokenizer.chat_template = "{% generation %}{{ 1 / 0 }}{% endgeneration %}"
    with pytest.raises(DataError) as caught:
        found.assistant_spans(messages)
    assert caught.value.problem.code == "text.chat_template_broken"


def test_a_template_reaches_no_class_of_the_interpreter() -> None:
    tokenizer = build_character_tokenizer(ALPHABET)
    tokenizer.chat_template = "{{ ''.__class__.__base__.__subclasses__() }}"
    with pytest.raises(DataError) as caught:
        HfTokenizer(tokenizer, where="m").render_chat([{"role": "user", "content": "1"}], add_generation_prompt=True)
    assert caught.value.problem.code == "text.chat_refused"
