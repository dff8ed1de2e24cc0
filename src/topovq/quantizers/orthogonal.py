"""The orthogonality penalty on codes, eq. (2) of arXiv:2112.00384.

Legend: K codes w, D dimensions, u = w / |w|.
    mean over pairs (i, j) of (u_i . u_j)^2, less 1/K, which is what the pairs (i, i) add
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def orthogonality(codes_KD: Tensor, active_K: Tensor | None = None, most: int | None = None) -> Tensor:
    """The penalty of all codes, of the active ones (bool [K]), or of at most `most` of them, drawn at random.

    No K x K matrix: the sum over pairs is the squared norm of U^T U [D, D]. Nothing waits for the device: codes that
    are left out become rows of zeros.
    """
    units_KD = F.normalize(codes_KD, dim=1)
    if most is not None and most < codes_KD.shape[0]:
        lot_K = torch.rand(codes_KD.shape[0], device=codes_KD.device)
        lot_K = lot_K if active_K is None else lot_K + active_K
        chosen = lot_K.topk(most).indices
        units_KD = units_KD[chosen]
        active_K = None if active_K is None else active_K[chosen]
    count: Tensor | int = units_KD.shape[0]
    if active_K is not None:
        units_KD = torch.where(active_K[:, None], units_KD, 0)
        count = active_K.sum().clamp(min=1)
    itself = units_KD.detach().square().sum()
    return ((units_KD.T @ units_KD).square().sum() - itself) / count**2
