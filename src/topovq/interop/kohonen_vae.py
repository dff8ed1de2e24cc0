"""The Kohonen-VAE authors' layer, which keeps _w [K, D], _ema_w [K, D], _ema_cluster_size [K] and counter."""

from __future__ import annotations

from typing import Any

from topovq.interop.states import Layout, State, below, statistics, with_codes
from topovq.quantizers.kohonen import KohonenVQ

KOHONEN_VAE = Layout("the Kohonen-VAE", "_w", "_ema_w", "_ema_cluster_size")


def from_kohonen_vae(state: State, *, prefix: str | None = None, **options: Any) -> KohonenVQ:
    """A KohonenVQ with the codes, statistics and step of the Kohonen-VAE authors' layer.

    Their state dict knows neither grid nor neighborhood: give them as `options`.
    """
    own = below(state, KOHONEN_VAE, prefix)
    codes_KD, sums_KD, counts_K = statistics(own, KOHONEN_VAE, "[K, D]")
    vq = with_codes(codes_KD, sums_KD, counts_K, options)
    if "counter" in own:
        vq.codebook_of(0).step.fill_(int(own["counter"]))
    return vq
