"""Arguments of vector-quantize-pytorch that have no counterpart here, and what to use in their place.

A value that asks for nothing is taken: None, False, 0, the few of `NOTHING`, and settings of what is not turned on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from torch import Tensor

# Where it is another value that asks for nothing.
NOTHING = {"sync_kmeans": True, "return_zeros_for_masked_padding": True, "heads": 1}
# These only say how something is done that another argument turns on.
SETTINGS = {
    "affine_param_batch_decay",
    "affine_param_codebook_decay",
    "codebook_diversity_temperature",
    "manual_in_place_optimizer_update",
    "mlp_kwargs",
    "sync_affine_param",
}


def refuse_arguments(
    where: str, arguments: dict[str, Any], advice: dict[str, str], *takers: Callable[..., Any]
) -> None:
    """Raise for the first argument that asks for something; one that nobody knows may be meant for the `takers`."""
    for name, value in arguments.items():
        if name not in advice:
            close = get_close_matches(name, argument_names(*takers), 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise TypeError(f"{where}: {name}={shown(value)} is not supported; it is no argument here{hint}")
        if not asks_for_nothing(name, value):
            raise TypeError(f"{where}: {name}={shown(value)} is not supported; {advice[name]}")


def argument_names(*takers: Callable[..., Any]) -> list[str]:
    """The names of the arguments that these functions or classes take, without *args and **options."""
    found = [p for taker in takers for p in inspect.signature(taker).parameters.values()]
    return [p.name for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def asks_for_nothing(name: str, value: Any) -> bool:
    if value is None or name in SETTINGS:
        return True
    if name in NOTHING:
        return bool(value == NOTHING[name])
    return not isinstance(value, Tensor) and (value is False or (isinstance(value, (int, float)) and value == 0))


BRIDGE = "use GradientVQ with a module of your own around it"
OPTIMIZER = "use GradientVQ and give its parameters to your optimizer"
FOLLOWS = "codes follow the data through their running means"
KEEPS_IN_USE = "a neighborhood keeps codes in use: neighborhood='hard' or 'gaussian'"

ADVICE = {
    "sync_kmeans": "k-means initialization is always over all ranks; sync_codebook=False keeps ranks apart",
    "layernorm_after_project_in": "put nn.LayerNorm before this layer",
    "commitment_use_cross_entropy_loss": "the commitment loss is the squared error",
    "codebook_diversity_loss_weight": KEEPS_IN_USE,
    "codebook_diversity_temperature": KEEPS_IN_USE,
    "straight_through": "it needs a softmax over all codes for each vector; SoftKohonenVQ has one, in blocks",
    "sync_affine_param": FOLLOWS,
    "affine_param": FOLLOWS,
    "affine_param_batch_decay": FOLLOWS,
    "affine_param_codebook_decay": FOLLOWS,
    "vq_bridge": BRIDGE,
    "manual_ema_update": "use `with vq.accumulate():` to put updates off, or freeze_codebook=True for none",
    "in_place_codebook_optimizer": OPTIMIZER,
    "manual_in_place_optimizer_update": OPTIMIZER,
    "sync_update_v": "use rotation_trick=True, or leave it out for straight-through",
    "return_zeros_for_masked_padding": "masked places are always zeros",
    # ResidualVQ's, given to one quantizer
    "num_quantizers": "ResidualVQ has several quantizers",
}

RESIDUAL_ADVICE = {
    "heads": "a residual quantizer has one head; use more quantizers, or GroupedResidualVQ",
    "implicit_neural_codebook": "it makes N x K codes for each batch; use more codes, or more quantizers",
    "mlp_kwargs": "implicit_neural_codebook is not supported",
}

FORWARD_ADVICE = {
    "indices": "for a cross-entropy loss on given tokens, use F.cross_entropy(-torch.cdist(x, vq.codebook), tokens)",
    "codebook_transform_fn": "transform the codes and assign them to `codebook`",
}
