from __future__ import annotations
from dataclasses import dataclass
from pathlib import Path
import numpy as np
from rft_trainer.data.mixture import Mixture
from rft_trainer.data.token_shards.windows import TokenWindows

@dataclass
class PretrainRows:
    training: TokenWindows
    held_out: TokenWindows | None
    mixture: Mixture
    data_hash: str
    notes: tuple[str, ...] = ()

def open_windows(data, tokenizer, *, window, seed):
    text = Path(data.prompt_data).read_text()
    n = int(len(text) * (1 - data.held_out_share))
    def ids(t): return np.array(tokenizer.encode(t), dtype=np.uint16)
    tr = TokenWindows("train", ids(text[:n]), window, len(text[:n].encode()))
    ho = TokenWindows("eval", ids(text[n:]), window, len(text[n:].encode())) if n < len(text) else None
    return PretrainRows(tr, ho, Mixture([len(tr)], most_in_memory=1<<22), tr.data_hash)
