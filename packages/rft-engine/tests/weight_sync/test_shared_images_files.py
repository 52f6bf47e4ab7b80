"""Files of images: made with the first one, named and sized by what they hold, and deleted with their store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import ServiceError
from rft_engine.testing.replica_worker import FakeMedia
from rft_engine.weight_sync import shared_images
from rft_engine.weight_sync.shared_images import ReceivedMedia, SharedImageStore


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a store asks of its module's other names."""
    calls: list[Any] = []
    write = shared_images.write_weight_file

    def own(name: str, num_bytes: int) -> Path:
        calls.append(("path", name.split("-")[0], name.split("-")[2:], num_bytes))
        return tmp_path / name

    def written(path: Path, tensors: Any, expected_tensors: int) -> int:
        [(name, tensor)] = tensors
        calls.append(("write", name, tensor.tolist(), expected_tensors))
        num = write(path, tensors, expected_tensors)
        if tensor[0] > 4.0:
            raise OSError("full")
        return num

    monkeypatch.setattr(shared_images, "own_path", own)
    monkeypatch.setattr(shared_images, "write_weight_file", written)
    monkeypatch.setattr(shared_images, "remove_empty_folders", lambda: calls.append("empty"))
    monkeypatch.setattr(shared_images.atexit, "register", lambda call: calls.append(("register", call)))
    monkeypatch.setattr(shared_images.atexit, "unregister", lambda call: calls.append(("unregister", call)))
    return calls


def test_each_new_image_is_written_once(log: list[Any], tmp_path: Path) -> None:
    store = SharedImageStore()
    assert store.hold([]) == []
    assert log == []
    store.hold([FakeMedia.of(3)])
    assert log == [
        ("register", store.close),
        ("path", "images", ["1"], 16),
        ("write", "pixel_values", [1.5, 1.5], 1),
    ]
    log.clear()
    store.hold([FakeMedia.of(3), FakeMedia.of(2, 3)])
    assert log == [("path", "images", ["2"], 16), ("write", "pixel_values", [1.0, 1.0], 1)]
    assert (store.num_images, len(list(tmp_path.iterdir()))) == (2, 2)
    log.clear()
    store.close()
    store.close()
    assert log == [("unregister", store.close), "empty"] * 2
    assert (store.num_images, list(tmp_path.iterdir())) == (0, [])


def test_an_image_that_does_not_fit_leaves_no_file(log: list[Any], tmp_path: Path) -> None:
    store = SharedImageStore()
    store.hold([FakeMedia.of(3)])
    [kept] = tmp_path.iterdir()
    with pytest.raises(OSError, match="full"):
        store.hold([FakeMedia.of(3), FakeMedia.of(9)])
    assert list(tmp_path.iterdir()) == [kept]
    store.close()


def test_a_model_without_images_takes_calls_without_images_alone() -> None:
    received = ReceivedMedia(None)
    assert received.of_call([]) == []
    with pytest.raises(ServiceError) as caught:
        received.of_call([{"images": [], "spans": []}])
    assert caught.value.problem.code == "engine.replica.no_images"
