"""vLLM's CPU build as replicas: two draw what the native engine draws, after images too, through updates and deaths."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_engine.completions import Completion
from rft_engine.native.engine import NativeEngine
from rft_engine.replicas.engine import ReplicaEngine
from rft_engine.replicas.external_engine import ExternalEngineReplica
from rft_engine.vllm.process import VllmProcessEngine
from rft_engine.vllm.settings import VllmSettings
from rft_engine.weight_sync.shared_memory import SharedWeightStore
from rft_models.decode.fast_decoder import decoder_for
from rft_models.files.checkpoint_names import to_checkpoint_names
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_tokenizer
from rft_models.tiny_models.vision import VisionSizes, build_vision_model
from rft_models.vision.processor import HfProcessor

KEYS = [[1, 2, 3, 4], [5, 6], [7, 8, 9], [10, 11, 12]]
MAX_LEN = 200


class Replicas:
    """A policy, prompts with and without images, and two vLLM processes."""

    def __init__(self, folder: Path) -> None:
        sizes = VisionSizes(hidden=128, vision_hidden=128, patch_size=14, image_size=112, window_size=56)
        tokenizer = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz ?")
        path = build_vision_model(folder / "model", tokenizer, sizes=sizes, seed=4, init_std=0.1)
        self.policy: CausalPolicy = load_policy(path)
        self.settings = VllmSettings(
            model_dir=path, max_rows=8, max_len=MAX_LEN, enforce_eager=True, transport="file", dtype="float32"
        )
        self.engines: list[VllmProcessEngine] = []
        with ThreadPoolExecutor(2) as pool:
            started = list(pool.map(lambda number: self._started(folder, number), range(2)))
        weight_store = SharedWeightStore(
            to_checkpoint_names(self.policy.model, self.policy.named_parameters),
            torch.float32,
            num_bytes=4 * self.policy.num_parameters,
        )
        self.pool = ReplicaEngine(started, weight_store, max_len=MAX_LEN)
        self.native = NativeEngine(decoder_for(self.policy), max_rows=8, max_len=MAX_LEN)
        tokenizer = self.policy.tokenizer
        assert isinstance(tokenizer, HfProcessor)
        generator = torch.Generator().manual_seed(7)
        images = [
            Image.fromarray(torch.randint(0, 256, (56, side, 3), generator=generator, dtype=torch.uint8).numpy())
            for side in (56, 84)
        ]
        pairs = [
            tokenizer.encode_media("<image>what is it? ", images[:1]),
            (tokenizer.encode("no image "), None),
            tokenizer.encode_media("is <image> like <image>", images),
            tokenizer.encode_media("<image>what is it? ", images[1:]),
        ]
        self.prompts, self.media = [ids for ids, _ in pairs], [one for _, one in pairs]

    def _started(self, folder: Path, number: int) -> ExternalEngineReplica:
        def start(provider: Any) -> VllmProcessEngine:
            environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
            log = folder / f"replica-{number}.log"
            engine = VllmProcessEngine(self.settings, provider, environment=environment, log_path=log)
            self.engines.append(engine)
            return engine

        replica = ExternalEngineReplica(number, start)
        replica.ready()
        return replica

    def drawn(self, engine: Any, length: int = 12) -> list[Completion]:
        answers: Sequence[Sequence[Completion]] = engine.generate(
            self.prompts, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=length), media=self.media
        )
        return [completion for row in answers for completion in row]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    made = Replicas(tmp_path_factory.mktemp("replicas"))
    yield made
    made.pool.close()


@pytest.mark.night
def test_two_replicas_draw_what_the_native_engine_draws_under_every_version(two: Replicas) -> None:
    two.pool.refresh()
    generator = torch.Generator().manual_seed(3)
    for version in (1, 2):
        with torch.no_grad():
            for _, parameter in two.policy.named_parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        two.native.load_weights(version)
        two.pool.publish(version)
        two.pool.serve(version)
        ours, theirs = two.drawn(two.pool), two.drawn(two.native)
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
        assert {one.weight_version for one in ours} == {version}
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.night
def test_a_replica_that_is_killed_draws_the_same_tokens_in_its_next_life(two: Replicas) -> None:
    wanted = [one.token_ids for one in two.drawn(two.pool, 120)]
    dead = two.engines[0].pid
    killer = threading.Timer(0.5 * two.pool.stats().seconds, lambda: os.killpg(dead, signal.SIGKILL))
    killer.start()
    found = [one.token_ids for one in two.drawn(two.pool, 120)]
    killer.join()
    assert two.engines[0].pid != dead
    assert found == wanted
