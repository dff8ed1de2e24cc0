"""What the tests of other libraries' codebooks share: trained quantizers of theirs, and models that hold one."""

import torch
from torch import Tensor, nn
from vector_quantize_pytorch import VectorQuantize

SIZE, DIM = 16, 4


def trained(**options) -> VectorQuantize:
    """A VectorQuantize that has seen three batches, so that codes, sums and counts are all different."""
    torch.manual_seed(0)
    vq = VectorQuantize(**{"dim": DIM, "codebook_size": SIZE, "decay": 0.9, **options})
    for _ in range(3):
        vq(vectors(vq))
    return vq.eval()


def vectors(vq) -> Tensor:
    if vq.accept_image_fmap:
        return torch.randn(2, vq.dim, 5, 3)
    if vq.accept_3d_fmap:
        return torch.randn(2, vq.dim, 2, 3, 4)
    return torch.randn(3, 8, vq.dim) if vq.channel_last else torch.randn(3, vq.dim, 8)


class Holder(nn.Module):
    def __init__(self, **quantizers):
        super().__init__()
        for name, vq in quantizers.items():
            setattr(self, name, vq)
