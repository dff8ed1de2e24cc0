"""A prior as the coder of token files (`topovq encode --compress`): it says how likely each digit of each token is.

The encoder goes through the prior token by token, as the decoder must, and with batches of the same size. Both compute
in float64: the sums of a matrix product then differ from machine to machine by far less than what
`token_coded.probabilities` rounds away.

Legend: B images at a time, T tokens of an image, F digits of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from topovq.prior.generate import open_prior
from topovq.prior.transformer import Cache, Prior
from topovq.storage import model_id
from topovq.tokenizer.token_coded import Frequencies, probabilities
from topovq.tokenizer.training.runs import model_folder

AT_ONCE = 64


class PriorCoder:
    """`Coder` of token_coded.py: the digits of an image's tokens in the order of the prior."""

    def __init__(self, prior: Prior, id: str, device: torch.device) -> None:
        self.prior, self.id, self.at_once = prior.double().to(device).eval(), id, AT_ONCE
        self.device = device

    def symbols(self, levels: Sequence[Tensor]) -> np.ndarray:
        tokens_BT = self.prior.to_sequence(levels).cpu()
        columns = [self.prior.outputs[slot].digits(tokens_BT[:, t]) for t, slot in enumerate(self.prior.slot_of)]
        return torch.cat(columns, 1).to(torch.int32).numpy()

    def levels(self, symbols_nS: np.ndarray) -> tuple[Tensor, ...]:
        digits = torch.from_numpy(symbols_nS.astype(np.int64))
        heads = [self.prior.outputs[slot] for slot in self.prior.slot_of]
        parts = digits.split([len(head.factors) for head in heads], 1)
        return self.prior.to_levels(torch.stack([head.tokens(part) for head, part in zip(heads, parts)], 1))

    @torch.no_grad()
    def walk(self) -> Frequencies:
        cache = Cache(self.prior, self.at_once)
        token_B = torch.zeros(self.at_once, dtype=torch.long, device=self.device)
        for t, slot in enumerate(self.prior.slot_of):
            hidden_BD = self.prior.step(token_B, t, None, cache)
            head = self.prior.outputs[slot]
            before = torch.zeros(self.at_once, 0, dtype=torch.long, device=self.device)
            for _ in head.factors:
                digit_B = yield probabilities(head.factor_logits(hidden_BD, before))
                sent = torch.from_numpy(digit_B.astype(np.int64)).to(self.device)
                before = torch.cat([before, sent[:, None]], 1)
            token_B = head.tokens(before)


def open_coder(folder: str | Path, run: str | Path, device: str = "auto") -> PriorCoder:
    """The prior in `folder` as a coder of the tokens of `run`; a prior of another tokenizer is refused."""
    pair = open_prior(folder, model_folder(run), device, remedy=f"give the run of that prior, or a prior of {run}")
    return PriorCoder(pair.prior, model_id(Path(folder)), pair.device)
