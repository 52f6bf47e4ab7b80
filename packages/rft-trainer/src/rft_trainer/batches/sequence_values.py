"""Values of whole sequences of a micro-batch, from those of its tokens: for losses of sequences and of pairs."""

from __future__ import annotations

from torch import Tensor

from rft_algos.packed.segments import segment_index
from rft_algos.packed.segments import segment_sums as sums_by_segment
from rft_core.errors import OptionsError
from rft_trainer.records.rollouts import TokenBatch


def sequence_sums(values_T: Tensor, batch: TokenBatch) -> Tensor:
    """Sum the values of the loss tokens of every sequence.

    Args:
        values_T: [T] values of the batch's tokens, such as log-probs; what stands outside of the loss has no effect.
        batch: the micro-batch.

    Returns:
        [S] one sum a sequence, in the order of the batch; the gradient flows through them.
    """
    num_sequences = int(batch.segment_ids_T[-1]) + 1 if batch.segment_ids_T.numel() else 0
    sums = sums_by_segment(values_T, segment_index(batch.loss_mask_T, batch.segment_ids_T))
    if len(sums) < num_sequences:  # the last sequences have no loss token, and so no slot
        sums = sums.new_zeros(num_sequences).index_add(0, batch.segment_ids_T.new_tensor(range(len(sums))), sums)
    return sums[:num_sequences]


def pair_values(values_S: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Divide the values of sequences into those of the first and of the second of every pair.

    Args:
        values_S: [S] one value a sequence.
        batch: a micro-batch of pairs, as `policy.pairs` makes them.

    Returns:
        ([P] values of the chosen, [P] of the rejected).

    Raises:
        OptionsError: the units of the batch are not pairs.
    """
    units_S = batch.unit_ids_S
    if units_S is None or len(units_S) % 2 or bool((units_S.bincount() != 2).any()):
        raise OptionsError(
            code="batch.no_pairs",
            what="a loss of pairs was given a batch whose units are not two sequences each",
            where="pair_values",
            why="chosen and rejected must reach a loss together",
            state="no weight was changed",
            do="batch = policy.pairs([(prompt, chosen, rejected)])",
        )
    return values_S[0::2], values_S[1::2]
