"""The processor under the name that users of MiniOneRec know."""

import torch

from rft_algos.decoding.token_trie import TokenTrie
from rft_genrec.minionerec.constrained_logits import ConstrainedLogitsProcessor


def test_it_is_the_processor_of_the_engine() -> None:
    prompts = torch.tensor([[4, 4]])
    processor = ConstrainedLogitsProcessor(TokenTrie.of([[2, 0], [3, 0]]), prompts, eos_token_id=0)
    assert processor(prompts, torch.zeros(1, 5)).exp().tolist() == [[0.0, 0.0, 1.0, 1.0, 0.0]]
