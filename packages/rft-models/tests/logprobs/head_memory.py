"""Memory estimate of the head above hidden states, matrix and targets, known before it runs."""

from __future__ import annotations

from typing import Literal

import torch

from rft_models.logprobs.vocab_slabs import NARROW_ADDITIONS

HeadPath = Literal["forward", "split", "kept", "fused"]
"""`forward` has no gradient, `split` forms logits again in the backward, `kept` has them still, `fused` is
`linear_loss`."""


def head_memory(
    rows: int,
    hidden: int,
    vocabulary: int,
    dtype: torch.dtype,
    chunk: int,
    slab: int,
    path: HeadPath,
    *,
    compiled: bool = False,
    frozen: bool = False,
) -> int:
    """Peak bytes alive on a CPU above the inputs, of one forward and (but for `forward`) its backward.

    With s bytes an element, c rows in a chunk and C entries in a slab: gradients take V D s for the matrix and
    max(4, s) R D for the hidden states; what is held takes R V s (`kept`) or c V s (`fused`), 4 bytes an element in
    plain torch; more than four chunks of `fused` sum dW in float32 and convert it at the end. A slab takes c C s
    (compiled: in place), in plain torch a float32 copy more, and its product with the hidden states is there before
    it is added to dW. Pages of dW count from when a slab writes them, which is why the last slab, a shorter one, is
    looked at by itself. An allocator that does not find places again for what it freed holds up to a few slabs more.

    Args:
        rows: R.
        hidden: D.
        vocabulary: V.
        dtype: of hidden states and matrix.
        chunk: rows at a time.
        slab: vocabulary entries at a time.
        path: see `HeadPath`.
        compiled: the compiled passes rather than plain torch.
        frozen: the matrix gets no gradient.
    """
    size, wide = dtype.itemsize, max(4, dtype.itemsize)
    chunk, slab = min(chunk, rows), min(slab, vocabulary)
    plain = (1 if path in ("kept", "fused") else 2) * wide + (size if size < 4 else 0)
    an_entry = chunk * (size if compiled else plain)
    tables = -(-vocabulary // slab) * rows * 5 * wide
    if path == "forward":
        return slab * an_entry + tables
    num_chunks = -(-rows // chunk) if path == "fused" else 1
    kept = {"split": 0, "kept": rows * vocabulary, "fused": chunk * vocabulary}[path] * (size if compiled else wide)
    converts = num_chunks > NARROW_ADDITIONS and size < 4
    weight = 0 if frozen else hidden * (4 if converts else size)
    weight_product = 0 if frozen or (size < 4 and num_chunks == 1) else hidden * size
    peaks = []
    for width, written in _slab_ends(vocabulary, slab, all_written=num_chunks > 1):
        product = max(chunk * hidden * size, width * weight_product)
        peaks.append(max(width * an_entry, width * chunk * size + product) + weight * written)
    at_end = vocabulary * (weight + hidden * size) if converts and not frozen else 0
    return rows * hidden * wide + max(kept + max(peaks) + tables, at_end)


def _slab_ends(vocabulary: int, slab: int, *, all_written: bool) -> list[tuple[int, int]]:
    """(entries of the slab, rows of dW that are written) at the last whole slab and at the last of all."""
    last = vocabulary % slab or slab
    written = vocabulary if all_written or last == slab else vocabulary - last
    return [(slab, written), (last, vocabulary)]
