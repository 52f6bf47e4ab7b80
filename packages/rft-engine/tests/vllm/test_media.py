"""Images of prompts on their way to vLLM, as plain data."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rft_core.errors import ServiceError
from rft_engine.vllm.media import check_expanded, plain_media, request_of, takes_images


class Media:
    """One placeholder for each run of 9."""

    files = (b"first", b"second")
    processor_options: ClassVar = {"max_pixels": 7}

    def collapsed(self, prompt: Any) -> list[int]:
        return [token for number, token in enumerate(prompt) if token != 9 or prompt[number - 1] != 9]


def test_prompts_without_images_have_no_list() -> None:
    assert plain_media([[1]], None) == []
    assert plain_media([[1], [2]], [None, None]) == []


def test_a_prompt_with_images_is_collapsed_and_its_files_are_text() -> None:
    none, one = plain_media([[1], [1, 9, 9, 2]], [None, Media()])
    assert none is None
    assert one is not None
    assert one["token_ids"] == [1, 9, 2]
    assert [base64.b64decode(file) for file in one["files"]] == [b"first", b"second"]
    assert one["options"] == {"max_pixels": 7}
    with pytest.raises(ValueError, match="zip"):
        plain_media([[1]], [Media(), Media()])


def test_a_request_holds_the_decoded_images_and_options_where_there_are_some() -> None:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("L", (3, 2), 255).save(file, "PNG")
    plain = {"token_ids": (1, 9), "files": [base64.b64encode(file.getvalue()).decode()], "options": {}}
    assert request_of([1, 2], None) == {"prompt_token_ids": [1, 2]}
    request = request_of([1, 9, 9], plain)
    assert request["prompt_token_ids"] == [1, 9]
    [decoded] = request["multi_modal_data"]["image"]
    assert (decoded.mode, decoded.size) == ("RGB", (3, 2))
    assert "mm_processor_kwargs" not in request
    assert request_of([1], plain | {"options": {"a": 1}})["mm_processor_kwargs"] == {"a": 1}


@pytest.mark.parametrize(
    ("read", "place"), [([1, 2, 4], 2), ([5, 2, 3], 0), ([1, 2], 2), ([], 0), ([1, 2, 3, 4], 3), ([1, 5, 6, 7], 1)]
)
def test_a_prompt_that_was_read_otherwise_is_refused_with_the_first_place(read: list[int], place: int) -> None:
    with pytest.raises(ServiceError) as caught:
        check_expanded(4, (1, 2, 3), read)
    assert caught.value.problem.code == "engine.vllm.placeholders"
    assert caught.value.problem.what.startswith("sample 4: ")
    assert caught.value.problem.what.endswith(f"differ at {place}")


def test_a_prompt_that_was_read_as_it_is_meant_passes() -> None:
    meant, read = (1, 2, 3), [1, 2, 3]
    check_expanded(0, meant, read)
    assert (meant, read) == ((1, 2, 3), [1, 2, 3]), "the prompt that is drawn from is left as it is"


@pytest.mark.parametrize("vision", [True, False])
def test_a_model_takes_images_where_its_configuration_has_a_tower(vision: bool) -> None:
    config = {"vision_config": {}} if vision else {"model_type": "llama"}
    settings: Any = SimpleNamespace(config=lambda: config)
    assert takes_images(settings) is vision
