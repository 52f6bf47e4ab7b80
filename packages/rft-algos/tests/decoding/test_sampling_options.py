"""The one record of sampling options: its limits, derived options, and the way through JSON."""

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import OptionsError

OPTIONS = SamplingOptions(temperature=1.0, max_new_tokens=4, stop_token_ids=(2, 3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": math.inf}, "temperature = inf"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"first_token_temperature": 0.0}, "first_token_temperature = 0.0"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"top_k": -2}, "top_k = -2"),
        ({"min_p": 1.5}, "min_p = 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"min_new_tokens": 5}, "min_new_tokens = 5"),
    ],
)
def test_a_value_out_of_its_range_is_refused_also_in_derived_options(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message) as caught:
        replace(OPTIONS, **given)
    assert caught.value.problem.code == "engine.sampling_option"
    assert caught.value.problem.do


@pytest.mark.parametrize(
    "given", [{"temperature": 0.0}, {"top_k": -1}, {"min_p": 1.0}, {"min_new_tokens": 4}, {"top_p": 1e-9}]
)
def test_the_ends_of_the_ranges_are_allowed(given: dict[str, Any]) -> None:
    assert asdict(replace(OPTIONS, **given)) == asdict(OPTIONS) | given


def test_the_first_token_has_its_own_temperature_where_there_is_one() -> None:
    assert OPTIONS.for_first_token is OPTIONS
    hot = replace(OPTIONS, first_token_temperature=9.0)
    assert hot.for_first_token == replace(hot, temperature=9.0)


def test_options_are_the_same_after_json() -> None:
    assert SamplingOptions.from_fields(json.loads(json.dumps(asdict(OPTIONS)))) == OPTIONS


def test_stop_tokens_are_tokens_of_the_model_and_not_all_of_them() -> None:
    OPTIONS.check_vocabulary(4)
    with pytest.raises(OptionsError, match="token 3") as caught:
        OPTIONS.check_vocabulary(3)
    assert caught.value.problem.code == "engine.sampling_option"
    assert caught.value.problem.do == "stop_token_ids=(2,)"
    every = replace(OPTIONS, stop_token_ids=(0, 1), min_new_tokens=1)
    with pytest.raises(OptionsError) as caught:
        every.check_vocabulary(2)
    assert caught.value.problem.code == "engine.sampling_option"
    # where the first token may stop, all of them may
    replace(every, min_new_tokens=0).check_vocabulary(2)
