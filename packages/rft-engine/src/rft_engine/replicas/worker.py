"""A replica's own process: a model, an in-process engine on it, and the answers to one request a line.

`rft.replica_main` gives `serve_replica` the function that makes the model; this module knows no
architecture. While it draws, the worker sends a sign of life at least once a segment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.child_process import ParentPipes
from rft_core.errors import ServiceError
from rft_engine.engine_base import EngineFacts
from rft_engine.lifecycle import EngineState
from rft_engine.native.partial_requests import SampleRequests
from rft_engine.native.resumable_batch import ResumableEngine
from rft_engine.process.server import RequestWorker, serve_with
from rft_engine.replicas.interrupt_flag import InterruptFlag
from rft_engine.weight_sync.fingerprints import Fingerprint, element_digest
from rft_engine.weight_sync.shared_images import MakeMedia, PlainMedia, ReceivedMedia, SharedImage
from rft_engine.weight_sync.weight_errors import incomplete_error
from rft_engine.weight_sync.weight_file import read_weight_file

_SIGN_OF_LIFE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """Model of a replica: decoder, tensors, device."""

    decoder: Any
    """A `DecodableModel` on the tensors below."""
    tensors: Mapping[str, Tensor]
    """Written in place by every load, by the names of the policy's tensors."""
    dtype: str
    device: str
    make_media: MakeMedia | None = None
    """For a model that takes images."""


class LocalReplica:
    """Model and in-process engine of a replica's process."""

    def __init__(self, model: ReplicaModel, max_rows: int, max_len: int) -> None:
        self._model = model
        self.engine: ResumableEngine[Any] = ResumableEngine(
            model.decoder, max_rows=max_rows, max_len=max_len, device=model.device
        )
        self.media = ReceivedMedia(model.make_media)
        self.facts = EngineFacts(model.dtype, model.decoder.vocab_size, model.device == "cpu", "file")

    @torch.no_grad()
    def load(self, path: str, version: int) -> Fingerprint:
        """Copy every tensor of a file into the model; return the digests of the tensors held then.

        Raises:
            ServiceError: the file's tensors are not the model's.
        """
        loaded, current = read_weight_file(path), self._model.tensors
        differing = sorted(loaded.keys() ^ current.keys())
        # checked before the first copy: tensors are overwritten in place
        differing += [name for name in current if name in loaded and loaded[name].shape != current[name].shape]
        if differing:
            raise _other_tensors(differing)
        for name, tensor in current.items():
            tensor.copy_(loaded[name])
        if self.engine.state is EngineState.READY:  # keys and values of other weights go
            self.engine.sleep(1)
            self.engine.wake()
        # the same version comes again after a restart or a refresh, and is no step back
        if version > self.engine.weight_version:
            self.engine.load_weights(version)
        else:
            self.engine.refresh()
        # of what the model holds now, not of what the file had
        return {name: element_digest(tensor, tensor.shape, tensor.dtype) for name, tensor in current.items()}


class ReplicaWorker(RequestWorker):
    """Answers requests with the replica that its first request makes."""

    def __init__(self, pipes: ParentPipes, make_model: Callable[[dict[str, Any]], ReplicaModel]) -> None:
        super().__init__(pipes)
        self._make_model = make_model
        self._replica: LocalReplica | None = None
        self._flag: InterruptFlag | None = None

    def do_start(self, model: dict[str, Any], max_rows: int, max_len: int, flag: str) -> dict[str, Any]:
        self._flag = InterruptFlag(flag)
        self._replica = LocalReplica(self._make_model(model), max_rows, max_len)
        return asdict(self._replica.facts)

    def do_load(self, path: str, version: int) -> Fingerprint:
        return self.replica.load(path, version)

    def do_draw(
        self,
        number: int,
        options: dict[str, Any],
        shown: Sequence[PlainMedia] = (),
        constraint: dict[str, Any] | None = None,
        **lists: Sequence[Any],
    ) -> dict[str, Any]:
        """Every request's result as an item, between them signs of life; replies with figures."""
        images = [SharedImage(media) for media in self.replica.media.of_call(shown)]
        trie = None if constraint is None else TokenTrie.from_lists(constraint)
        call = SampleRequests(options=SamplingOptions.from_fields(options), shown=images, constraint=trie, **lists)
        flag = self._flag
        assert flag is not None
        last = time.monotonic()

        def interrupted() -> bool:
            nonlocal last
            # the engine asks after every step, which makes this the place for signs of life
            if time.monotonic() - last > _SIGN_OF_LIFE_SECONDS:
                self._write({"item": None})
                last = time.monotonic()
            return flag.reached(number)

        for drawn in self.replica.engine.draw(call, interrupted):
            self._write({"item": drawn})
        return asdict(self.replica.engine.stats())

    def do_sleep(self, level: int) -> None:
        self.replica.engine.sleep(level)

    def do_wake(self) -> None:
        self.replica.engine.wake()

    @property
    def replica(self) -> LocalReplica:
        assert self._replica is not None, "start comes first"
        return self._replica


def serve_replica(read_fd: int, write_fd: int, make_model: Callable[[dict[str, Any]], ReplicaModel]) -> None:
    """Answer until the other side closes its pipe."""
    serve_with(read_fd, write_fd, lambda pipes: ReplicaWorker(pipes, make_model))


def named(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors by name, those without gradient that a load may write."""
    return {name: tensor.detach() for name, tensor in tensors}


def _other_tensors(names: Sequence[str]) -> ServiceError:
    return incomplete_error(
        names,
        model="the replica's model",
        where="load of an engine replica",
        why="every tensor is written in place, so names and shapes must agree on both sides",
        state="the replica refuses to generate until a load succeeds",
        do="--engine_replicas 1 --max_staleness 0: the engine in this process shares the weights being trained",
    )
