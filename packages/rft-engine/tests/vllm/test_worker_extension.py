"""What vLLM's workers do for the engine: draws of a call, tensors in place, adapters, and matrices packed again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_engine.vllm import worker_extension
from rft_engine.vllm.cuda_ipc import encode_update
from rft_engine.vllm.keyed_sampler import DrawnTokens, KeyedSampler
from rft_engine.vllm.worker_extension import VllmWorkerExtension, repack_tied
from rft_engine.weight_sync.fingerprints import element_digest, fingerprint_of
from rft_engine.weight_sync.weight_file import write_weight_file

TENSORS = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
OPTIONS = SamplingOptions(temperature=0.5, max_new_tokens=4, stop_token_ids=(0,))


class Sampler(KeyedSampler):
    """Keeps what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def begin(self, *given: Any) -> None:
        self.asked.append(given)

    def take(self, *given: Any) -> list[DrawnTokens]:
        self.asked.append(given)
        return [DrawnTokens([1, 2], [-1.0, -2.0], [0.0, -0.5])]


class Worker(VllmWorkerExtension):
    """A worker of vLLM that keeps what it is given."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.sampler, self.log = Sampler(), list[Any]()
        self.model_config = SimpleNamespace(dtype=torch.bfloat16, get_vocab_size=lambda: 7)
        model = SimpleNamespace(modules=lambda: (self.log.append("modules"), [])[1], named_parameters=TENSORS.items)
        batch = SimpleNamespace(logitsprocs=SimpleNamespace(all=[object(), self.sampler, object()]))
        self.model_runner = SimpleNamespace(get_model=lambda: model, input_batch=batch)

    def reload_weights(self, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        self.log.append({name: tensor.tolist() for name, tensor in weights_iterator})

    def add_lora(self, request: Any) -> None:
        self.log.append(request)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.log.append(update_info)


def test_a_call_begins_with_its_options_keys_and_tree_and_gives_its_draws() -> None:
    worker, trie = Worker(), TokenTrie.of([[1, 2], [3]])
    worker.rft_begin(asdict(OPTIONS), [5, 6])
    worker.rft_begin(asdict(OPTIONS), [5], trie.as_lists())
    first, second = worker.sampler.asked
    assert first == (OPTIONS, [5, 6], 7, worker.device, None)
    assert second[:4] == (OPTIONS, [5], 7, worker.device)
    assert second[4].as_lists() == trie.as_lists()
    drawn = {"token_ids": [1, 2], "logprobs": [-1.0, -2.0], "log_kept_mass": [0.0, -0.5]}
    assert worker.rft_pop_samples([3], [2]) == [drawn]
    assert worker.sampler.asked[-1] == ([3], [2])


def test_every_load_of_tensors_packs_again_what_is_tied(tmp_path: Path) -> None:
    worker = Worker()
    values = {name: tensor.tolist() for name, tensor in TENSORS.items()}
    worker.rft_load_tensors(iter(TENSORS.items()))
    assert worker.log == [values, "modules"]
    write_weight_file(tmp_path / "file", TENSORS.items())
    assert worker.rft_load_file(str(tmp_path / "file")) == fingerprint_of(TENSORS.items(), torch.bfloat16)
    assert worker.log == [values, "modules"] * 2
    update = {"names": ["a"], "ipc_handles": [{"GPU-0": (torch.Tensor, (3,))}]}
    worker.rft_update_weights(encode_update(update))
    assert worker.log[-1] == update
    assert worker.rft_fingerprints({"a": [3], "c": [1]}) == {"a": element_digest(TENSORS["a"], [3], torch.bfloat16)}


def test_adapters_of_a_folder_are_added_and_their_digests_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_extension, "adapter_request", lambda folder, *, replaces: (folder, replaces))
    write_weight_file(tmp_path / "adapter_model.safetensors", TENSORS.items())
    worker = Worker()
    assert worker.rft_load_adapter(str(tmp_path)) == fingerprint_of(TENSORS.items(), torch.float32)
    assert worker.log == [(str(tmp_path), True)]


class Module(SimpleNamespace):
    """A module with a weight; `packed` counts how often it was packed again."""

    packed = 0


def module_of(weight: torch.Tensor, *, is_packed: bool = True) -> Module:
    def pack(module: Module) -> None:
        module.packed += 1

    packing: Callable[[Module], None] = pack
    made = Module(weight=weight, quant_method=SimpleNamespace(process_weights_after_loading=packing))
    if is_packed:
        made.cpu_linear = None
    return made


def test_modules_that_have_packed_one_matrix_between_them_are_packed_again() -> None:
    tied, other, empty = torch.ones(2), torch.ones(2), torch.zeros(0)
    modules = [
        module_of(tied),
        module_of(other),
        module_of(tied),
        module_of(tied, is_packed=False),
        module_of(empty),
        module_of(empty),
        Module(),
    ]
    assert repack_tied(SimpleNamespace(modules=lambda: modules)) == 2
    assert [module.packed for module in modules] == [1, 0, 1, 0, 0, 0, 0]
