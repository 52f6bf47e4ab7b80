"""The in-process engine for a build request: on the trained parameters, or on a copy of them."""

from __future__ import annotations

from typing import Any

from rft_engine.build_request import EngineBuildRequest
from rft_engine.native.copied_weights import NativeEngineOnCopy
from rft_engine.native.engine import NativeEngine


def build(request: EngineBuildRequest) -> NativeEngine[Any]:
    """Make the engine; where the parameters are sharded or of another dtype, it holds a copy, which is loaded."""
    assert request.model is not None, "this engine needs the policy in its process"
    graphs = not request.settings.engine_enforce_eager
    max_rows, max_len = request.settings.engine_max_rows, request.max_len
    twin = request.model.weight_copy(graphs=graphs)
    if twin is None:
        decoder = request.model.decoder(graphs=graphs)
        return NativeEngine(decoder, max_rows=max_rows, max_len=max_len, device=request.device)
    engine = NativeEngineOnCopy(twin, request.weights, max_rows=max_rows, max_len=max_len, device=request.device)
    # the copy holds no values yet, and the engine refuses to generate until a load has succeeded
    engine.refresh()
    return engine
