"""Quantizers by name and JSON-able options, so that a model's configuration can say which one it holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any

from topovq.grid import Grid
from topovq.neighborhood import Schedule
from topovq.quantizers import GradientVQ, KohonenVQ, Quantizer, ResidualVQ, SoftKohonenVQ
from topovq.quantizers.gradient import REDUCTION, REDUCTION_BEFORE
from topovq.quantizers.kohonen import (
    REACH,
    as_saved,
    follows_gradient,
    neighborhood_name,
    radius_before,
    spelled_radius,
)

# name -> (class, the options that make the name mean what it says). Other modules may add quantizers when imported.
COMMITMENT = {"commitment_weight": 0.25}
QUANTIZERS: dict[str, tuple[Callable[..., Quantizer], dict[str, Any]]] = {
    "kohonen": (KohonenVQ, COMMITMENT),
    "ema": (KohonenVQ, COMMITMENT | {"neighborhood": "none"}),
    "gradient": (GradientVQ, COMMITMENT | {"neighborhood": "none"}),
    "som-vae": (GradientVQ, COMMITMENT | {"neighborhood": "hard"}),
    "soft": (SoftKohonenVQ, COMMITMENT),
    "residual": (ResidualVQ, COMMITMENT | {"num_quantizers": 4}),
}
ADDED_BY = dict.fromkeys(("vqp", "vqp-rotation", "simvq", "fsq", "lfq"), "experiments.peers")  # beside the package
FIXED = ("dim", "codebook_size", "accept_image_fmap", "accept_3d_fmap", "channel_last")  # what the model itself decides


def build_quantizer(kind: str, dim: int, codebook_size: int, options: dict[str, Any]) -> Quantizer:
    """The quantizer `kind` for feature maps [B, dim, H, W]; `options` are its constructor's other arguments.

    A grid is given as a shape ([16, 32]) or as `Grid.to_dict()`, a schedule as `Schedule.to_dict()`.
    """
    check_options(kind, options)
    cls, implied = QUANTIZERS[kind]
    arguments = {**implied, **options}
    if isinstance(arguments.get("grid"), (list, dict)):
        grid = arguments["grid"]
        arguments["grid"] = Grid.from_dict(grid) if isinstance(grid, dict) else tuple(grid)
    if isinstance(arguments.get("schedule"), dict):
        arguments["schedule"] = Schedule.from_dict(arguments["schedule"])
    return cls(dim=dim, codebook_size=codebook_size, accept_image_fmap=True, **arguments)


def has_neighbor_term(kind: str, options: dict[str, Any]) -> bool:
    """Whether the loss of this quantizer pulls neighbors, as the SOM-VAE's does."""
    kind = options.get("quantizer", "kohonen") if kind == "residual" else kind
    return kind == "som-vae" or (kind == "gradient" and options.get("neighborhood", "none") != "none")


def has_open_neighborhood(kind: str, options: dict[str, Any]) -> bool:
    """Whether the options of this quantizer may leave its neighborhood open, to be the recommended one."""
    return (options.get("quantizer", "kohonen") if kind == "residual" else kind) == "kohonen"


def spelled_out(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a configuration that is made now, with what it must name so that `as_meant` understands it."""
    if isinstance(options.get("grid"), list):
        options = spelled_radius(options, len(options["grid"]))
    if has_open_neighborhood(kind, options) and not follows_gradient(options):
        return {**options, "neighborhood": neighborhood_name(*(options.get(name) for name in REACH[1:]))}
    return {**REDUCTION, **options} if has_neighbor_term(kind, options) else options


def as_meant(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a configuration that was written some time ago: what it leaves open is as it was then."""
    options = radius_before(options)
    if has_open_neighborhood(kind, options) or follows_gradient(options):
        return as_saved(options)
    return {**REDUCTION_BEFORE, **options} if has_neighbor_term(kind, options) else options


def codes_of(quantizers: Iterable[Quantizer]) -> int:
    """How many codes each of a model's quantizers has: FSQ's may be more or fewer than the model was asked for."""
    return max(quantizer.codebook_size for quantizer in quantizers)


def check_options(kind: str, options: dict[str, Any]) -> None:
    """Refuse an unknown quantizer or option with the names that exist."""
    if kind in ADDED_BY and kind not in QUANTIZERS:
        raise ValueError(
            f"quantizer {kind!r} is of another library, and its adapter is not in the package: "
            f"`import {ADDED_BY[kind]}` first, in a clone of the repository"
        )
    check_name("quantizer", kind, QUANTIZERS)
    known = option_names(kind)
    for name in options:
        if name in FIXED:
            raise ValueError(f"quantizer option {name!r} is set by the model (codebook_size, code_dim)")
        check_name(f"option of quantizer {kind!r}:", name, known)


def option_names(kind: str) -> list[str]:
    """The options that `kind` takes: its own and, if it hands others on, KohonenVQ's."""
    own = inspect.signature(QUANTIZERS[kind][0].__init__).parameters
    hands_on = any(p.kind is p.VAR_KEYWORD for p in own.values())
    signatures = [own, inspect.signature(KohonenVQ.__init__).parameters] if hands_on else [own]
    names = {name for parameters in signatures for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    return sorted(names - {*FIXED, "self"})


def check_name(what: str, name: str, known: Collection[str]) -> None:
    """Refuse `name` if it is none of `known`: the error lists them, the likeliest first."""
    if name in known:
        return
    close = get_close_matches(name, list(known), 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(f"unknown {what} {name!r}{hint}; valid: {', '.join(known)}")
