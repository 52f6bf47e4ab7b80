"""Images of prompts on their way to replicas: each once, in shared memory, and beside the right prompt."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_engine.completions import Completion
from rft_engine.engine_base import EngineFacts
from rft_engine.native.engine import NativeEngine
from rft_engine.native.partial_requests import SampledTokens, SampleRequests
from rft_engine.replicas.engine import ReplicaEngine
from rft_engine.replicas.external_engine import ExternalEngineReplica
from rft_engine.replicas.load_balancing import assign_samples
from rft_engine.replicas.process import ProcessReplica, ReplicaLimits
from rft_engine.testing.replica_worker import CARRY, COMMAND, VOCAB, FakeMedia, number_of, table_of
from rft_engine.testing.table_model import FakeDecodableModel
from rft_engine.weight_sync.shared_images import ReceivedMedia, SharedImage, SharedImageStore, distinct
from rft_engine.weight_sync.shared_memory import SharedWeightStore

PROMPTS = [(1, 2), (1, 2), (4,), (1, 2), (5, 6, 1), (1, 2)]
MEDIA = [FakeMedia.of(3), None, FakeMedia.of(1, 4), FakeMedia.of(8), None, FakeMedia.of(3)]
KEYS = [[10 * p + s for s in range(3)] for p in range(len(PROMPTS))]
OPTIONS = SamplingOptions(temperature=1.0, max_new_tokens=30, stop_token_ids=(0,))


def expected(table: Tensor) -> list[list[tuple[int, ...]]]:
    """What one engine in this process draws, which is given the numbers themselves."""
    engine = NativeEngine(FakeDecodableModel(table, carry=CARRY), max_rows=18, max_len=64)
    numbers = [one and one.number for one in MEDIA]
    return tokens_of(engine.generate(PROMPTS, KEYS, OPTIONS, media=numbers))


def tokens_of(completions: Sequence[Sequence[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[one.token_ids for one in group] for group in completions]


def table_provider() -> Iterator[tuple[str, Tensor]]:
    yield "table", table_of(0)


def pool(path: Path, models: Sequence[dict[str, Any]], limits: ReplicaLimits | None = None) -> ReplicaEngine:
    """Started replicas."""
    replicas = [
        ProcessReplica(n, COMMAND, model, max_rows=18, max_len=64, log_path=path / f"{n}.log", limits=limits)
        for n, model in enumerate(models)
    ]
    for replica in replicas:
        replica.ready()
    engine = ReplicaEngine(replicas, SharedWeightStore(table_provider, torch.float32, num_bytes=1000), max_len=64)
    engine.refresh()
    return engine


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaEngine]:
    engine = pool(tmp_path_factory.mktemp("two"), [{"pause": 0.002}, {"pause": 0.002}])
    yield engine
    engine.close()


def test_replicas_draw_after_images_what_one_engine_draws(two: ReplicaEngine) -> None:
    whole = expected(table_of(0))
    assert whole[0] != whole[3], "equal tokens and other images are other prompts"
    assert tokens_of(two.generate(PROMPTS, KEYS, OPTIONS, media=MEDIA)) == whole
    again = tokens_of(two.generate(PROMPTS, KEYS, OPTIONS, media=MEDIA))
    assert again == whole, "also from what is held"
    one = two.generate(PROMPTS[:1], KEYS[:1], OPTIONS)
    assert tokens_of(one)[0] != whole[0], "without its image it is another prompt"


def test_interrupted_samples_see_their_images_again(two: ReplicaEngine) -> None:
    prompts = [prompt for prompt, keys in zip(PROMPTS, KEYS, strict=True) for _ in keys]
    media = [one for one, keys in zip(MEDIA, KEYS, strict=True) for _ in keys]
    keys = [key for group in KEYS for key in group]
    drawn: list[tuple[int, ...]] = [()] * len(keys)
    left, rounds = list(range(len(keys))), 0
    while left:
        rounds += 1
        seen = threading.Event()
        found: list[SampledTokens] = []
        for one in two.draw(
            [(*prompts[i], *drawn[i]) for i in left],
            [keys[i] for i in left],
            [len(drawn[i]) for i in left],
            [30 - len(drawn[i]) for i in left],
            OPTIONS,
            media=[media[i] for i in left],
            stop=seen.is_set,
        ):
            found.append(one)
            if rounds < 3:
                seen.set()
        for one in found:
            drawn[left[one.request]] += one.token_ids
        left = [left[one.request] for one in found if one.finish_reason == "interrupted"]
    assert rounds > 1
    assert drawn == [tokens for group in expected(table_of(0)) for tokens in group]


def test_what_a_dead_replica_had_is_drawn_again_after_the_same_images(tmp_path: Path) -> None:
    bad = {"trouble": "die", "trouble_at": 5, "marker": str(tmp_path / "was"), "pause": 0.01}
    engine = pool(tmp_path, [bad, {"pause": 0.01}])
    try:
        assert tokens_of(engine.generate(PROMPTS, KEYS, OPTIONS, media=MEDIA)) == expected(table_of(0))
        assert engine.counters()["engine/restarts"] == 1
    finally:
        engine.close()


def test_an_image_lies_in_memory_once_and_for_as_long_as_calls_show_it() -> None:
    store = SharedImageStore()
    found, places = distinct([FakeMedia.of(3), None, FakeMedia.of(3, 5), FakeMedia.of(3)])
    assert places == [0, -1, 1, 0]
    plain = store.hold(found)
    assert store.num_images == 2
    paths = {image["digest"]: Path(image["path"]) for one in plain for image in one["images"]}
    assert plain[0]["images"][0]["path"] == plain[1]["images"][0]["path"]
    assert [number_of(one, received) for one, received in zip(plain, _pixels(plain), strict=True)] == [3, 8]
    store.hold(distinct([FakeMedia.of(5)])[0])
    assert [paths[f"digest-{number}"].exists() for number in (3, 5)] == [False, True]
    store.close()
    assert not paths["digest-5"].exists()


def _pixels(plain: Sequence[Any]) -> list[list[Tensor]]:
    found: list[list[Tensor]] = []

    def make(one: Any, pixels: Sequence[Tensor]) -> object:
        found.append(list(pixels))
        return one

    ReceivedMedia(make).of_call(plain)
    return found


def test_samples_are_dealt_by_prompt_and_image() -> None:
    prefixes, places = [(1, 2)] * 16, [i // 4 for i in range(16)]
    options = SamplingOptions(temperature=1.0, max_new_tokens=5)
    shown = [SharedImage(FakeMedia.of(number)) for number in range(4)]
    call = SampleRequests(prefixes, list(range(16)), [0] * 16, [5] * 16, options, places, shown)
    shares = assign_samples(call, 2)
    held = [{places[request] for request in share} for share in shares]
    assert not held[0] & held[1], "samples of one image stay together"
    part = call.part(shares[1])
    assert [part.shown[place].media for place in part.media] == [shown[places[i]].media for i in shares[1]]
    assert len(part.shown) == len(held[1]), "the images of others are not sent"


class Noting:
    """An engine of its own process, which is given what the trainer has."""

    facts = EngineFacts("float32", VOCAB, True, "file")
    weight_version = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sample_keys: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        budgets: Sequence[Sequence[int]] | None = None,
        constraint: object = None,
        media: Sequence[object | None] | None = None,
    ) -> list[list[Completion]]:
        self.seen = [(tuple(prompt), one) for prompt, one in zip(prompts, media or (), strict=True)]
        return [[Completion((key % VOCAB,), (0.0,), (0.0,), "stop", 0) for key in keys] for keys in sample_keys]

    def load_weights(self, version: int) -> None:
        """Nothing is held."""

    def refresh(self) -> None:
        """Nothing is held."""

    def sleep(self, level: int = 1) -> None:
        """Nothing to give up."""

    def wake(self) -> None:
        """Nothing to bring back."""

    def close(self) -> None:
        """Nothing to end."""


def test_an_engine_with_an_image_processor_of_its_own_gets_the_media_themselves() -> None:
    noting = Noting()
    replica = ExternalEngineReplica(0, lambda provider: noting)
    replica.ready()
    engine = ReplicaEngine([replica], SharedWeightStore(table_provider, torch.float32, num_bytes=1000), max_len=64)
    engine.refresh()
    answers = engine.generate(PROMPTS, KEYS, OPTIONS, media=MEDIA)
    assert tokens_of(answers) == [[(key % VOCAB,) for key in keys] for keys in KEYS]
    assert len(noting.seen) == 5, "the same prompt with the same image is one"
    for prompt, media in zip(PROMPTS, MEDIA, strict=True):
        assert (prompt, media) in noting.seen
    engine.close()


def test_pixels_are_let_go_of_by_a_call_without_images() -> None:
    store = SharedImageStore()
    received = ReceivedMedia(lambda plain, pixels: pixels)
    try:
        [pixels] = received.of_call(store.hold([FakeMedia.of(3)]))
        held = weakref.ref(pixels[0])  # type: ignore[index]
        del pixels
        assert held() is not None, "the next call may show the same image"
        assert received.of_call([]) == []
        assert held() is None
    finally:
        store.close()
