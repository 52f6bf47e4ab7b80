"""Which files of a data set's repository a name stands for, in the layouts that repositories have."""

from __future__ import annotations

from typing import Any

import pytest

from rft.hub.dataset_files import chosen_files
from rft.hub.hub_names import dataset_name
from rft_core.errors import DataError

GSM8K = [
    "README.md",
    *(f"{config}/{split}-00000-of-00001.parquet" for config in ("main", "socratic") for split in ("test", "train")),
]


def card(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"configs": list(rows)}


def gsm8k_card() -> dict[str, Any]:
    return card(
        *(
            {
                "config_name": config,
                "data_files": [{"split": split, "path": f"{config}/{split}-*"} for split in ("train", "test")],
            }
            for config in ("main", "socratic")
        )
    )


def chosen(name: str, files: list[str], metadata: dict[str, Any] | None = None, split: str = "train") -> list[str]:
    found = dataset_name(name)
    assert found is not None
    return chosen_files(files, metadata or {}, found, split, "--prompt_data")


def refusal(name: str, files: list[str], metadata: dict[str, Any] | None = None, split: str = "train") -> DataError:
    with pytest.raises(DataError) as caught:
        chosen(name, files, metadata, split)
    return caught.value


def test_a_card_names_the_files_of_configurations_and_splits() -> None:
    assert chosen("o/g:main", GSM8K, gsm8k_card()) == ["main/train-00000-of-00001.parquet"]
    assert chosen("o/g:socratic", GSM8K, gsm8k_card(), "test") == ["socratic/test-00000-of-00001.parquet"]
    # a split of the name comes before that of the settings
    assert chosen("o/g:main:test", GSM8K, gsm8k_card()) == ["main/test-00000-of-00001.parquet"]


def test_several_configurations_need_a_choice_unless_one_is_the_default() -> None:
    error = refusal("o/g", GSM8K, gsm8k_card()).problem
    assert (error.code, error.do) == ("hub.unknown_config", "--prompt_data o/g:main")
    metadata = gsm8k_card()
    metadata["configs"][1]["default"] = True
    assert chosen("o/g", GSM8K, metadata) == ["socratic/train-00000-of-00001.parquet"]


def test_an_unknown_configuration_or_split_is_answered_with_the_nearest() -> None:
    error = refusal("o/g:socrates", GSM8K, gsm8k_card()).problem
    assert (error.code, error.do) == ("hub.unknown_config", "--prompt_data o/g:socratic")
    error = refusal("o/g:main:tets@v1", GSM8K, gsm8k_card()).problem
    assert (error.code, error.do) == ("hub.unknown_split", "--prompt_data o/g:main:test@v1")
    assert refusal("o/g:main", GSM8K, gsm8k_card(), "validation").problem.code == "hub.unknown_split"


@pytest.mark.parametrize(
    ("files", "split", "expected"),
    [
        (["data/train-00000-of-00001-a09b74b3ef9c3b56.parquet"], "train", [0]),
        (["test.jsonl", "train.jsonl"], "train", [1]),
        (["dev.json", "training_data.json"], "validation", [0]),
        (["test/algebra.jsonl", "train/algebra.jsonl", "train/geometry.jsonl"], "train", [1, 2]),
        (["ShareGPT_cleaned.json", "README.md", "dataset_infos.json"], "train", [0]),
        (["default/train/0000.parquet", "default/train/0001.parquet"], "train", [0, 1]),
        (["latest.csv", "trains.csv"], "train", [0, 1]),  # words, not parts of words
    ],
)
def test_without_a_card_folders_and_names_say_the_split(files: list[str], split: str, expected: list[int]) -> None:
    assert chosen("o/d", files, split=split) == [files[index] for index in expected]


def test_a_folder_is_a_configuration_where_the_card_names_none() -> None:
    files = ["main/train/0000.parquet", "other/train/0000.parquet"]
    assert chosen("o/d:main@refs/convert/parquet", files) == ["main/train/0000.parquet"]


@pytest.mark.parametrize(
    ("data_files", "expected"),
    [
        ("a.jsonl", ["a.jsonl"]),
        (["b.jsonl", "a.jsonl"], ["b.jsonl", "a.jsonl"]),
        ([{"split": "train", "path": ["data/*.jsonl"]}], ["data/c.jsonl"]),
        ([{"split": "train", "path": "**/*.jsonl"}], ["a.jsonl", "b.jsonl", "data/c.jsonl", "data/deep/d.jsonl"]),
        ([{"split": "train", "path": "*.jsonl"}], ["a.jsonl", "b.jsonl"]),
    ],
)
def test_patterns_of_a_card_are_texts_lists_or_splits_with_paths(data_files: Any, expected: list[str]) -> None:
    files = ["a.jsonl", "b.jsonl", "data/c.jsonl", "data/deep/d.jsonl"]
    assert chosen("o/d", files, card({"config_name": "default", "data_files": data_files})) == expected


def test_the_folder_of_a_configuration_is_read_by_its_names() -> None:
    files = ["en/test.csv", "en/train.csv", "fr/train.csv"]
    rows = [{"config_name": "en", "data_dir": "en"}, {"config_name": "fr", "data_dir": "fr"}]
    assert chosen("o/d:en", files, card(*rows)) == ["en/train.csv"]


def test_loading_scripts_and_formats_that_are_not_read_are_refused() -> None:
    error = refusal("o/d", ["README.md", "d.py"]).problem
    assert error.code == "hub.no_data"
    assert "d.py" in error.what
    assert "o/d:default@refs/convert/parquet" in error.do
    metadata = card({"config_name": "default", "data_files": "train.jsonl.gz"})
    assert refusal("o/d", ["train.jsonl.gz"], metadata).problem.code == "hub.unread_format"
