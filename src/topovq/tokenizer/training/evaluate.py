"""How well a model does on a data set's validation images."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from topovq.distributed import World
from topovq.metrics import code_counts, perplexity, to_psnr, usage
from topovq.tokenizer.atlas import to_planes
from topovq.tokenizer.data import Source
from topovq.tokenizer.models import Tokenizer, Tokens, can_be_graphed, codes_of
from topovq.tokenizer.training.step import side_stream


def validate(
    model: Tokenizer, source: Source, batch_size: int, world: World, *, bf16: bool = False, part: str | None = None
) -> dict[str, float]:
    """Figures over the whole validation set (or one `part` of it), the same in every process.

    loss            mean squared reconstruction error per element in normalized space: what the paper's tables report
    quantizer_loss  the quantizers' own losses (0.25 * commitment)
    psnr            of the uint8 images, in dB
    perplexity      exp(-sum p log p) of the tokens, the mean over levels; of several also `perplexity_0`, ...
    usage           the share of the codes that are chosen at least once in these tokens, likewise
    tokens          how many tokens perplexity and usage rest on, of all levels; of several also `tokens_0`, ...
    images          how many images there were
    """
    batches = source.validation(batch_size, rank=world.rank, world_size=world.size, part=part)
    totals_4, counts_LK = _over(model, (batch.to(world.device, non_blocking=True) for batch in batches), world, bf16)
    return _summary(totals_4, counts_LK, source, world)


class Validation:
    """`validate`, again and again while a model trains.

    Where the data set stays on the device, so do its validation images, and from the second time on the whole pass is
    one CUDA graph.
    """

    def __init__(self, model: Tokenizer, source: Source, batch_size: int, world: World, bf16: bool) -> None:
        self.model, self.source, self.batch_size, self.world, self.bf16 = model, source, batch_size, world, bf16
        alone = world.device.type == "cuda" and world.size == 1 and source.resident() is not None
        self.stays = alone and can_be_graphed(model)
        self.batches: list[Tensor] = []
        self.captured: torch.cuda.CUDAGraph | None = None
        self.figures: tuple[Tensor, Tensor] | None = None

    def __call__(self, part: str | None = None) -> dict[str, float]:
        if not self.stays or part is not None:
            return validate(self.model, self.source, self.batch_size, self.world, bf16=self.bf16, part=part)
        if not self.batches:  # the first time: kernels are compiled and chosen, which no graph may contain
            self.batches = [batch.to(self.world.device) for batch in self.source.validation(self.batch_size)]
            figures = _over(self.model, self.batches, self.world, self.bf16)
        else:
            if self.captured is None:
                self.captured = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.captured, stream=side_stream(self.world.device)):
                    self.figures = _over(self.model, self.batches, self.world, self.bf16)
            self.captured.replay()
            assert self.figures is not None
            figures = self.figures
        return _summary(*figures, self.source, self.world)

    def close(self) -> None:
        """Let go of the graph and of the images on the device."""
        self.captured, self.figures, self.batches = None, None, []


def _over(model: Tokenizer, batches: Iterable[Tensor], world: World, bf16: bool) -> tuple[Tensor, Tensor]:
    """`_figures` of all batches, on this rank."""
    totals_4 = torch.zeros(4, dtype=torch.float64, device=world.device)
    counts_LK: Tensor | None = None
    training = model.training
    model.eval()
    try:
        with torch.autocast(world.device.type, torch.bfloat16, enabled=bf16):  # around all: weights are cast once
            for batch in batches:
                totals, counts = _figures(model, batch)
                totals_4 += totals
                counts_LK = counts if counts_LK is None else counts_LK + counts
            if counts_LK is None:  # a rank without images still takes part in the sums
                side = model.stride
                blank = torch.zeros(1, model.channels, side, side, dtype=torch.uint8, device=world.device)
                counts_LK = torch.zeros_like(_figures(model, blank)[1])
    finally:
        model.train(training)
    return totals_4, counts_LK


def _summary(totals_4: Tensor, counts_LK: Tensor, source: Source, world: World) -> dict[str, float]:
    world.sum(totals_4)
    world.sum(counts_LK)
    loss, quantizer_loss, pixel_error, images = totals_4.tolist()
    if images == 0:
        raise ValueError(f"the validation set of {source.name!r} is empty")
    per_level = [(float(perplexity(c)), float(usage(c)), int(c.sum())) for c in counts_LK.unbind()]
    figures = {
        "loss": loss / images,
        "quantizer_loss": quantizer_loss / images,
        "psnr": to_psnr(max(pixel_error / images, 1e-12)),
        "perplexity": sum(p for p, _, _ in per_level) / len(per_level),
        "usage": sum(u for _, u, _ in per_level) / len(per_level),
        "tokens": sum(n for _, _, n in per_level),
        "images": int(images),
    }
    if len(per_level) > 1:
        for level, (level_perplexity, level_usage, tokens) in enumerate(per_level):
            figures |= {f"perplexity_{level}": level_perplexity, f"usage_{level}": level_usage}
            figures[f"tokens_{level}"] = tokens
    return figures


@torch.no_grad()
def _figures(model: Tokenizer, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over a batch, float64 [4] (two losses, pixel error, images), and token counts int64 [L, K]."""
    output = model(x_BCHW)
    difference = model.to_pixels(output.reconstruction).float() - x_BCHW.float()
    means = torch.stack([output.reconstruction_loss, output.quantizer_loss, difference.square().mean()]).double()
    images = x_BCHW.shape[0]
    totals = torch.cat([means * images, means.new_full((1,), images)])
    return totals, count_tokens(output.tokens, codes_of(model.quantizers))


def count_tokens(tokens: Tokens, codebook_size: int) -> Tensor:
    """How often each code occurs: int64 [L, K], one row per level and, for a residual quantizer, per stage."""
    return torch.stack([code_counts(plane, codebook_size) for plane in to_planes(tokens)])
