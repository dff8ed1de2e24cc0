"""A small causal transformer over the tokens of an image: read it from top to bottom.

An image is one sequence. Levels come one after the other, the coarsest first, so that the bottom of a VQ-VAE-2 is
predicted with all of its top in view. Within a level places come row by row, and at a place the stages of a residual
quantizer come one after the other: each stage sees the stages before it at the same place, and everything at the
places before. Each level and stage has its own codes, so each has its own input and its own head: a *slot*.

Step t predicts token t from the tokens before it. Its input is token t - 1 (nothing at step 0), a learned vector for
the place t, and one for the class. The rotary angles say where token t lies: half of them turn with its row, half with
its column, in cells of the finest level, so that the same place has the same angles at every level.

Legend: B images, T tokens of an image, D width, H heads, d = D / H, K codes, C dimensions of a code, S slots.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn

from topovq.grid import Grid, check_range
from topovq.pretrained import HubModel
from topovq.prior.choosing import check_drawing
from topovq.prior.head import FlatHead, Head, MapHead
from topovq.prior.layers import Block, TokenInput, rotary_turns

if TYPE_CHECKING:
    from topovq.tokenizer.atlas import Chart
    from topovq.tokenizer.models import Tokenizer

KIND = "prior"  # what config.json calls it
HEADS = ("map", "flat", "tied")
DROPPED = 0.1  # share of the labels that training hides, so that the model can do without one: guidance needs both
MOST_TOKENS, MOST_LAYERS = 1 << 16, 1024  # more would take for ever to build
SPREAD = 0.02  # standard deviation of the weights at first


class Prior(nn.Module, HubModel):
    """p(tokens of an image | class).

    shapes     of one image's tokens, one a level, coarsest first: [[8, 8]], [[8, 8], [16, 16]], or [[8, 8, 4]] of a
               residual quantizer with 4 stages (`Tokenizer.token_shapes`)
    grids      the maps (`Grid.to_dict()`), one for each level and stage
    head       "map" (MapHead), "flat" or "tied" (FlatHead), or the sizes of the digits of a token's number, such as
               [64, 4096] for its first 6 and its other 12 bits
    splits     of a MapHead, the same for every map
    code_dim   dimensions of the codes, which inputs and heads "map" and "tied" then know; give them by `set_codes`.
               0: none
    classes    number of classes; 0 for a prior that is not conditional
    class_names  their names, if they have any
    dim, layers, heads   sizes of the transformer
    tokenizer  id of the tokenizer whose tokens these are, the SHA-256 of its weights (`topovq.storage.model_id`)
    run        the folder that it lay in when the prior was trained
    """

    cos_Td: Tensor
    sin_Td: Tensor

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        grids: Sequence[dict[str, Any]],
        *,
        head: str | Sequence[int] = "map",
        splits: Sequence[Sequence[int]] | None = None,
        code_dim: int = 0,
        classes: int = 0,
        class_names: Sequence[str] | None = None,
        dim: int = 384,
        layers: int = 6,
        heads: int = 6,
        tokenizer: str | None = None,
        run: str | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(shapes, grids, head, dim, layers, heads)
        if class_names is not None and len(class_names) != classes:
            raise ValueError(f"class_names has {len(class_names)} names, but there are {classes} classes")
        self.shapes = [tuple(shape) for shape in shapes]
        self.grids = [Grid.from_dict(grid) for grid in grids]
        self.classes, self.class_names = classes, list(class_names) if class_names is not None else None
        self.dim, self.layers, self.heads, self.tokenizer, self.run = dim, layers, heads, tokenizer, run
        slots, places = _layout(self.shapes)
        self.length = len(slots)
        self.slot_of: list[int] = slots  # of each step
        for slot in range(len(grids)):  # the steps of each slot
            steps = torch.tensor([t for t, s in enumerate(slots) if s == slot])
            self.register_buffer(f"steps_{slot}", steps, persistent=False)
        # A ModuleList does not say what its modules are.
        self.inputs = cast(Sequence[TokenInput], nn.ModuleList(TokenInput(dim, g, code_dim) for g in self.grids))
        self.place = nn.Embedding(self.length, dim)
        self.label = nn.Embedding(classes + 1, dim)  # the last is no label
        self.blocks = cast(Sequence[Block], nn.ModuleList(Block(dim, heads) for _ in range(layers)))
        self.norm = nn.RMSNorm(dim)
        made = (_make_head(head, dim, grid, splits, code_dim) for grid in self.grids)
        self.outputs = cast(Sequence[Head], nn.ModuleList(made))
        turns = rotary_turns(places, dim // heads)
        self.register_buffer("cos_Td", turns.cos(), persistent=False)
        self.register_buffer("sin_Td", turns.sin(), persistent=False)
        self._start()

    @classmethod
    def of(cls, model: Tokenizer, **options: Any) -> Self:
        """A prior for the tokens of `model`, with its maps and its codes."""
        maps = maps_of(model)
        grids = [chart.grid.to_dict() for chart in maps]
        prior = cls(model.token_shapes, grids, code_dim=maps[0].codes_KD.shape[1], **options)
        prior.set_codes([chart.codes_KD for chart in maps])
        return prior

    def _start(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=SPREAD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            for last in (block.out, block.down):  # their sum stays as large however many layers there are
                nn.init.normal_(last.weight, std=SPREAD / math.sqrt(2 * self.layers))

    @torch.no_grad()
    def set_codes(self, codes: Sequence[Tensor]) -> None:
        """Take the codes [K, C] of each slot, which inputs use, and heads on the map or tied. They are saved with the
        weights."""
        for given, taken, head in zip(codes, self.inputs, self.outputs, strict=True):
            taken.set_codes(given)
            if isinstance(head, (MapHead, FlatHead)) and head.takes_codes:
                head.set_codes(given)

    # Images' tokens as one sequence

    def to_sequence(self, levels: Tensor | Sequence[Tensor]) -> Tensor:
        """Tokens int64 [B, h, w] (or [B, h, w, stages]) of each level -> [B, T]."""
        levels = [levels] if isinstance(levels, Tensor) else list(levels)
        found = [tuple(level.shape[1:]) for level in levels]
        if found != self.shapes:
            raise ValueError(f"tokens have the shapes {found} an image, but the prior's are {self.shapes}")
        return torch.cat([level.flatten(1) for level in levels], 1)

    def to_levels(self, tokens_BT: Tensor) -> tuple[Tensor, ...]:
        """A sequence [B, T] -> tokens of each level, as `Tokenizer.decode` takes them."""
        parts = tokens_BT.split([math.prod(shape) for shape in self.shapes], 1)
        return tuple(part.unflatten(1, shape) for part, shape in zip(parts, self.shapes))

    def steps(self, slot: int) -> Tensor:
        """The steps int64 whose tokens belong to a slot: one of the maps, in the order of `grids`."""
        found: Tensor = getattr(self, f"steps_{slot}")
        return found

    def check_tokens(self, tokens_BT: Tensor) -> None:
        """Refuse tokens that are no codes of their maps; asks the device."""
        self._check_sequence("tokens", tokens_BT.cpu())

    def _check_sequence(self, what: str, tokens_BT: Tensor, masked: bool = False) -> None:
        """The same where asking costs nothing: on the CPU; the shape in any case."""
        if tokens_BT.ndim != 2 or tokens_BT.shape[1] != self.length:
            raise ValueError(f"{what} of shape {tuple(tokens_BT.shape)} are not [images, {self.length}]")
        if tokens_BT.device.type == "cpu" and not torch.compiler.is_compiling():
            for slot, grid in enumerate(self.grids):
                check_range("token", tokens_BT[:, self.steps(slot).cpu()], grid.size, masked=masked)

    def _check_labels(self, labels_B: Tensor | None) -> None:
        if labels_B is not None and not self.classes:
            raise ValueError("labels were given, but this prior knows no classes: leave them out")
        if labels_B is not None:
            check_range("label", labels_B, self.classes)

    # Probabilities

    def forward(self, tokens_BT: Tensor, labels_B: Tensor | None = None, width: Tensor | float | None = None) -> Tensor:
        """The mean cross entropy of a token in nats; `width` smooths the targets on their maps, as in `Head.loss`."""
        self._check_labels(labels_B)
        if self.training and self.classes and labels_B is not None:
            hide = torch.rand(labels_B.shape, device=labels_B.device) < DROPPED
            labels_B = labels_B.masked_fill(hide, self.classes)
        hidden_BTD = self.hidden(tokens_BT, labels_B)
        total = hidden_BTD.new_zeros((), dtype=torch.float32)
        for slot, head in enumerate(self.outputs):
            at = self.steps(slot)
            share = len(at) / self.length
            total = total + share * head.loss(self._at(hidden_BTD, at), self._at(tokens_BT, at), width)
        return total

    def log_probs(self, tokens_BT: Tensor, labels_B: Tensor | None = None) -> Tensor:
        """log p of each token given those before it, in nats: float32 [B, T]. Bits are these over -log(2)."""
        self._check_labels(labels_B)
        hidden_BTD = self.hidden(tokens_BT, labels_B)
        found = hidden_BTD.new_empty(tokens_BT.shape, dtype=torch.float32)
        for slot, head in enumerate(self.outputs):
            at = self.steps(slot)
            found[:, at] = head.log_probs(hidden_BTD[:, at], tokens_BT[:, at])
        return found

    def hidden(self, tokens_BT: Tensor, labels_B: Tensor | None = None) -> Tensor:
        """Hidden states [B, T, D], what the heads take: that of step t has seen the tokens before t. Here and in `step`
        a label of `classes`, one more than there is, stands for none."""
        self._check_sequence("tokens", tokens_BT)
        x_BTD = self._inputs(tokens_BT, labels_B)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos_Td, self.sin_Td)
        return self.norm(x_BTD)

    def _at(self, x: Tensor, steps: Tensor) -> Tensor:
        return x if len(self.grids) == 1 else x[:, steps]

    def _inputs(self, tokens_BT: Tensor, labels_B: Tensor | None) -> Tensor:
        """Inputs [B, T, D] of all steps: step t gets token t - 1."""
        x_BTD = self._conditions(len(tokens_BT), slice(None), labels_B)
        given_BTD = torch.zeros_like(x_BTD)
        for slot, token_input in enumerate(self.inputs):
            at = self.steps(slot)
            at = at[:-1] if self.slot_of[-1] == slot else at  # the last token is nobody's input
            given_BTD[:, at + 1] = token_input(tokens_BT[:, at])
        return x_BTD + given_BTD

    def _conditions(self, batch: int, steps: slice, labels_B: Tensor | None) -> Tensor:
        """What `steps` know before they see a token: their place and the class, [B, T, D]."""
        if labels_B is None:
            labels_B = torch.full((batch,), self.classes, device=self.place.weight.device)
        if labels_B.shape != (batch,):
            raise ValueError(f"labels of shape {tuple(labels_B.shape)} do not fit {batch} images: one each is expected")
        check_range("label", labels_B, self.classes + 1)
        return self.place.weight[steps] + self.label(labels_B)[:, None]

    # Sampling

    @torch.no_grad()
    def sample(
        self,
        number: int,
        labels_B: Tensor | None = None,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        guidance: float = 1.0,
        generator: torch.Generator | None = None,
        uniform_BTF: Tensor | None = None,
        known_BT: Tensor | None = None,
    ) -> Tensor:
        """Tokens int64 [B, T] of `number` images, drawn token by token; the host waits for nothing.

        labels_B     classes int64 [B]; without them the prior is used without a condition
        temperature, top_p   as in `Head.sample`, also for what cannot be drawn
        guidance     above 1 follows the labels closer (classifier-free guidance), at twice the work; 1 leaves it out
        generator    of the device that the prior is on
        uniform_BTF  random numbers to use instead, as `uniform` makes them
        known_BT     tokens to keep, -1 where one is to be drawn: what comes after a place has no say in it
        """
        device = self.place.weight.device
        check_drawing(temperature, top_p, guidance)
        if guidance != 1 and labels_B is None:
            raise ValueError(f"guidance={guidance!r} needs labels: it strengthens the condition")
        self._check_labels(labels_B)
        if known_BT is not None:
            self._check_sequence("known tokens", known_BT, masked=True)
        guided = guidance != 1
        if guided:
            labels_B = torch.cat([labels_B, torch.full_like(labels_B, self.classes)])  # type: ignore[list-item, arg-type]
        cache = Cache(self, number * (2 if guided else 1))
        tokens_BT = torch.empty(number, self.length, dtype=torch.long, device=device)
        if uniform_BTF is None:
            uniform_BTF = self.uniform(number, generator)
        if uniform_BTF.shape[:2] != (number, self.length):
            found = tuple(uniform_BTF.shape)
            raise ValueError(f"random numbers of shape {found} do not fit: `uniform({number})` makes them")
        for t, slot in enumerate(self.slot_of):
            # At step 0 of no meaning, and not looked at; -1 where nothing could be drawn.
            before_B = tokens_BT[:, t - 1].clamp(min=0)
            hidden_BD = self.step(before_B.repeat(2) if guided else before_B, t, labels_B, cache)
            head = self.outputs[slot]
            with_D, without_D = (hidden_BD[:number], hidden_BD[number:]) if guided else (hidden_BD, None)
            drawn_B = head.pick(with_D, uniform_BTF[:, t], temperature, top_p, without=without_D, guidance=guidance)
            if known_BT is not None:
                drawn_B = torch.where(known_BT[:, t] >= 0, known_BT[:, t], drawn_B)
            tokens_BT[:, t] = drawn_B
        return tokens_BT

    def uniform(self, number: int, generator: torch.Generator | None = None) -> Tensor:
        """The random numbers in [0, 1) that `number` images take, float32 [B, T, F], on the generator's device."""
        factors = max(len(head.factors) for head in self.outputs)
        device = generator.device if generator is not None else self.place.weight.device
        return torch.rand(number, self.length, factors, generator=generator, device=device)

    def step(self, before_B: Tensor, t: int, labels_B: Tensor | None, cache: Cache) -> Tensor:
        """The hidden state [B, D] of step t alone, from token t - 1 (not looked at if t is 0) and the cache, which has
        the steps before t and gets this one."""
        here = slice(t, t + 1)
        x_B1D = self._conditions(len(before_B), here, labels_B)
        if t:
            x_B1D = x_B1D + self.inputs[self.slot_of[t - 1]](before_B)[:, None]
        for block, kept in zip(self.blocks, cache.layers):
            x_B1D = block(x_B1D, self.cos_Td[here], self.sin_Td[here], kept, t)
        return self.norm(x_B1D)[:, 0]

    # Files

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments, JSON-able: `config.json`."""
        return json.loads(
            json.dumps({"model": KIND, **self._hub_mixin_config, "tokenizer": self.tokenizer, "run": self.run})
        )

    @classmethod
    def _check_config(cls, config: dict[str, Any], path: Path) -> dict[str, Any]:
        if config.get("model") != KIND:
            raise ValueError(f"{path.parent} holds no prior, but {config.get('model', 'something else')!r}")
        return super()._check_config({name: value for name, value in config.items() if name != "model"}, path)


class Cache:
    """Keys and values of all steps, for every layer: memory that is taken once and filled step by step."""

    def __init__(self, prior: Prior, batch: int) -> None:
        weight = prior.place.weight
        kind = torch.get_autocast_dtype(weight.device.type) if torch.is_autocast_enabled(weight.device.type) else None
        shape = (prior.layers, 2, batch, prior.heads, prior.length, prior.dim // prior.heads)
        whole = torch.zeros(shape, device=weight.device, dtype=kind or weight.dtype)
        self.layers = [(keys, values) for keys, values in whole]


def _layout(shapes: Sequence[tuple[int, ...]]) -> tuple[list[int], list[tuple[float, float]]]:
    """The slot of each step, and its (row, column) in cells of the finest level."""
    finest = max(shapes, key=lambda shape: shape[0] * shape[1])
    slots: list[int] = []
    places: list[tuple[float, float]] = []
    first = 0
    for height, width, *deep in shapes:
        stages = deep[0] if deep else 1
        for row in range(height):
            for column in range(width):
                at = ((row + 0.5) * finest[0] / height - 0.5, (column + 0.5) * finest[1] / width - 0.5)
                slots += range(first, first + stages)
                places += [at] * stages
        first += stages
    return slots, places


def _make_head(head: str | Sequence[int], dim: int, grid: Grid, splits: Any, code_dim: int) -> Head:
    if head == "map":
        return MapHead(dim, grid, splits=splits, code_dim=code_dim or None)
    if isinstance(head, str):
        return FlatHead(dim, grid, code_dim=code_dim if head == "tied" else None)
    return MapHead(dim, grid.size, splits=[tuple(head)])


def _check_sizes(
    shapes: Sequence[Sequence[int]],
    grids: Sequence[object],
    head: str | Sequence[int],
    dim: int,
    layers: int,
    heads: int,
) -> None:
    if not shapes or not all(len(shape) in (2, 3) and min(shape) >= 1 for shape in shapes):
        raise ValueError(f"shapes={shapes!r} must be [rows, columns] or [rows, columns, stages] for each level")
    tokens = sum(map(math.prod, shapes))
    if tokens > MOST_TOKENS or layers > MOST_LAYERS:
        raise ValueError(
            f"{tokens:,} tokens an image and layers={layers:,} are too many: {MOST_TOKENS:,} and {MOST_LAYERS:,} can be"
        )
    slots = sum(shape[2] if len(shape) == 3 else 1 for shape in shapes)
    if len(grids) != slots:
        raise ValueError(f"shapes={shapes!r} have {slots} levels and stages in all, but there are {len(grids)} grids")
    if isinstance(head, str) and head not in HEADS:
        raise ValueError(f"head={head!r} is unknown; choose {', '.join(HEADS)}, or give the sizes of a token's digits")
    check_heads(dim, heads)


def check_heads(dim: int, heads: int) -> None:
    """Refuse a width that the heads cannot share."""
    if dim % (4 * heads):
        raise ValueError(f"dim={dim} must be a multiple of 4 * heads, which is {4 * heads}")


def maps_of(model: Tokenizer) -> list[Chart]:
    """The maps of a tokenizer's codes; one without is refused."""
    from topovq.tokenizer.atlas import charts

    if not hasattr(model, "quantizers"):
        raise TypeError(f"{type(model).__name__} is no tokenizer: expected what topovq.load(RUN) gives")
    maps = charts(model)
    if not maps:
        raise ValueError("the codes of this model have no places on a map; give Prior its shapes and grids yourself")
    return maps
