"""The in-process engine on weights of its own: copied from the policy at every version, and verified."""

from __future__ import annotations

import torch

from rft_core.errors import ServiceError
from rft_engine.engine_base import EngineFacts
from rft_engine.lifecycle import EngineState, StateMachine
from rft_engine.native.engine import NativeEngine
from rft_engine.protocols import CacheT, WeightCopy
from rft_engine.weight_sync.fingerprints import Fingerprint, WeightProvider, compare, element_digest
from rft_engine.weight_sync.weight_errors import unfinished_error

_WHERE = "in-process engine with weights of its own"


class NativeEngineOnCopy(NativeEngine[CacheT]):
    """`NativeEngine` on a copy of the policy: the same tokens for the same weights, to the bit in the same dtype.

    Nothing is generated before a load has succeeded in full: all tensors came, and digests of some elements of
    each agree on both sides. The cache is dropped with every version.

    Example::

        engine = NativeEngineOnCopy(GenerationCopy(policy), policy.named_parameters, max_rows=64, max_len=512)
        engine.refresh()
        [samples] = engine.generate([[5, 6, 7]], [[11, 12]], SamplingOptions(temperature=1.0, max_new_tokens=32))
    """

    def __init__(
        self,
        model: WeightCopy[CacheT],
        weights: WeightProvider,
        *,
        max_rows: int,
        max_len: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make the engine around a copy that holds no weights yet.

        Args:
            model: the copy, with or without values.
            weights: called at every `load_weights`: the policy's present tensors, whole, under their names, one
                at a time; each is released before the next is requested.
            max_rows: sequences decoded at once.
            max_len: tokens of the longest prompt with its completion.
            device: where the copy is.

        Raises:
            OptionsError: `max_rows` below 1, `max_len` below 2 or above what the model can place.
        """
        super().__init__(model, max_rows=max_rows, max_len=max_len, device=device)
        self._copy, self._weights = model, weights
        # in the place of the base class's own: there are no weights yet
        self._states: _CopyStates = _CopyStates()

    @property
    def facts(self) -> EngineFacts:
        """Facts of the engine that a probe needs: dtype, vocabulary, device and transport."""
        dtype = str(self._copy.dtype).removeprefix("torch.")
        return EngineFacts(dtype, self._copy.vocab_size, self._device.type == "cpu", "direct")

    @property
    def max_len(self) -> int:
        """Tokens of the longest prompt with its completion."""
        return self._max_len

    def load_weights(self, version: int) -> None:
        """Copy the policy's present tensors in place, compare both sides, and serve them as `version`.

        Raises:
            ServiceError: `version` is not above the present one, the engine is closed, the tensors are not those of
                the model, or the copy does not hold them afterwards. After the last two the engine refuses to
                generate until a load succeeds.
        """
        if self.state is EngineState.CLOSED or version <= self.weight_version:
            self._states.load_weights(version)  # raises the state error
        self._pull(version)
        # recorded last: a load that failed leaves the version that it had
        self._states.load_weights(version)

    def refresh(self) -> None:
        """`load_weights` under the present version: at the start, or where weights changed outside of a step.

        Raises:
            ServiceError: as of `load_weights`.
        """
        if self.state is not EngineState.CLOSED:
            self._pull(self.weight_version)
        self._states.refresh()

    def sleep(self, level: int = 1) -> None:
        """Free the cache until `wake`; at level 2 the copy too, which must be loaded again. Also while asleep."""
        # first: a sleep that the state refuses must not drop the copy
        super().sleep(level)
        if level == 2:
            self._drop_copy()

    def close(self) -> None:
        """Free cache and copy for good. Does nothing when closed."""
        super().close()
        self._drop_copy()

    def policy_fingerprint(self) -> Fingerprint:
        """Digests of the policy's present tensors, as the copy's dtypes: one call of the provider."""
        dtypes = {name: tensor.dtype for name, tensor in self._copy.named_tensors()}
        digests: Fingerprint = {}
        for name, tensor in self._weights():
            own = self._copy.own_name(name)
            digests[own] = element_digest(tensor, tensor.shape, dtypes.get(own, tensor.dtype))
            del tensor  # before the next one is made: two of them may not fit
        return digests

    def held_fingerprint(self) -> Fingerprint:
        """Digests of the tensors that the copy computes with."""
        return {name: element_digest(target, target.shape, target.dtype) for name, target in self._copy.named_tensors()}

    def distrust(self, fault: ServiceError) -> None:
        """Refuse to generate, with this error, until a load succeeds."""
        self._states.fault = fault

    def _pull(self, version: int) -> None:
        """Copy, verify, derive; until all of it has worked the engine refuses to generate."""
        # set before the first tensor is written: a load that breaks off leaves part old and part new
        self._states.fault = unfinished_error(version, _WHERE)
        self._drop_cache()  # its keys and values are those of other weights
        sent: Fingerprint = {}
        self._copy.begin()
        for name, tensor in self._weights():
            own, target = self._copy.write(name, tensor)
            sent[own] = element_digest(tensor, tensor.shape, target.dtype)
            del tensor  # before the next one is made: two of them may not fit
        # before the comparison: its error says that a tensor did not come, a digest only that it differs
        self._copy.finish()
        compare(sent, self.held_fingerprint(), version, self.weight_version, "that the engine's copy holds")
        self._states.fault = None

    def _drop_copy(self) -> None:
        self._copy.drop()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class _CopyStates(StateMachine):
    """State machine that also refuses to generate while `fault` is set: at first, and after a failed load."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: ServiceError | None = unfinished_error(0, _WHERE)

    def require_ready(self, operation: str) -> None:
        super().require_ready(operation)
        if self.fault is not None:
            raise self.fault
