"""What a reward head may be, and what config.json says of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import DataError, OptionsError
from rft_models.reward_model.spec import RECORD, RewardSpec, spec_of_classifier, stored_spec

GOOD: list[dict[str, Any]] = [
    {},
    {"heads": ("a", "B.1-_x")},
    {"heads": ("a", "b"), "weights": (0.0, -1.5)},
    {"weights": None},
    {"layer": 1},
    {"attention_heads": 1, "pooling": "attention"},
]
BAD: list[dict[str, Any]] = [
    {"heads": ()},
    {"heads": ("a", "a"), "weights": (1.0, 1.0)},
    {"heads": ("a", "_b"), "weights": (1.0, 1.0)},
    {"heads": ("a b",)},
    {"heads": ("",)},
    {"heads": ("a", "b"), "weights": (1.0,)},
    {"heads": ("a",), "weights": (1.0, 2.0)},
    {"weights": (float("nan"),)},
    {"heads": ("a", "b"), "weights": (1.0, float("inf"))},
    {"pooling": "mean"},
    {"layer": 0},
    {"attention_heads": 0},
]


@pytest.mark.parametrize("fields", GOOD)
def test_a_spec_is_written_and_read_back(fields: dict[str, Any]) -> None:
    if "heads" in fields and "weights" not in fields:
        fields = fields | {"weights": None}
    spec = RewardSpec(**fields)
    assert stored_spec({RECORD: spec.as_record()}, Path("d")) == spec
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in spec.as_record().items()}
    assert stored_spec({RECORD: lists}, Path("d")) == spec


@pytest.mark.parametrize("fields", BAD)
def test_a_spec_that_means_nothing_is_refused_and_is_damage_in_a_file(fields: dict[str, Any]) -> None:
    with pytest.raises(OptionsError) as caught:
        RewardSpec(**fields)
    assert caught.value.problem.code == "models.reward_spec"
    with pytest.raises(DataError) as damaged:
        stored_spec({RECORD: RewardSpec().as_record() | fields}, Path("d"))
    assert damaged.value.problem.code == "models.reward_spec_damaged"
    assert damaged.value.problem.where == str(Path("d") / "config.json")


@pytest.mark.parametrize("record", [3, {"heads": ["a"]}, RewardSpec().as_record() | {"more": 1}, {"weights": None}])
def test_an_entry_of_another_form_is_damaged(record: object) -> None:
    with pytest.raises(DataError) as caught:
        stored_spec({RECORD: record}, Path("d"))
    assert caught.value.problem.code == "models.reward_spec_damaged"
    assert stored_spec({}, Path("d")) is None


def test_a_plain_head_is_one_score_with_the_weight_one() -> None:
    assert RewardSpec().as_record() == {
        "heads": ("score",),
        "weights": (1.0,),
        "pooling": "last",
        "layer": None,
        "attention_heads": 4,
        "scale_for_train": False,
    }


@pytest.mark.parametrize(
    ("fields", "is_classifier"),
    [({}, True), ({"pooling": "attention"}, False), ({"layer": 2}, False), ({"scale_for_train": True}, False)],
)
def test_a_classifier_of_transformers_pools_the_last_token_of_all_layers(
    fields: dict[str, Any], is_classifier: bool
) -> None:
    spec = RewardSpec(**fields)
    assert spec.is_classifier == is_classifier
    assert spec.tensor_prefix == ("" if is_classifier else "reward_head.")


@pytest.mark.parametrize(
    ("labels", "number", "heads", "weights"),
    [
        (None, 1, ("score",), (1.0,)),
        ({"0": "LABEL_0"}, 1, ("score",), (1.0,)),
        ({"0": "LABEL_12"}, 1, ("score",), (1.0,)),
        ({"0": "good: yes"}, 1, ("good_yes",), (1.0,)),
        ({"0": "MY_LABEL_0"}, 1, ("MY_LABEL_0",), (1.0,)),
        (None, 2, ("LABEL_0", "LABEL_1"), None),
        ({"0": "help", "1": "not harm"}, 2, ("help", "not_harm"), None),
    ],
)
def test_labels_of_a_classifier_name_its_heads(
    labels: dict[str, str] | None, number: int, heads: tuple[str, ...], weights: tuple[float, ...] | None
) -> None:
    spec = spec_of_classifier({"id2label": labels}, number)
    assert (spec.heads, spec.weights) == (heads, weights)
    assert spec.is_classifier
    if labels is None:
        assert spec_of_classifier({}, number) == spec
