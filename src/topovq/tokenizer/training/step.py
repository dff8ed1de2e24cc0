"""One training step: forward, backward, clip, AdamW; on one CUDA device the whole of it is a single CUDA graph.

Nothing here waits for the device. Losses are added up on the device; `read` starts their copy to the host.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import time
from collections.abc import Callable, Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from topovq.distributed import World
from topovq.metrics import FIGURES, Health, as_health
from topovq.tokenizer.models import Tokenizer, can_be_graphed
from topovq.tokenizer.training.feed import Feed
from topovq.tokenizer.training.interrupt import StopRequest
from topovq.tokenizer.training.progress import Reporter

if TYPE_CHECKING:
    from topovq.tokenizer.training.adamw import ClippedAdamW  # needs Triton

WARM_UP = 3  # steps done eagerly before capture, so that kernels are compiled and the optimizer's state exists
PARTS = ("begin", "descend", "error")  # of a model, that are compiled (models/model.py)


def make_optimizer(
    model: nn.Module, learning_rate: float, weight_decay: float, device: torch.device
) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        learning_rate,
        weight_decay=weight_decay,
        capturable=device.type == "cuda",
        fused=True,
    )


@contextlib.contextmanager
def fastest_convolutions() -> Iterator[None]:
    """Within, cuDNN tries its kernels on each new shape and keeps the fastest: shapes in training hardly change."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class TrainStep:
    """Call it once per step. The first steps on CUDA run eagerly (steps like any other), the rest replay a graph."""

    def __init__(
        self,
        model: Tokenizer,
        optimizer: torch.optim.AdamW,
        feed: Feed,
        world: World,
        *,
        clip: float = 1.0,
        bf16: bool = False,
        compile: bool = False,
        graph: bool | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        """`graph` is decided by the device if not given. On the CPU a step is dropped where `stop` asks for it."""
        self.model, self.optimizer, self.feed, self.world = model, optimizer, feed, world
        self.clip, self.bf16 = clip, bf16
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # DDP hooks into the backward pass from the host, so several processes run without the graph; so do quantizers
        # of others that wait for the device.
        able = can_be_graphed(model)
        self.graphed = world.device.type == "cuda" and world.size == 1 and able if graph is None else graph
        self.network = working_copy(model) if self.graphed and bf16 else model
        self.fused: ClippedAdamW | None = None
        if self.graphed:
            from topovq.tokenizer.training.adamw import ClippedAdamW

            working = [p for p in self.network.parameters() if p.requires_grad]
            self.fused = ClippedAdamW(optimizer, working, clip)
        self.compiled = compile and able
        if self.compiled:
            for part in PARTS:
                setattr(self.network, part, torch.compile(getattr(self.network, part)))
        losses = _Losses(self.network)
        several = world.size > 1
        self.forward: Callable[[Tensor], tuple[Tensor, Tensor]] = distribute(losses, world) if several else losses
        self.sums_3 = torch.zeros(3, device=world.device)  # loss, reconstruction loss, steps
        self.one = torch.ones((), device=world.device)
        self.captured: torch.cuda.CUDAGraph | None = None
        self.done = 0
        # Several processes stop at the same step, or they would wait for one another.
        droppable = stop.droppable if stop is not None and world.size == 1 else contextlib.nullcontext
        self.waiting: Callable[[], contextlib.AbstractContextManager[None]] = droppable
        self.slow = droppable is not contextlib.nullcontext and world.device.type == "cpu"
        self.before: list[Tensor] = []
        # Backward is one call: signals are heard in it where it comes by some Python.
        self.hooks = [p.register_post_accumulate_grad_hook(_listen) for p in self.parameters] if self.slow else []

    def __call__(self) -> None:
        with self.waiting():
            self.feed.prepare()
        if self.captured is not None:
            self.captured.replay()
        elif self.graphed:
            self._step_aside()
        else:
            self._step()
        self.done += 1

    def _step(self) -> None:
        if self.slow:
            self.before = [torch.get_rng_state(), *(tensor.detach().clone() for tensor in self._codes())]
        with self.waiting() if self.slow else contextlib.nullcontext():
            for parameter in self.network.parameters():
                parameter.grad = None
            with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.bf16):
                loss, reconstruction_loss = self.forward(self.feed.batch())
            loss.backward(self.one)  # the gradient of a loss is 1: no launch to make it
        if self.fused is not None:
            self.fused.step(self.sums_3, loss.detach(), reconstruction_loss.detach())
        else:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
            self.optimizer.step()
            self.sums_3 += torch.stack([loss.detach(), reconstruction_loss.detach(), self.one])
        self.before = []

    def _codes(self) -> list[Tensor]:
        """What a forward pass changes."""
        return [t for q in self.model.quantizers for t in (*q.parameters(), *q.buffers())]

    @torch.no_grad()
    def undo(self) -> None:
        """Put the codes and the random numbers back where they were before a step that was dropped."""
        if self.before:
            rng, *codes = self.before
            torch.set_rng_state(rng)
            for tensor, before in zip(self._codes(), codes, strict=True):
                tensor.copy_(before)

    def _step_aside(self) -> None:
        """A step on a side stream, as capture wants it; the last of them also captures (which runs nothing)."""
        device = self.world.device
        stream = side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream(device).wait_stream(stream)
        if self.done + 1 == WARM_UP:
            torch.cuda.empty_cache()  # the graph has memory of its own: what the steps so far used would lie idle
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, stream=stream):
                self._step()
            assert self.fused is not None
            self.fused.send()
            self.captured = captured

    def close(self) -> None:
        """Let go of the feed, of the graph's memory and of DDP, which holds the process group."""
        self.feed.close()
        for hook in self.hooks:
            hook.remove()
        self.captured = None
        self.forward = self.model
        if self.compiled:
            for part in PARTS:
                delattr(self.network, part)

    def read(self) -> Reading:
        """Start copying this interval's figures to the host and begin a new interval."""
        figures = [torch.cat([q.read_health(), q.skipped.float().view(1)]) for q in self.model.quantizers]
        reading = Reading(torch.cat([self.sums_3, *figures]))
        self.sums_3.zero_()
        return reading


def _listen(parameter: Tensor) -> None:
    """Nothing: Python calls the handlers of signals on its way here."""


def distribute(network: nn.Module, world: World) -> DistributedDataParallel:
    """DDP that leaves buffers alone: the quantizers synchronize their statistics themselves."""
    known = inspect.signature(DistributedDataParallel).parameters
    renamed = "forward_sync_buffers" in known  # what newer versions of torch call it
    options: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    distributed = DistributedDataParallel(network, **options)
    if world.device.type == "cpu":
        distributed.register_comm_hook(None, lambda state, bucket: _mean_in_rank_order(bucket.buffer()))
    return distributed


def _mean_in_rank_order(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """The mean of gradients over all ranks, added rank by rank. gloo adds in an order that depends on where in DDP's
    buckets a gradient lies, and those are filled anew after the first step: with three ranks and more a run that is
    resumed would differ in its last bits."""
    parts = [torch.empty_like(gradients) for _ in range(dist.get_world_size())]
    gathered = dist.all_gather(parts, gradients, async_op=True).get_future()
    return gathered.then(lambda _: reduce(Tensor.add_, parts).div_(len(parts)))


def working_copy(model: Tokenizer) -> Tokenizer:
    """The model with the same quantizers and its convolutions in bf16: what autocast would make of it at every step.

    All other parameters are the model's own.
    """
    convolutions = [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d))]
    lowered = {id(parameter) for module in convolutions for parameter in module.parameters()}
    kept = {id(parameter): parameter for parameter in model.parameters() if id(parameter) not in lowered}
    copied = copy.deepcopy(model, {id(model.quantizers): model.quantizers, **kept})
    for module in copied.modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            for parameter in module.parameters():
                parameter.data = parameter.data.bfloat16()
    return copied


class _Losses(nn.Module):
    """The model as a module whose output is its losses, for DDP."""

    def __init__(self, model: Tokenizer) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.losses(x_BCHW)


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
        """Means of `loss` and `reconstruction_loss` over the interval, its `steps`, and the health of the codes (means
        over levels, of several also `usage_0`, ...; `tokens`, `dead_codes` and `skipped` are sums)."""
        (loss, reconstruction, steps), rows = self._arrived()
        levels = self.levels()
        figures = {
            "loss": loss / steps,
            "reconstruction_loss": reconstruction / steps,
            "steps": steps,
            "usage": sum(level.usage for level in levels) / len(levels),
            "perplexity": sum(level.perplexity for level in levels) / len(levels),
            "tokens": sum(level.tokens for level in levels),
            "dead_codes": sum(level.dead_codes for level in levels),
            "drift": sum(level.drift for level in levels) / len(levels),
            "skipped": sum(skipped for *_, skipped in rows),
        }
        if len(levels) > 1:
            figures |= {f"usage_{number}": level.usage for number, level in enumerate(levels)}
        return figures

    def levels(self) -> list[Health]:
        """The health of each quantizer."""
        return [as_health(health) for *health, _ in self._arrived()[1]]

    def _arrived(self) -> tuple[list[float], list[list[float]]]:
        """The three sums of the interval, and a row of figures for each quantizer."""
        if self.arrived is not None:
            self.arrived.synchronize()
        figures = self.host.tolist()
        width = FIGURES + 1
        return figures[:3], [figures[first : first + width] for first in range(3, len(figures), width)]


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream to capture a graph on: the current one, unless it is the default, where that cannot be.

    cuBLAS has one workspace a stream, which the graphs captured there share. So those of runs that take turns, each on
    a stream of its own, must not all be captured on one: at the same time they would write to the same workspace.
    """
    current = torch.cuda.current_stream(device)
    return torch.cuda.Stream(device) if current == torch.cuda.default_stream(device) else current


class Figures:
    """Figures on their way to the reporter, one interval late: reading them never leaves the device without work."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.pending: tuple[int, Reading] | None = None
        self.restart()

    def send(self, step: int, reading: Reading) -> None:
        self.show()
        self.pending = (step, reading)
        if reading.arrived is None:  # on the CPU there is nothing to wait for
            self.show()

    def show(self) -> None:
        if self.pending is not None:
            step, reading = self.pending
            values = reading.values()
            # Since the restart: where the host was waiting just now says little about when the device did each part.
            self.steps += values["steps"]
            speed = self.steps / max(time.monotonic() - self.began, 1e-9)  # a coarse clock may not have moved
            self.reporter.interval(step, values, speed, reading.levels())
            self.pending = None

    def restart(self) -> None:
        """Leave out of the speed what was not training."""
        self.began, self.steps = time.monotonic(), 0.0
