"""torch.compile's own backend: a training step gives what it gives in eager mode, codes read before they move included.

The backend puts off plain operations: one that reads a codebook can end up behind the update of it.
"""

import pytest
import torch
from compiled import check_compiled
from torch import nn

from topovq import KohonenVQ, ResidualVQ

SHARES = torch.linspace(0, 1, 16)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vq = KohonenVQ(8, 16, stochastic_sample_codes=True, count_smoothing="copy")

    def forward(self, x):
        return self.vq(x, ema_update_weight=SHARES)


SETTINGS = {
    "drawn": lambda: KohonenVQ(8, 16, stochastic_sample_codes=True),
    "drawn, parts of updates": Weighted,
    "revival": lambda: KohonenVQ(8, 16, neighborhood="hard", update_empty=False, threshold_ema_dead_code=0.4),
    "beams": lambda: ResidualVQ(8, 16, num_quantizers=2, beam_size=2, codebook_dim=4),
    "beams, shared": lambda: ResidualVQ(8, 16, num_quantizers=2, beam_size=2, shared_codebook=True),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_training_step_equals_eager(setting):
    check_compiled(SETTINGS[setting], torch.randn(4, 10, 8, generator=torch.Generator().manual_seed(1)))
