"""A double of vLLM that keeps its protocol: requests, persistent batch, logits processors, workers, sleep.

The model is a few tensors and every one of them moves the logits. Rows enter, leave, move and swap
as in vLLM's batch; long prompts are read in two steps, the first of which draws in vain; a CPU's
output head multiplies with a packed copy. `faults` plants what goes wrong in the field.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rft_engine.vllm.keyed_sampler import KeyedSampler
from rft_engine.vllm.worker_extension import VllmWorkerExtension
from rft_engine.weight_sync.weight_file import read_weight_file, write_weight_file

VOCAB, HIDDEN, PADDING = 11, 8, 5
IMAGE_TOKEN = 10
_EMBEDDING, _NORM = "model.embed_tokens.weight", "model.norm.weight"
_PARTS = ("q_proj", "k_proj", "v_proj")
_ATTENTION = "model.layers.0.self_attn."
_CHUNK_TOKENS = 6


class _Direction(Enum):
    UNIDIRECTIONAL = 1
    SWAP = 2


def fake_tensors(seed: int) -> dict[str, Tensor]:
    """Weights by checkpoint name; the output matrix is the embedding."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {_EMBEDDING: torch.randn(VOCAB, HIDDEN, generator=generator)}
    for part in _PARTS:
        tensors[f"{_ATTENTION}{part}.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator) / 3
    tensors[_NORM] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    return tensors


def write_fake_model(directory: Path, seed: int = 0, **config: Any) -> Path:
    """A model directory for the double, with `fake_tensors(seed)` as the weights of version 0."""
    directory.mkdir(parents=True, exist_ok=True)
    facts = {"vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    facts |= {"tie_word_embeddings": True, "dtype": "float32", **config}
    (directory / "config.json").write_text(json.dumps(facts))
    write_weight_file(directory / "model.safetensors", fake_tensors(seed).items(), 8)
    return directory


def fake_logits(tensors: Mapping[str, Tensor], tokens: Sequence[int], head_VH: Tensor | None = None) -> Tensor:
    """[V]: what the double's model says after `tokens`; the whole history counts."""
    state_H = torch.zeros(HIDDEN)
    for token in tokens:
        state_H = 0.7 * state_H + tensors[_EMBEDDING][token]
    mixed_H = torch.zeros(HIDDEN)
    for number, part in enumerate(_PARTS, 1):
        mixed_H = mixed_H + number * (tensors[f"{_ATTENTION}{part}.weight"] @ state_H)
    head = tensors[_EMBEDDING] if head_VH is None else head_VH
    return head @ (mixed_H.tanh() * tensors[_NORM])


class FakeModule(SimpleNamespace):
    """Embedding or output head: a weight, and the packed copy that a CPU multiplies with."""

    def pack(self) -> None:
        self.cpu_linear = self.weight.clone()


class FakeModel:
    """Parameters as vLLM lays them out: a padded vocabulary, one fused matrix for q, k and v."""

    def __init__(self, tensors: Mapping[str, Tensor], packs_head: bool) -> None:
        self.packed_modules_mapping = {"qkv_proj": list(_PARTS)}
        self._embedding = torch.zeros(VOCAB + PADDING, HIDDEN)
        self._fused = torch.zeros(3 * HIDDEN, HIDDEN)
        self._norm = torch.zeros(HIDDEN)
        method = SimpleNamespace(process_weights_after_loading=FakeModule.pack)
        self.embed_tokens = FakeModule(weight=self._embedding, quant_method=method)
        self.head = FakeModule(weight=self._embedding, quant_method=method)
        self._packs_head = packs_head
        self.load(tensors.items())
        if packs_head:
            self.head.pack()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield _EMBEDDING, self._embedding
        yield f"{_ATTENTION}qkv_proj.weight", self._fused
        yield _NORM, self._norm

    def modules(self) -> list[FakeModule]:
        return [self.embed_tokens, self.head]

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy by name. Like vLLM 0.32 on a CPU it packs the embedding again, and not the head."""
        for name, tensor in tensors:
            self.view(name).copy_(tensor)
        if self._packs_head:
            self.embed_tokens.pack()

    def view(self, name: str) -> Tensor:
        if name == _EMBEDDING:
            return self._embedding[:VOCAB]
        if name == _NORM:
            return self._norm
        first = HIDDEN * next(number for number, part in enumerate(_PARTS) if part in name)
        return self._fused[first : first + HIDDEN]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        names = [_EMBEDDING, _NORM, *(f"{_ATTENTION}{part}.weight" for part in _PARTS)]
        head = self.head.cpu_linear[:VOCAB] if self._packs_head else None
        return fake_logits({name: self.view(name) for name in names}, tokens, head)


class FakeWorker(VllmWorkerExtension):
    """A worker with the extension mixed in, as vLLM does it."""

    def __init__(self, arguments: Mapping[str, Any], is_cpu: bool, faults: set[str], rank: int) -> None:
        self.device = torch.device("cpu")
        self.faults, self.rank = faults, rank
        [file] = Path(arguments["model"]).glob("*.safetensors")
        self.model = FakeModel(read_weight_file(file), is_cpu)
        dtype = getattr(torch, arguments["dtype"])
        self.model_config = SimpleNamespace(dtype=dtype, get_vocab_size=lambda: VOCAB)
        processors = SimpleNamespace(all=[KeyedSampler()])
        batch = SimpleNamespace(logitsprocs=processors)
        self.model_runner = SimpleNamespace(get_model=lambda: self.model, input_batch=batch)
        self.transfers: list[str] = []
        self.missing: set[str] = set()
        self.adapters: dict[str, Tensor] = {}

    def reload_weights(self, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        if "weights" in self.missing:
            raise RuntimeError("weights are loaded into memory that was given back")
        tensors = list(weights_iterator)
        old = {name: self.model.view(name).clone() for name, _ in tensors}
        if "skip" in self.faults or ("replica" in self.faults and self.rank == 1):
            return
        if "half" in self.faults:
            tensors = tensors[: len(tensors) // 2]
        if "tied" in self.faults:
            tensors = [(name, tensor) for name, tensor in tensors if name != _EMBEDDING]
        self.model.load(tensors)
        if "overwritten" in self.faults:
            self.model.load(old.items())

    def add_lora(self, request: Any) -> bool:
        """Takes the adapters in the place of those before."""
        self.adapters = dict(read_weight_file(Path(request.folder) / "adapter_model.safetensors"))
        return True

    def rft_adapter_request(self, folder: str) -> Any:
        if "other_adapter" in self.faults:
            file = Path(folder) / "adapter_model.safetensors"
            changed = [(name, tensor + 1) for name, tensor in read_weight_file(file).items()]
            write_weight_file(file, changed, len(changed))
        return SimpleNamespace(folder=folder)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.transfers.append(f"init {sorted(init_info)}")

    def start_weight_update(self) -> None:
        self.transfers.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.transfers.append("update")
        received: list[tuple[str, Tensor]] = []
        for name, handle in zip(update_info["names"], update_info["ipc_handles"], strict=True):
            kind, shape, dtype, content = handle["GPU-0"]
            assert kind is torch.Tensor
            received.append((name, torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)))
        self.reload_weights(received)

    def finish_weight_update(self) -> None:
        self.transfers.append("finish")


class _Request:
    def __init__(self, name: str, prompt: list[int], params: Any) -> None:
        self.name, self.prompt, self.params = name, prompt, params
        self.output: list[int] = []
        self.num_read = 0
        self.num_cached = 0


class FakeEngine:
    """`llm_engine`: a persistent batch of at most `max_num_seqs` rows."""

    def __init__(self, workers: list[FakeWorker], max_rows: int, faults: set[str], die_after: int | None) -> None:
        self.model_config = workers[0].model_config
        self._workers, self._max_rows, self._faults, self._die_after = workers, max_rows, faults, die_after
        self._waiting: deque[_Request] = deque()
        self._rows: list[_Request] = []
        self._gone: list[int] = []
        self.prefixes: dict[tuple[int, ...], Tensor] = {}
        self.num_steps = 0
        self.num_encoder_resets = 0
        self.images: list[Any] = []
        self.adapters_asked: list[Any] = []
        self.processor_options: list[Any] = []
        self._num_finished = 0

    def add_request(self, request_id: str, prompt: Any, params: Any, *, lora_request: Any = None) -> str:
        self.adapters_asked.append(lora_request)
        tokens, images = list(prompt["prompt_token_ids"]), prompt.get("multi_modal_data", {}).get("image", [])
        self.images += images
        self.processor_options += [prompt["mm_processor_kwargs"]] if "mm_processor_kwargs" in prompt else []
        places = [at for at, token in enumerate(tokens) if token == IMAGE_TOKEN]
        for at, image in zip(reversed(places), reversed(images), strict=bool(images)):
            # as many placeholders as it has columns of pixels
            tokens[at:at] = [IMAGE_TOKEN] * (image.width - 1 - int("one_too_few" in self._faults))
        self._waiting.append(_Request(request_id, tokens, params))
        return request_id

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        return len(self._waiting) + len(self._rows) - len(self._gone)

    def abort_request(self, request_ids: list[str]) -> None:
        self._waiting = deque(request for request in self._waiting if request.name not in request_ids)
        self._gone = [i for i, row in enumerate(self._rows) if row.name in request_ids or i in self._gone]

    def reset_encoder_cache(self) -> None:
        self.num_encoder_resets += 1

    def step(self) -> list[Any]:
        if self._workers[0].missing:
            raise RuntimeError(f"a step while {self._workers[0].missing} are asleep")
        self.num_steps += 1
        time.sleep(1000.0 if "hang" in self._faults else 0.0)
        update = self._change_batch()
        logits_BV = torch.stack([self._logits(row) for row in self._rows])
        for worker in self._workers:
            worker.rft_sampler().update_state(update)
        logits_BV = self._workers[0].rft_sampler().apply(logits_BV)
        finished: list[Any] = []
        for index, row in enumerate(self._rows):
            if row.num_read < len(row.prompt):
                row.num_read += _CHUNK_TOKENS
                if row.num_read < len(row.prompt):
                    continue  # the rest of the prompt comes first: this draw is thrown away
            token = int(logits_BV[index].argmax())
            row.output.append((token + 1) % VOCAB if "wrong_token" in self._faults else token)
            if token in row.params.stop_token_ids or len(row.output) == row.params.max_tokens:
                finished.append(self._output(row))
                self._gone.append(index)
        return finished

    def _change_batch(self) -> Any | None:
        """Take finished rows out, fill their places from behind or with new ones, now and then swap two."""
        removed, added, moved = sorted(self._gone, reverse=True), list[Any](), list[Any]()
        holes = sorted(self._gone)
        self._gone = []
        while self._waiting and (holes or len(self._rows) < self._max_rows):
            request = self._waiting.popleft()
            if holes:
                index = holes.pop(0)
                self._rows[index] = request
            else:
                index = len(self._rows)
                self._rows.append(request)
            added.append((index, request.params, request.prompt, request.output))
        while holes:
            last = len(self._rows) - 1
            if holes[-1] == last:
                holes.pop()
            else:
                self._rows[holes[0]] = self._rows[last]
                moved.append((last, holes.pop(0), _Direction.UNIDIRECTIONAL))
            self._rows.pop()
        removed = [index for index in removed if all(index != place for place, *_ in added)]
        if self.num_steps % 3 == 0 and len(self._rows) > 1:
            self._rows[0], self._rows[-1] = self._rows[-1], self._rows[0]
            moved.append((0, len(self._rows) - 1, _Direction.SWAP))
        if not (removed or added or moved):
            return None
        return SimpleNamespace(batch_size=len(self._rows), removed=removed, added=added, moved=moved)

    def _logits(self, row: _Request) -> Tensor:
        if row.output:
            return self._workers[0].model.logits([*row.prompt, *row.output])
        known = self.prefixes.get(tuple(row.prompt))
        row.num_cached = len(row.prompt) - 1 if known is not None else 0
        logits = self._workers[0].model.logits(row.prompt) if known is None else known
        self.prefixes[tuple(row.prompt)] = logits.clone()
        return logits.clone()

    def _output(self, row: _Request) -> Any:
        self._num_finished += 1
        if self._die_after is not None and self._num_finished > self._die_after:
            os.abort()
        reason = "stop" if row.output[-1] in row.params.stop_token_ids else "length"
        sample = SimpleNamespace(token_ids=list(row.output), finish_reason=reason)
        return SimpleNamespace(
            request_id=row.name,
            finished=True,
            prompt_token_ids=row.prompt,
            num_cached_tokens=row.num_cached,
            outputs=[sample],
        )


class FakeLlm:
    """`vllm.LLM`."""

    def __init__(self, arguments: Mapping[str, Any], is_cpu: bool, faults: set[str], die_after: int | None) -> None:
        self.arguments, self._is_cpu, self._faults = dict(arguments), is_cpu, faults
        ranks = range(arguments["tensor_parallel_size"])
        self.workers = [FakeWorker(arguments, is_cpu, faults, rank) for rank in ranks]
        self.llm_engine = FakeEngine(self.workers, arguments["max_num_seqs"], faults, die_after)
        self.calls: list[str] = []
        self._kept: list[dict[str, Tensor]] | None = None

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.workers]

    def reset_prefix_cache(self) -> bool:
        if "keeps_prefix" not in self._faults:
            self.llm_engine.prefixes.clear()
        return "refuses_reset" not in self._faults

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        assert not self._is_cpu, "the CPU build ignores it"
        self.llm_engine.prefixes.clear()
        for worker in self.workers:
            worker.missing = {"weights", "kv_cache"}
            if level == 2:
                for _, parameter in worker.model.named_parameters():
                    parameter.fill_(0.0)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(f"wake {sorted(tags or [])}")
        for worker in self.workers:
            worker.missing -= set(tags or ["weights", "kv_cache"])


class FakeVllm:
    """The runtime: what `InstalledVllm` is for the real one."""

    def __init__(self, *, is_cpu: bool = True, faults: Iterable[str] = (), die_after: int | None = None) -> None:
        """
        Args:
            is_cpu: which build to be.
            faults: "skip", "other_adapter", "half", "tied", "overwritten", "replica", "keeps_prefix", "refuses_reset",
                "wrong_token", "hang"; may be changed later.
            die_after: end the process in the middle of a call, after this many samples.
        """
        self._is_cpu, self.faults, self._die_after = is_cpu, set(faults), die_after
        self.llm: FakeLlm | None = None
        self.is_shut_down = False

    @property
    def is_cpu(self) -> bool:
        return self._is_cpu

    def make_llm(self, arguments: dict[str, Any]) -> FakeLlm:
        self.llm = FakeLlm(arguments, self._is_cpu, self.faults, self._die_after)
        return self.llm

    def make_sampling_params(self, **fields: Any) -> Any:
        return SimpleNamespace(**fields)

    def make_adapter_request(self, folder: str) -> Any:
        return f"adapter in {folder}"

    def shut_down(self, llm: Any) -> None:
        self.is_shut_down = True
