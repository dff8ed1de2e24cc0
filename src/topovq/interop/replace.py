"""A model whose quantizers become Kohonen ones in one line, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from topovq.interop import dac, encodec, hf_diffusers, llamagen, lucidrains, rosinality, seed_voken, taming
from topovq.interop.library import Library, Replacement

LIBRARIES: tuple[Library, ...] = (
    *lucidrains.LIBRARIES,
    *hf_diffusers.LIBRARIES,
    *encodec.LIBRARIES,
    *dac.LIBRARIES,
    *rosinality.LIBRARIES,
    *llamagen.LIBRARIES,
    *taming.LIBRARIES,
    *seed_voken.LIBRARIES,
)


class _Place(NamedTuple):
    path: str
    parent: nn.Module
    name: str
    child: nn.Module


def replace_quantizers(model: nn.Module, **options: Any) -> list[str]:
    """Turn every quantizer inside `model` into a Kohonen one, in place; returns their names, such as ["vq"].

    Replaced are the classes of other libraries that `topovq.interop` knows. Codes, statistics, projections, settings,
    device, type and mode are kept, so the model gives the same tokens as before; from now on its codes learn by
    Kohonen's rule. `options` are KohonenVQ's arguments and come before the settings that were found. Either all are
    replaced, or an error says why one cannot be.
    """
    if _library_of(model) is not None:
        raise ValueError(
            f"the model is itself a {type(model).__name__}, which cannot be replaced in place: give the module that "
            "holds it, such as torch.nn.Sequential(quantizer)"
        )
    for owner in model.modules():
        for library in LIBRARIES:
            library.check_owner(owner)

    def make(child: nn.Module) -> nn.Module:
        library = _library_of(child)
        assert library is not None
        return library.replace(child, options)

    places = list(_places(model, lambda module: _library_of(module) is not None))
    if not places:
        raise ValueError(_nothing_to_replace(model))
    return _exchange(model, places, make, "replaced")


def export_quantizers(model: nn.Module) -> list[str]:
    """Turn what `replace_quantizers` put into `model` into the original classes again, in place; returns their names.

    They hold the codes of now and, where the original keeps them, the statistics. The state dict has its original
    names, and the model runs where topovq is not installed. Codes that are parameters are new ones, which an optimizer
    made earlier does not know.
    """
    if isinstance(model, Replacement):
        raise ValueError(
            f"the model is itself a {type(model).__name__}, which cannot be exchanged in place: give the module that "
            "holds it, or use .restored()"
        )
    places = list(_places(model, lambda module: isinstance(module, Replacement)))
    if not places:
        raise ValueError(f"{type(model).__name__} holds nothing that replace_quantizers made: replace, train, export")

    def make(child: nn.Module) -> nn.Module:
        assert isinstance(child, Replacement)
        return child.restored()

    return _exchange(model, places, make, "exported")


def _library_of(module: nn.Module) -> Library | None:
    return next((library for library in LIBRARIES if library.is_one(module)), None)


def _places(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> Iterator[_Place]:
    """Where a module that is wanted stands, the outermost of those inside one another; one module in all its places."""
    seen: set[nn.Module] = set()

    def walk(parent: nn.Module, path: str) -> Iterator[_Place]:
        if parent in seen:
            return
        seen.add(parent)
        for name, child in parent._modules.items():
            if child is None:
                continue
            here = f"{path}.{name}".removeprefix(".")
            if wanted(child):
                yield _Place(here, parent, name, child)
            else:
                yield from walk(child, here)

    return walk(model, "")


def _exchange(model: nn.Module, places: list[_Place], make: Callable[[nn.Module], nn.Module], done: str) -> list[str]:
    """Put what `make` makes of each child in its places: all of them, or none."""
    made: dict[nn.Module, nn.Module] = {}
    for place in places:
        if place.child not in made:
            try:
                made[place.child] = make(place.child)
            except (TypeError, ValueError) as error:
                error.add_note(f"This is about {place.path!r}; no quantizer was {done}.")
                raise
    for place in places:
        setattr(place.parent, place.name, made[place.child])
    for owner in model.modules():
        for library in LIBRARIES:
            library.finish_owner(owner)
    return [place.path for place in places]


def _nothing_to_replace(model: nn.Module) -> str:
    near = [
        f"{path!r} ({type(module).__module__}.{type(module).__name__})"
        for path, module in model.named_modules()
        if path and any("quantize" in kind.__name__.lower() for kind in type(module).__mro__)
    ]
    left = f" Left alone were {', '.join(near)}: the name or what they hold differs." if near else ""
    return (
        f"{type(model).__name__} holds no quantizer to replace in its {len(list(model.modules()))} modules: looked for "
        f"{', '.join(library.name for library in LIBRARIES)}; subclasses are left alone.{left}"
    )
