"""rosinality's VQ-VAE-2 (vq-vae-2-pytorch), whose `Quantize` keeps embed [D, K], embed_avg [D, K], cluster_size [K]."""

from __future__ import annotations

from typing import Any

from topovq.interop.states import Layout, State, below, statistics, with_codes
from topovq.quantizers.kohonen import KohonenVQ

ROSINALITY = Layout("rosinality's VQ-VAE-2", "embed", "embed_avg", "cluster_size")


def from_rosinality(state: State, *, prefix: str | None = None, **options: Any) -> KohonenVQ:
    """A KohonenVQ with the codes and statistics of one quantizer of rosinality's VQ-VAE-2, say prefix="quantize_t"."""
    own = below(state, ROSINALITY, prefix)
    codes_DK, sums_DK, counts_K = statistics(own, ROSINALITY, "[D, K]")
    return with_codes(codes_DK.T, None if sums_DK is None else sums_DK.T, counts_K, options)
