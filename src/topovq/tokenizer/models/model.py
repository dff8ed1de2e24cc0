"""What every model here is: images in, tokens out, and back.

A model owns its normalization, so `encode` takes uint8 images and `decode` returns them; its configuration and
weights are saved as JSON and safetensors (`save_pretrained`, `from_pretrained`).
Legend: B images, C channels, H x W pixels; level 0 is the coarsest; h x w its latent grid, K codes of D dimensions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topovq.pretrained import CARD, HubModel
from topovq.quantizers import Quantized, Quantizer, ResidualVQ
from topovq.tokenizer.models.blocks import halvings
from topovq.tokenizer.models.inputs import as_batch
from topovq.tokenizer.models.registry import as_meant, build_quantizer, spelled_out

if TYPE_CHECKING:
    from topovq.tokenizer.models.inputs import Images

Tokens = Tensor | tuple[Tensor, ...]
LARGEST = 9_459  # side of the images of a model that is loaded: larger ones are not decoded (data/decode.py)


class Output(NamedTuple):
    """What one forward pass gives.

    reconstruction       [B, C, H, W] in normalized space
    tokens               int64 [B, h, w], or a tuple of them, one per level
    loss                 scalar: reconstruction_loss + quantizer_loss
    reconstruction_loss  mean squared error per element in normalized space
    quantizer_loss       the quantizers' own losses, weights applied (0.25 * commitment for KSOM and EMA-VQ)
    """

    reconstruction: Tensor
    tokens: Tokens
    loss: Tensor
    reconstruction_loss: Tensor
    quantizer_loss: Tensor


class Tokenizer(nn.Module, HubModel):
    """Base of VQVAE, VQVAE2 and VQGAN: normalization, losses, tokens, saving.

    Subclasses give `features`, `reconstruct` and, with several levels, `descend`.
    """

    kind: ClassVar[str]
    quantizers: Sequence[Quantizer]  # one per level, coarsest first
    mean_C11: Tensor
    std_C11: Tensor
    card: str | None = None  # what README.md in its folder says; what is saved or uploaded next has it, too

    def __init__(
        self, image_size: int, strides: Sequence[int], channels: int, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__()
        stride = 2 ** sum(map(halvings, strides))
        if not isinstance(image_size, int) or image_size < stride or image_size % stride:
            raise ValueError(f"image_size={image_size!r} must be a multiple of the model's total stride, {stride}")
        for name, values in (("mean", mean), ("std", std)):
            if len(values) != channels:
                raise ValueError(f"{name}={list(values)} has {len(values)} entries, but there are {channels} channels")
        if not all(value > 0 for value in std):
            raise ValueError(f"std={list(std)} must be positive")
        self.image_size, self.strides, self.stride, self.channels = image_size, tuple(strides), stride, channels
        # Not in the weights: the configuration has them, and a wrong copy could disagree with it.
        self.register_buffer("mean_C11", torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1), persistent=False)
        self.register_buffer("std_C11", torch.tensor(std, dtype=torch.float32).view(-1, 1, 1), persistent=False)

    def _make_quantizers(self, levels: int, kind: str, dim: int, codebook_size: int, options: dict[str, Any]) -> None:
        made = nn.ModuleList(build_quantizer(kind, dim, codebook_size, options) for _ in range(levels))
        self.quantizers = cast(Sequence[Quantizer], made)  # a ModuleList does not say what its modules are

    # The three stretches of network between quantizers. Training compiles them one by one: what is compiled does then
    # not depend on the quantizer, and serves every run of the same architecture.

    def begin(self, x_BCHW: Tensor) -> list[Tensor]:
        """Images -> `features` of them."""
        return self.features(self.normalize(x_BCHW))

    def features(self, x_BCHW: Tensor) -> list[Tensor]:
        """Normalized images -> one feature map per level, coarsest first; the first is what its quantizer takes."""
        raise NotImplementedError

    def descend(self, level: int, feature: Tensor, above: Tensor) -> Tensor:
        """What the quantizer of `level` takes, from its feature map and the codes of the level above."""
        raise NotImplementedError

    def error(self, quantized: Sequence[Tensor], x_BCHW: Tensor) -> Tensor:
        """Mean squared error per element, in normalized space, of what these codes reconstruct of images."""
        return F.mse_loss(self.reconstruct(quantized).float(), self.normalize(x_BCHW))

    def quantize(self, features: Sequence[Tensor]) -> list[Quantized]:
        """Feature maps -> what the quantizer of each level makes of them, coarsest first."""
        levels: list[Quantized] = [self.quantizers[0](features[0])]
        for level in range(1, len(self.quantizers)):
            levels.append(self.quantizers[level](self.descend(level, features[level], levels[-1].quantized)))
        return levels

    def reconstruct(self, quantized: Sequence[Tensor]) -> Tensor:
        """Codes [B, D, h, w] per level, coarsest first -> normalized images [B, C, H, W]."""
        raise NotImplementedError

    def forward(self, x_BCHW: Tensor) -> Output:
        """Images [B, C, H, W], uint8 pixels or already normalized floats -> Output. In training mode the codes move."""
        levels = self.quantize(self.begin(x_BCHW))
        reconstruction = self.reconstruct([level.quantized for level in levels])
        reconstruction_loss = F.mse_loss(reconstruction.float(), self.normalize(x_BCHW))
        quantizer_loss = _total_loss(levels)
        loss = reconstruction_loss + quantizer_loss
        return Output(
            reconstruction, _unwrap([level.indices for level in levels]), loss, reconstruction_loss, quantizer_loss
        )

    def losses(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """`loss` and `reconstruction_loss` of `forward`, with nothing else to outlive it."""
        levels = self.quantize(self.begin(x_BCHW))
        reconstruction_loss = self.error([level.quantized for level in levels], x_BCHW)
        return reconstruction_loss + _total_loss(levels), reconstruction_loss

    def normalize(self, x_BCHW: Tensor) -> Tensor:
        """uint8 pixels -> (pixels - mean) / std in fp32; floats are taken as normalized already."""
        if x_BCHW.ndim != 4 or x_BCHW.shape[1] != self.channels:
            raise ValueError(f"images have shape {tuple(x_BCHW.shape)}, expected [B, {self.channels}, H, W]")
        if x_BCHW.shape[2] % self.stride or x_BCHW.shape[3] % self.stride:
            raise ValueError(
                f"images of {x_BCHW.shape[2]}x{x_BCHW.shape[3]} must be a multiple of {self.stride} a side"
            )
        if x_BCHW.dtype == torch.uint8:
            return (x_BCHW.float() - self.mean_C11) / self.std_C11
        if not x_BCHW.is_floating_point():
            raise TypeError(f"images of {x_BCHW.dtype} are neither uint8 pixels nor normalized floats")
        return x_BCHW

    def to_pixels(self, x_BCHW: Tensor) -> Tensor:
        """Normalized floats -> uint8 pixels, rounded and clamped."""
        return (x_BCHW.float() * self.std_C11 + self.mean_C11).round().clamp(0, 255).to(torch.uint8)

    @torch.no_grad()
    def encode(self, images: Images) -> Tokens:
        """Images -> tokens int64 [B, h, w], a tuple where there are levels. Codes stay put.

        images  a tensor [B, C, H, W]: uint8 pixels, floats in [0, 1], or floats that are normalized as `normalize`
                does it; or a PIL image, the path of an image file, or a list of these, of which the central square is
                scaled to `image_size`
        """
        return self._tokens(as_batch(images, self))

    def _tokens(self, x_BCHW: Tensor) -> Tokens:
        training = self.training
        self.eval()
        try:
            return _unwrap([level.indices for level in self.quantize(self.begin(x_BCHW))])
        finally:
            self.train(training)

    @torch.no_grad()
    def decode(self, tokens: Tokens) -> Tensor:
        """Tokens, as `encode` gives them -> uint8 images [B, C, H, W]."""
        levels = as_levels(tokens)
        if len(levels) != len(self.quantizers):
            raise ValueError(f"got tokens of {len(levels)} levels, but the model has {len(self.quantizers)}")
        return self.to_pixels(self.reconstruct([q.get_output_from_indices(t) for q, t in zip(self.quantizers, levels)]))

    @property
    def token_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of one image's tokens, one per level, for images of `image_size`."""
        sides = [self.image_size // math.prod(self.strides[:depth]) for depth in range(len(self.strides), 0, -1)]
        return [(side, side, *_places(quantizer)) for side, quantizer in zip(sides, self.quantizers)]

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments, JSON-able, and the model's kind: `config.json`."""
        arguments = self._hub_mixin_config
        options = spelled_out(arguments["quantizer"], arguments["quantizer_options"] or {})
        config = {"model": self.kind, **arguments, "quantizer_options": options}
        return json.loads(json.dumps(config))  # tuples become lists here, not after a save

    @classmethod
    def _check_config(cls, config: dict[str, Any], path: Path) -> dict[str, Any]:
        config = {name: value for name, value in config.items() if name != "model"}
        for name in ("mean", "std"):
            values = config.get(name)
            if not isinstance(values, list) or not all(type(v) in (int, float) and math.isfinite(v) for v in values):
                raise ValueError(f"{path} has {name}={values!r}: expected the pixel statistics, a number a channel")
        if type(size := config.get("image_size", 0)) is not int or size > LARGEST:
            raise ValueError(f"{path}: image_size={size!r} must be a whole number of at most {LARGEST:,}")
        if not isinstance(config.get("quantizer_options") or {}, dict):
            raise ValueError(f"{path}: quantizer_options={config['quantizer_options']!r} must be an object, {{...}}")
        return super()._check_config(config, path)

    @classmethod
    def _from_pretrained(cls, *, strict: bool = True, **kwargs: Any) -> Self:
        if "quantizer" in kwargs:
            kwargs["quantizer_options"] = as_meant(kwargs["quantizer"], kwargs.get("quantizer_options") or {})
        return super()._from_pretrained(strict=strict, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **arguments: Any) -> Self:
        """As in every module that can be saved; the folder's model card is kept."""
        model = super().from_pretrained(pretrained_model_name_or_path, **arguments)
        card = Path(pretrained_model_name_or_path) / CARD
        model.card = card.read_text(encoding="utf-8") if card.is_file() else None
        return model

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> str | None:
        """As in every module that can be saved; with the card it was loaded with, unless the folder has one."""
        card = Path(save_directory) / CARD
        if self.card is not None and not card.exists():
            card.parent.mkdir(parents=True, exist_ok=True)
            card.write_text(self.card, encoding="utf-8")
        return super().save_pretrained(save_directory, **options)


def as_levels(tokens: Tokens) -> tuple[Tensor, ...]:
    """Tokens as a tuple of levels, also where there is one."""
    return tokens if isinstance(tokens, tuple) else (tokens,)


def can_be_graphed(model: Tokenizer) -> bool:
    """Whether a forward pass may be part of a CUDA graph: no quantizer waits for the device."""
    return all(quantizer.graphable for quantizer in model.quantizers)


def _places(quantizer: Quantizer) -> tuple[int, ...]:
    """The last axis of a quantizer's tokens, where a vector becomes several: one for each stage or head."""
    number = len(quantizer.maps)
    return (number,) if number > 1 or isinstance(quantizer, ResidualVQ) else ()


def _total_loss(levels: list[Quantized]) -> Tensor:
    losses = [level.loss.float().sum() for level in levels]  # a residual quantizer has one for each of its layers
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def _unwrap(levels: list[Tensor]) -> Tokens:
    return levels[0] if len(levels) == 1 else tuple(levels)
