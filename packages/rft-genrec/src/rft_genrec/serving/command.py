"""`rft-train genrec recommend`: a file of histories, or a server until it is stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rft_genrec.serving.batch import recommend_file
from rft_genrec.serving.recommendations import Recommendations
from rft_genrec.settings.recommend import GenrecRecommendSettings
from rft_models.families.custom import load_model_code


def lines(resolved: Any) -> Iterator[str]:
    """Recommend what the settings ask, and yield the lines that are shown."""
    settings: GenrecRecommendSettings = resolved.settings
    model = settings.model
    load_model_code(model.model_code)
    place = settings.catalogue
    shop = Recommendations.open(
        model.pretrain,
        place.catalogue,
        sid_index_path=place.sid_index_path,
        item_meta_path=place.item_meta_path,
        beams=settings.beams,
        device=model.device,
        bf16=model.bf16,
    )
    yield f"{shop.catalogue.name}: {len(shop.catalogue)} items, {settings.beams.num_beams} beams"
    if settings.serving.serve:
        yield from _served(shop, settings)
        return
    wanted = settings.recommendation
    target = Path(wanted.recommendations).expanduser()
    done = recommend_file(
        shop,
        Path(wanted.histories).expanduser(),
        target,
        k=wanted.top_k,
        batch_size=settings.beams.search_batch_size,
        skip_unknown=wanted.skip_unknown,
    )
    yield f"{done.num} histories in {done.seconds:.2f} s: {done.num / max(done.seconds, 1e-9):.1f} a second"
    yield _latency(shop)
    if done.num_errors:
        yield f"{done.num_errors} lines are no history of this catalogue; their answers say why"
    yield f"written: {target}"


def _served(shop: Recommendations, settings: GenrecRecommendSettings) -> Iterator[str]:
    from rft.serving.listening import until_stopped
    from rft_genrec.serving.recommendation_server import serving

    with until_stopped() as stopped, serving(shop, settings.serving, settings.recommendation) as server:
        yield f'serving   {server.url}: POST {{"history": [3, 14], "k": 5}}'
        if server.token_variable:
            yield f"token     requests bring that of {server.token_variable}, as Authorization: Bearer TOKEN"
        yield f"health    {server.url.removesuffix('recommend')}health; Ctrl-C ends the server"
        stopped.wait()
    counters = server.queue.counters
    yield f"answered  {counters.requests} requests: {counters.responses} histories, {counters.failures} failures"
    yield _latency(shop)


def _latency(shop: Recommendations) -> str:
    found = shop.latencies
    return f"latency   p50 {1000 * found.p50:.1f} ms, p95 {1000 * found.p95:.1f} ms a request ({found.num} requests)"
