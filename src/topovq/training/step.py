"""One training step: forward, backward, clip, AdamW; on one CUDA device the whole of it is a single CUDA graph.

Nothing here waits for the device. Losses are added up on the device; `read` starts their copy to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from topovq.models import Tokenizer
from topovq.training.distributed import World
from topovq.training.feed import Feed

WARM_UP = 3  # steps done eagerly before capture, so that kernels are compiled and the optimizer's state exists


def make_optimizer(
    model: nn.Module, learning_rate: float, weight_decay: float, device: torch.device
) -> torch.optim.AdamW:
    cuda = device.type == "cuda"
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, learning_rate, weight_decay=weight_decay, fused=True, capturable=cuda)


class TrainStep:
    """Call it once per step. The first steps on CUDA run eagerly (steps like any other), the rest replay a graph."""

    def __init__(
        self,
        model: Tokenizer,
        optimizer: torch.optim.Optimizer,
        feed: Feed,
        world: World,
        *,
        clip: float = 1.0,
        bf16: bool = False,
        compile: bool = False,
        graph: bool | None = None,
    ) -> None:
        self.model, self.optimizer, self.feed, self.world = model, optimizer, feed, world
        self.clip, self.bf16 = clip, bf16
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # DDP hooks into the backward pass from the host, so several processes run without the graph.
        self.graphed = world.device.type == "cuda" and world.size == 1 if graph is None else graph
        network: nn.Module = cast(nn.Module, torch.compile(model)) if compile else model
        # The quantizers synchronize their own statistics; a broadcast would overwrite them with rank 0's share.
        self.forward: Callable[[Tensor], Any] = (
            DistributedDataParallel(network, broadcast_buffers=False) if world.size > 1 else network
        )
        self.sums_3 = torch.zeros(3, device=world.device)  # loss, reconstruction loss, steps
        self.one = torch.ones((), device=world.device)
        self.captured: torch.cuda.CUDAGraph | None = None
        self.done = 0

    def __call__(self) -> None:
        self.feed.prepare()
        if self.captured is not None:
            self.captured.replay()
        elif self.graphed:
            self._step_aside()
        else:
            self._step()
        self.done += 1

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.bf16):
            output = self.forward(self.feed.batch())
        output.loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.sums_3 += torch.stack([output.loss.detach(), output.reconstruction_loss.detach(), self.one])

    def _step_aside(self) -> None:
        """A step on a side stream, as capture wants it; the last of them also captures (which runs nothing)."""
        device = self.world.device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream(device).wait_stream(stream)
        if self.done + 1 == WARM_UP:
            torch.cuda.empty_cache()  # the graph has memory of its own: what the steps so far used would lie idle
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                self._step()
            self.captured = captured

    def read(self) -> Reading:
        """Start copying this interval's figures to the host and begin a new interval."""
        quantizers = cast(Iterable[Any], self.model.quantizers)
        figures = [torch.stack([q.perplexity.float(), q.usage.float(), q.skipped.float()]) for q in quantizers]
        reading = Reading(torch.cat([self.sums_3, *figures]))
        self.sums_3.zero_()
        return reading


class Reading:
    """Figures on their way from the device; `values()` waits for them and for nothing that was started later."""

    def __init__(self, figures: Tensor) -> None:
        self.host = torch.empty(figures.shape, pin_memory=figures.is_cuda)
        self.host.copy_(figures, non_blocking=True)
        self.arrived: torch.cuda.Event | None = None
        if figures.is_cuda:
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def values(self) -> dict[str, float]:
        """Means of `loss` and `reconstruction_loss` over the interval, its `steps`, and the quantizers' running
        `perplexity` and `usage` (means over levels) and `skipped` (sum)."""
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, reconstruction, steps, *rest = self.host.tolist()
        perplexity, usage, skipped = rest[0::3], rest[1::3], rest[2::3]
        return {
            "loss": loss / steps,
            "reconstruction_loss": reconstruction / steps,
            "steps": steps,
            "perplexity": sum(perplexity) / len(perplexity),
            "usage": sum(usage) / len(usage),
            "skipped": sum(skipped),
        }
