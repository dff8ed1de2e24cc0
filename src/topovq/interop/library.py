"""What the file of one library gives: how its quantizer is recognized, replaced and restored.

Each file of this room knows one library and ends in `LIBRARIES`, a tuple of `Library`, one for each class that can be
replaced; `replace.py` gathers them. No file imports the library it knows: many are repositories whose classes were
copied into somebody's model. So a class is recognized by its name and by what it holds.

A replacement
- derives from `Replacement`, and is or holds a KohonenVQ;
- has the attributes, arguments and results that callers of the original use, and gives the same tokens in eval mode;
- keeps codes, statistics, settings, device, type and mode; a setting without a counterpart raises with its name;
- leaves the encoder's gradient what it was; the term of the loss that moved the codes is left out;
- gives the original back: `restored()` is built from `Original(module)`, made when the module was replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

Options = dict[str, Any]


METRIC = {"metric", "use_cosine_sim"}  # two arguments that decide the same


def given_first(options: Options, found: Options) -> Options:
    """KohonenVQ's arguments: `options`, and of what was `found` in a module all that they leave open."""
    decided = {*options, *(METRIC if METRIC & options.keys() else ())}
    return {**{name: value for name, value in found.items() if name not in decided}, **options}


def _anything_goes(module: nn.Module) -> None:
    return None


class Library(NamedTuple):
    """One class of one library."""

    name: str
    """As errors say it: "VectorQuantizer of diffusers"."""
    class_name: str
    matches: Callable[[nn.Module], bool]
    """Whether a module of that class name is the one that is meant."""
    replace: Callable[[nn.Module, Options], nn.Module]
    """The replacement, given KohonenVQ's arguments that come before the settings found."""
    check_owner: Callable[[nn.Module], None] = _anything_goes
    """Called with every module that may hold a quantizer; raises where it uses one as no replacement can be used."""
    finish_owner: Callable[[nn.Module], None] = _anything_goes
    """Called with every module once all its quantizers were replaced, or restored: ties what they share."""

    def is_one(self, module: nn.Module) -> bool:
        return type(module).__name__ == self.class_name and self.matches(module)


class Replacement:
    """What stands where another library's quantizer stood."""

    original: Original | None = None

    def remember(self, theirs: nn.Module, like: Tensor) -> None:
        """Keep what is left to know of a module whose codes had the type of `like`, and its mode."""
        assert isinstance(self, nn.Module)
        # Follows .half() and the like, which the codes do not.
        self.register_buffer("like", like.detach().new_empty(0), persistent=False)
        self.original = Original(theirs)
        self.train(theirs.training)

    def restored(self) -> nn.Module:
        """The original class again, with the codes and statistics of now."""
        raise NotImplementedError

    def remembered(self) -> Original:
        if self.original is None:
            raise ValueError(
                f"this {type(self).__name__} was loaded, not made by replace_quantizers, and does not know its "
                "original: build the original model, replace its quantizers, load the state dict, then export"
            )
        return self.original


class Original:
    """A module without its tensors' memory: what is left to know once its codes live elsewhere."""

    def __init__(self, module: nn.Module) -> None:
        parameters = set(module.parameters())
        memo: dict[int, Any] = {}
        for value in module.state_dict(keep_vars=True).values():
            empty = value.detach().to("meta")
            memo[id(value)] = nn.Parameter(empty, value.requires_grad) if value in parameters else empty
        self.skeleton = copy.deepcopy(module, memo)

    def filled(self, tensors: Mapping[str, Tensor], like: Tensor, training: bool) -> nn.Module:
        """A new module of the original class that holds these tensors, under the names of its state dict.

        Floating-point tensors get the type of `like`, and all its device.
        """
        module = copy.deepcopy(self.skeleton)
        cast = {
            name: value.detach().to(like.device, like.dtype if value.is_floating_point() else None, copy=True)
            for name, value in tensors.items()
        }
        module.load_state_dict(cast, assign=True)
        return module.to(like.device).train(training)


def holds(
    module: nn.Module, attributes: Iterable[str], optional: Iterable[str] = (), methods: Iterable[str] = ()
) -> bool:
    """Whether a module has these attributes, beside `optional` ones no other, and these methods.

    Counted are parameters, buffers, modules and plain attributes, without those whose name starts with an underscore.
    """
    own = {*vars(module), *module._parameters, *module._buffers, *module._modules}
    public = {name for name in own if not name.startswith("_") and name not in ("training", "forward")}
    return public - set(optional) == set(attributes) and all(
        callable(getattr(type(module), name, None)) for name in methods
    )


def package(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]
