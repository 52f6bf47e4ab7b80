"""The model of a replica: what it is loaded with, that it is frozen, and the images that it is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rft import replica_main
from rft_core.errors import ServiceError
from rft_models.vision.media import ImageInputs

SETTINGS: dict[str, Any] = {
    "model_dir": "dir",
    "dtype": "bfloat16",
    "device": "meta",
    "flash_attn": True,
    "model_code": "code.py",
    "graphs": False,
    "num_threads": 3,
    "gives_way": False,
}


@pytest.mark.parametrize("threads", ["5", None])
@pytest.mark.parametrize("gives_way", [True, False])
def test_a_model_is_loaded_with_its_settings_and_frozen(
    calls: Any, monkeypatch: pytest.MonkeyPatch, threads: str | None, gives_way: bool
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    weight = torch.nn.Parameter(torch.zeros(1))
    policy = calls.double("policy", named_parameters=lambda: [("w", weight)])
    calls.put(replica_main, "give_way repeat_exactly load_model_code decoder_for", load_policy=policy)
    calls.replace(replica_main, named=lambda pairs: dict(pairs))
    monkeypatch.setattr(torch, "set_num_threads", calls.double("set_num_threads"))
    model = replica_main.make_model(SETTINGS | {"gives_way": gives_way})
    assert calls.taken() == [
        *([] if threads else ["set_num_threads(3)"]),
        *(["give_way()"] if gives_way else []),
        "repeat_exactly('meta')",
        "load_model_code('code.py')",
        "load_policy('dir', device='meta', dtype=torch.bfloat16, flash_attn=True)",
        "decoder_for(policy, graphs=False)",
    ]
    assert not weight.requires_grad
    given: Any = [getattr(model, name) for name in model.__slots__]
    assert given == ["decoder_for()", {"w": weight}, "bfloat16", "meta", replica_main.received_media]


def test_images_are_those_that_were_sent() -> None:
    pixels = torch.arange(12.0).reshape(3, 4)
    sent = [ImageInputs.of(pixels, (1, 2, 2), 5), ImageInputs.of(pixels, None, 4)]
    plain = [
        {"grid": [1, 2, 2], "num_tokens": 5, "digest": sent[0].digest, "path": "a"},
        {"grid": None, "num_tokens": 4, "digest": sent[1].digest, "path": "b"},
    ]
    whole: dict[str, Any] = {"images": plain, "spans": [[3, 5], [9, 4]], "image_token_id": 7}
    media = replica_main.received_media(whole, [pixels, pixels])
    assert [image.digest for image in media.images] == [image.digest for image in sent]
    assert [image.num_tokens for image in media.images] == [5, 4]
    assert (media.spans, media.image_token_id) == (((3, 5), (9, 4)), 7)
    plain[0]["digest"] = "0" * 64
    with pytest.raises(ServiceError) as caught:
        replica_main.received_media(whole, [pixels, pixels])
    assert caught.value.problem.code == "engine.replica.image_damaged"
