"""Several engines as one: data-parallel replicas that share the samples of a call between them.

Every replica holds the same weights and draws samples whole. Which one draws which (`load_balancing`)
and how many there are changes no token: a sample's tokens follow from its key. `dispatch` has the
threads of a call and what happens when a replica dies; `weight_sync.shared_memory` the versions they load.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import RftError
from rft_engine.completions import Completion, EngineStats
from rft_engine.decoding.trie_constraint import check_constraint, check_whole
from rft_engine.engine_base import EngineBase, EngineFacts
from rft_engine.lifecycle import EngineState
from rft_engine.native.partial_requests import SampledTokens, SampleRequests
from rft_engine.replicas.dispatch import Replica, ReplicaDispatch
from rft_engine.replicas.health import ReplicaHealth
from rft_engine.replicas.process import is_lost
from rft_engine.request_checks import check_budgets, check_keys, check_media, check_prompts, refusal
from rft_engine.weight_sync.shared_images import SharedImage, SharedImageStore, distinct
from rft_engine.weight_sync.shared_memory import SharedWeightStore

_RESTART_SECONDS = 2.0
"""A load of weights waits so long for a replica that starts again; it draws later otherwise."""


class ReplicaEngine(EngineBase):
    """Engine over several replicas, with the methods that asynchronous rollouts need besides.

    `publish` belongs to the thread that trains, the rest to one thread at a time.

    Example::

        engine = ReplicaEngine([ProcessReplica(0, ...), ProcessReplica(1, ...)], weight_store, max_len=512)
        engine.refresh()
        [samples] = engine.generate([[5, 6, 7]], [[11, 12]], SamplingOptions(temperature=1.0, max_new_tokens=32))
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        weight_store: SharedWeightStore,
        *,
        max_len: int,
        lost: Mapping[int, RftError] | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """Make one engine of started replicas.

        Args:
            replicas: started; at least one.
            weight_store: where weights are kept for them.
            max_len: tokens of the longest prompt with its completion.
            lost: by their places those that did not start, and why; they are started again with the first weights.
            notify: called with a text when a replica is lost, when it is back, and when it is given up.
        """
        assert len(replicas) > len(lost or {}), "an engine of no replicas"
        super().__init__()
        self._replicas, self._weight_store, self._max_len = tuple(replicas), weight_store, max_len
        self._images = SharedImageStore()
        self._served = 0
        self._health = ReplicaHealth(self._replicas, notify=notify)
        self._lost_at_start = dict(lost or {})
        self._first_started = next(one for i, one in enumerate(self._replicas) if i not in self._lost_at_start)
        self._counts = Counter[str]()
        self._busy, self._drawing = [0.0] * len(replicas), 0.0

    @property
    def facts(self) -> EngineFacts:
        """Facts of the first replica that started; all replicas are alike."""
        return self._first_started.facts

    @property
    def max_len(self) -> int:
        """Tokens of the longest prompt with its completion."""
        return self._max_len

    @property
    def weight_version(self) -> int:
        """Version that the next completions carry."""
        return self._served

    @property
    def can_resume(self) -> bool:
        """True when calls can be interrupted and partly drawn samples resumed on every replica."""
        return all(replica.can_resume for replica in self._replicas)

    def publish(self, version: int) -> None:
        """Snapshot the policy's present weights as `version`, for `serve`, without interrupting running generation."""
        self._weight_store.put(version)

    def serve(self, version: int) -> None:
        """Draw with a published version from now on; older ones are dropped.

        Each replica loads it before it draws next, so that none waits for another.
        """
        # before the version changes: it must have been published
        self._weight_store.get(version)
        self._served = version
        self._weight_store.drop_below(version)

    def load_weights(self, version: int) -> None:
        """Publish and serve the policy's present weights.

        Raises:
            ServiceError: `version` is not above the present one, the engine is closed, or a replica does not
                hold the weights afterwards; the same version can then be loaded again.
        """
        # before the weights are copied
        if self.state is EngineState.CLOSED or version <= self._states.weight_version:
            self._states.load_weights(version)  # raises the state error
        self.publish(version)
        self.serve(version)
        self._load_all()
        # recorded last: a load that failed can be repeated
        self._states.load_weights(version)

    def refresh(self) -> None:
        """`load_weights` under the present version: at the start, or where weights changed outside of a step."""
        if self.state is EngineState.CLOSED:
            self._states.refresh()  # raises the state error
        self.publish(self._served)
        self.serve(self._served)
        self._load_all()
        self._states.refresh()

    def _load_all(self) -> None:
        """Load the served weights into every replica that is ready, whatever it held before.

        One that is lost starts again beside the others, and loads them before it draws.
        """
        weights, health = self._weight_store.get(self._served), self._health
        health.weights = weights
        self._start_lost()
        # those that are starting, with other weights of the same version perhaps, load these before they draw
        health.versions[:] = [None] * len(self._replicas)
        health.require_one()

        def load(index: int) -> None:
            try:
                self._replicas[index].load(weights)
            except RftError as error:
                if not is_lost(error):
                    raise
                health.lost(index, error)
                health.wait(index, lambda: False, _RESTART_SECONDS)
            else:
                health.versions[index] = weights.version

        # at once: the replicas map the same file, and each copies it in its own process
        with ThreadPoolExecutor(len(self._replicas)) as pool:
            list(pool.map(load, health.ready))
        health.require_one()

    def _start_lost(self) -> None:
        """Begin to start again what did not start, as there are weights for it now."""
        lost, self._lost_at_start = self._lost_at_start, {}
        for index, error in lost.items():
            self._health.lost(index, error)

    def _each(self, ask: Callable[[Replica], None]) -> None:
        """Ask every replica that is ready; one that is gone is started again."""
        for index in self._health.ready:
            try:
                ask(self._replicas[index])
            except RftError as error:
                if not is_lost(error):
                    raise
                self._health.lost(index, error)

    def draw(
        self,
        prefixes: Sequence[Sequence[int]],
        keys: Sequence[int],
        starts: Sequence[int],
        budgets: Sequence[int],
        options: SamplingOptions,
        *,
        media: Sequence[object | None] | None = None,
        stop: Callable[[], bool] | None = None,
        constraint: TokenTrie | None = None,
    ) -> Iterator[SampledTokens]:
        """Yield results as samples end, in any order; after `stop()` the unfinished ones with the tokens so far.

        Args:
            prefixes: for each sample its prompt, and what it has drawn already.
            keys: of each sample.
            starts: tokens that each has drawn already.
            budgets: tokens that each may still have; the largest replaces `max_new_tokens`.
            options: how tokens are drawn.
            media: images of each one's prompt, None where it has none; None: no prompt has any.
            stop: polled during the call; None = until every sample has ended.
            constraint: every sample is one of its sequences, whole, and was not begun elsewhere.

        Raises:
            OptionsError: an option or a request out of range.
            ServiceError: the engine is asleep or closed, or a replica failed.
        """
        self._states.require_ready("draw")
        options = replace(options, max_new_tokens=max(budgets, default=1))
        check_media(prefixes, media)
        shown, image_indices = self._shown(media)
        lists = (list(prefixes), list(keys), list(starts), list(budgets))
        call = SampleRequests(*lists, options, image_indices, shown, constraint)
        call.check(self._max_len, self.facts.vocab_size)
        if any(starts) and not self.can_resume:
            why = "these engines draw samples from their first token to their last"
            raise refusal("engine.cannot_resume", "samples that were started elsewhere", why, "--async_deterministic")
        # replicas that cannot resume draw every sample to its end, so nothing asks `stop`
        asked = stop if self.can_resume else None
        weights = self._weight_store.get(self._served)
        # before older ones are gone for those that start again now
        self._health.weights = weights
        current = ReplicaDispatch(self._replicas, self._health, call, weights, asked)
        started = time.perf_counter()
        try:
            yield from current.results()
        finally:
            # also for a call that was left early: the share of idle time counts what was used of it
            self._drawing += time.perf_counter() - started
            self._busy = [old + new for old, new in zip(self._busy, current.busy_seconds, strict=True)]
            self._counts.update(reissued=current.num_reissued)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sample_keys: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        budgets: Sequence[Sequence[int]] | None = None,
        constraint: TokenTrie | None = None,
        media: Sequence[object | None] | None = None,
    ) -> list[list[Completion]]:
        """Continue every prompt once for each of its keys; arguments and result as of `NativeEngine.generate`.

        Raises:
            OptionsError: as of `NativeEngine.generate`, and of the replicas' engine where that one has no constraints.
            ServiceError: the engine is asleep or closed, or a replica failed.
        """
        check_media(prompts, media)
        check_prompts(prompts, options.max_new_tokens, self._max_len, self.facts.vocab_size)
        check_keys(prompts, sample_keys)
        allowed = check_budgets(sample_keys, budgets, options.max_new_tokens)
        if constraint is not None:
            check_constraint(constraint, options, allowed, self.facts.vocab_size)
        started = time.perf_counter()
        drawn = self.draw(
            [prompt for prompt, keys in zip(prompts, sample_keys, strict=True) for _ in keys],
            [key for keys in sample_keys for key in keys],
            [0] * len(allowed),
            allowed,
            options,
            media=[one for one, keys in zip(media, sample_keys, strict=True) for _ in keys] if media else None,
            constraint=constraint,
        )
        completions = {one.request: _completion(one) for one in drawn}
        if constraint is not None:
            check_whole(constraint, [completions[request] for request in range(len(allowed))])
        tokens = sum(len(completion.token_ids) for completion in completions.values())
        self._stats = EngineStats(num_generated_tokens=tokens, seconds=time.perf_counter() - started)
        flat = iter(completions[request] for request in range(len(allowed)))
        return [[next(flat) for _ in keys] for keys in sample_keys]

    def counters(self) -> dict[str, float]:
        """Return and reset the counters: samples issued again, replicas restarted, share of time without work."""
        possible = self._drawing * len(self._replicas)
        metrics: dict[str, float] = {
            "engine/reissued": self._counts["reissued"],
            "engine/restarts": self._health.taken_restarts(),
            "time/engine_idle_share": max(0.0, 1.0 - sum(self._busy) / possible) if possible else 0.0,
        }
        self._counts.clear()
        self._busy, self._drawing = [0.0] * len(self._replicas), 0.0
        return metrics

    def sleep(self, level: int = 1) -> None:
        """Free the caches until `wake`. Does nothing when asleep."""
        if self.state is EngineState.READY:
            self._each(lambda replica: replica.sleep(level))
        self._states.sleep(level)

    def wake(self) -> None:
        """Be ready again. Does nothing when awake."""
        if self.state is EngineState.ASLEEP:
            self._each(lambda replica: replica.wake())
        self._states.wake()

    def close(self) -> None:
        """End the replicas and give the weights back. Does nothing when closed."""
        if self._states.close():
            # before the stores, which the replicas read from
            self._health.close(self._close_replicas)
            self._weight_store.close()
            self._images.close()

    def _close_replicas(self) -> None:
        for replica in self._replicas:
            replica.close()

    def _shown(self, media: Sequence[object | None] | None) -> tuple[list[SharedImage], list[int]]:
        """Return the images of a call as replicas read them, and for each request the index of its images."""
        images, indices = distinct(media or ())
        if not images:
            return [], []
        if any(replica.reads_files for replica in self._replicas):
            plain = self._images.hold(images)
            return [SharedImage(*pair) for pair in zip(images, plain, strict=True)], indices
        return [SharedImage(one) for one in images], indices


def _completion(drawn: SampledTokens) -> Completion:
    reason = "stop" if drawn.finish_reason == "stop" else "length"
    return Completion(drawn.token_ids, drawn.logprobs, drawn.log_kept_mass, reason, drawn.weight_version)
