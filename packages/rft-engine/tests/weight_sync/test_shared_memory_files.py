"""Files of a weight store: their names and sizes, what is written into them, and when each goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_engine.weight_sync import shared_memory
from rft_engine.weight_sync.fingerprints import element_digest
from rft_engine.weight_sync.shared_memory import SharedWeightStore

WEIGHT = torch.nn.Parameter(torch.arange(6.0))
COUNT = torch.tensor([7])


def provider() -> Iterator[tuple[str, Tensor]]:
    yield "w", WEIGHT
    yield "n", COUNT


class Calls:
    """Everything that a store asks of its module's other names."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        write = shared_memory.write_weight_file

        def own(name: str, num_bytes: int) -> Path:
            self.log.append(("path", name.split("-")[0], name.split("-")[2:], num_bytes))
            return folder / f"{len(list(folder.iterdir()))}-{name}"

        def written(path: Path, tensors: Any, expected_tensors: int) -> int:
            self.log.append(("write", expected_tensors))
            return write(path, tensors, expected_tensors)

        monkeypatch.setattr(shared_memory, "own_path", own)
        monkeypatch.setattr(shared_memory, "write_weight_file", written)
        monkeypatch.setattr(shared_memory, "remove_empty_folders", lambda: self.log.append("empty"))
        monkeypatch.setattr(shared_memory.atexit, "register", lambda call: self.log.append(("register", call)))
        monkeypatch.setattr(shared_memory.atexit, "unregister", lambda call: self.log.append(("unregister", call)))

    def taken(self) -> list[Any]:
        found, self.log = self.log, []
        return found


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(tmp_path, monkeypatch)


def test_each_version_has_a_file_of_its_own_until_it_is_dropped(calls: Calls, tmp_path: Path) -> None:
    store = SharedWeightStore(provider, torch.bfloat16, num_bytes=100)
    assert calls.taken() == [("register", store.close)]
    first = store.put(4)
    assert calls.taken() == [("path", "weights", ["4", "1"], 200), ("write", 1000)]
    found = dict(first.tensors())
    assert torch.equal(found["w"], WEIGHT.detach().to(torch.bfloat16))
    assert torch.equal(found["n"], COUNT)
    assert first.digests == {name: element_digest(tensor, tensor.shape, tensor.dtype) for name, tensor in found.items()}
    assert (first.version, first.num_bytes) == (4, 6 * 2 + 8)
    again = store.put(4)
    assert calls.taken() == [("path", "weights", ["4", "2"], 40), ("write", 4)]
    assert not first.path.exists(), "replaced"
    assert store.get(4) is again
    later = [store.put(version) for version in (7, 5, 6)]
    assert store.versions == [4, 5, 6, 7]
    store.drop_below(6)
    assert store.versions == [6, 7]
    assert [one.path.exists() for one in (again, *later)] == [False, True, False, True]
    with pytest.raises(AssertionError):
        store.get(5)
    calls.taken()
    store.close()
    store.close()
    assert calls.taken() == [("unregister", store.close), "empty"] * 2
    assert (list(tmp_path.iterdir()), store.versions) == ([], [])


def test_a_copy_that_breaks_off_leaves_no_file_and_the_version_as_it_was(calls: Calls, tmp_path: Path) -> None:
    def breaks() -> Iterator[tuple[str, Tensor]]:
        yield "w", WEIGHT
        if len(list(tmp_path.iterdir())) > 1:
            raise OSError("a rank is gone")

    store = SharedWeightStore(breaks, torch.float32, num_bytes=100)
    kept = store.put(1)
    with pytest.raises(OSError, match="a rank is gone"):
        store.put(1)
    assert list(tmp_path.iterdir()) == [kept.path]
    assert store.get(1) is kept
    store.close()


def test_a_copy_is_made_while_all_ranks_make_theirs(calls: Calls) -> None:
    def together(call: Callable[[], None]) -> None:
        calls.log.append("begin")
        call()
        calls.log.append("end")

    store = SharedWeightStore(provider, torch.float32, num_bytes=100, together=together)
    calls.taken()
    store.put(1)
    assert [entry if isinstance(entry, str) else entry[0] for entry in calls.taken()] == [
        "path",
        "begin",
        "write",
        "end",
    ]
    store.close()
