"""The training of a prior: `fit(PriorConfig(...)) -> RunResult`.

Its folder:
    record.jsonl                    what happened, as for a run (tokenizer/training/record.py)
    tokens.safetensors              the tokens it learns from (corpus.py)
    checkpoints/step-00001000/      the newest few, which --resume goes on from
    config.json, model.safetensors  the prior at its best validation so far, as `Prior.from_pretrained` reads it
"""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from topovq.distributed import World, join_world, pick_device
from topovq.prior.corpus import Corpus, make_corpus, tokenizer_folder
from topovq.prior.settings import PriorConfig, check_maps, check_started
from topovq.prior.transformer import KIND, Prior, maps_of
from topovq.storage import model_id, write_files
from topovq.tokenizer.data.order import order_slice
from topovq.tokenizer.data.source import rank_rows
from topovq.tokenizer.models import Tokenizer, load_pretrained
from topovq.tokenizer.training.base import RunResult, Training, alone, result_of
from topovq.tokenizer.training.checkpoint import checkpoints
from topovq.tokenizer.training.interrupt import Interrupted, StopRequest
from topovq.tokenizer.training.progress import SMALL, Reporter, place_of
from topovq.tokenizer.training.record import environment
from topovq.tokenizer.training.step import distribute
from topovq.tokenizer.training.watch import Diverged, is_finite

BETAS = (0.9, 0.95)  # AdamW's, as is usual for transformers
BIT = math.log(2)
BEFORE = "stopped before the first step; the same command begins again"


def fit(config: PriorConfig, *, quiet: bool = False) -> RunResult:
    """Train to the end of `config`; under torchrun, together with the other processes.

    One that is finished already is not repeated when `config.resume` is set. Raises Interrupted after SIGTERM or
    Ctrl-C, with a checkpoint written if a step was taken. `best_loss` of the result is in nats a token.
    """
    resolved = config.resolve(pick_device(config.device).type)
    assert resolved.out is not None
    with join_world(config.device) as world:
        lines = check_started(resolved)
        world.wait()  # nobody writes before everybody has looked
        if lines and lines[-1]["event"] == "final" and lines[-1]["steps"] == resolved.steps:
            return result_of(resolved.out)
        folder = tokenizer_folder(resolved)
        model = load_pretrained(folder)
        check_maps(resolved, maps_of(model))  # before minutes are spent on its tokens
        with alone(resolved.out, world):
            try:
                corpus = make_corpus(resolved, folder, model, world, quiet or not world.leads)
                run = Fit(resolved, corpus, model, folder, world, quiet)
            except KeyboardInterrupt:
                raise Interrupted(signal.SIGINT, BEFORE) from None
            with StopRequest() as stop:
                return run.train(stop)


class Fit(Training):
    """The state of one training and the order in which things happen to it."""

    what = KIND

    def __init__(
        self, config: PriorConfig, corpus: Corpus, model: Tokenizer, folder: Path, world: World, quiet: bool
    ) -> None:
        super().__init__(config, world, quiet)
        self.config, self.corpus = config, corpus
        self.rows = rank_rows(self.batch_size, world.rank, world.size)
        torch.manual_seed(config.seed)
        names = corpus.labels.names if corpus.labels is not None else None
        sizes = {name: getattr(config, name) for name in ("head", "dim", "layers", "heads")}
        classes = {"classes": len(names or []), "class_names": names}
        where = {"tokenizer": model_id(folder), "run": str(Path(config.run or config.source).resolve())}
        self.model = self.prior = Prior.of(model, **sizes, **classes, **where)
        for tokens in (corpus.train_NT, corpus.validation_MT):
            self.prior.check_tokens(tokens)
        self.prior.to(world.device).train()
        torch.manual_seed(config.seed + world.rank)  # which labels are hidden differs from rank to rank
        self.optimizer = torch.optim.AdamW(
            self.prior.parameters(), config.learning_rate, BETAS, weight_decay=config.weight_decay, fused=True
        )
        self.sums_2 = torch.zeros(2, device=world.device)  # losses since the last look, and how many
        self.losses = [0.0, 0.0]  # the same since the last validation

    def train(self, stop: StopRequest) -> RunResult:
        self.resume()
        network: nn.Module = torch.compile(self.prior) if self.config.compile else self.prior  # type: ignore[assignment]
        self.network = distribute(network, self.world) if self.world.size > 1 else network
        self._begin()
        with PriorReporter(KIND, self.total, self.step, self.batch_size, [], self.quiet) as reporter:
            if self.config.preset == "auto" and self.world.device.type == "cpu" and not self.step:
                reporter.say(SMALL)
            reporter.begin(self.prior, self.corpus, self.world.device)
            if self.step:
                reporter.say(f"continuing {self.folder} at step {self.step:,}")
            self._loop(reporter, stop)
        del self.network  # DDP holds the process group
        if self.world.leads:
            figures = {"best_loss": self.best, "seconds": round(self.seconds, 3)}
            self.record.append("final", step=self.step, steps=self.total, **figures)
        self.world.wait()
        return self.result()

    def _loop(self, reporter: PriorReporter, stop: StopRequest) -> None:
        start, before, first = time.monotonic(), self.seconds, self.step
        while self.step < self.total:
            self._step()
            reporter.step(self.step)
            last, validating, saving, logging = self.due()
            stopping = self.stopping(stop, logging)
            elapsed = time.monotonic() - start
            self.seconds = before + elapsed
            if logging or stopping:
                self._look(reporter, (self.step - first) / max(elapsed, 1e-9))
            if (saving or stopping) and self.world.any(not is_finite(self.prior)):
                raise Diverged(self.step, checkpoints(self.folder))
            if validating:
                self._validate(reporter)
            if saving or stopping:
                self.save()
            if stopping and not last:
                self.stopped(stop)

    def _step(self) -> None:
        """One step; nothing waits for the device."""
        tokens_BT, labels_B = self._batch()
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate(self.step)
        self.optimizer.zero_grad()
        device = self.world.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            loss = self.network(tokens_BT, labels_B, self._width())
        loss.backward()
        nn.utils.clip_grad_norm_(self.prior.parameters(), self.config.clip)
        self.optimizer.step()
        self.sums_2 += torch.stack([loss.detach(), torch.ones_like(loss)])
        self.step += 1

    def _batch(self) -> tuple[Tensor, Tensor | None]:
        """This rank's rows of the batch, which is a function of the seed and the step."""
        images = order_slice(len(self.corpus.train_NT), self.config.seed, self.step * self.batch_size, self.batch_size)
        index_B = torch.from_numpy(images[self.rows.start : self.rows.stop])
        labels = self.corpus.labels
        return self._sent(self.corpus.train_NT[index_B]), None if labels is None else self._sent(
            labels.train_N[index_B]
        )

    def _sent(self, tensor: Tensor) -> Tensor:
        cuda = self.world.device.type == "cuda"
        return (tensor.pin_memory() if cuda else tensor).to(self.world.device, non_blocking=True).long()

    def _width(self) -> Tensor | None:
        """How far targets are smoothed at this step, if they are."""
        widths = self.config.widths
        if widths is None or self.step >= (widths.steps or 0):
            return None
        return widths(torch.tensor(self.step)).float().to(self.world.device)

    def _look(self, reporter: PriorReporter, speed: float) -> None:
        total, steps = self.sums_2.tolist()
        self.sums_2.zero_()
        if steps:
            self.losses = [self.losses[0] + total, self.losses[1] + steps]
            reporter.look(self.step, total / steps, speed)

    def _validate(self, reporter: PriorReporter) -> None:
        self.validation = self.validated()
        if self.validation["loss"] < self.best:
            self.best = self.validation["loss"]
            if self.world.leads:
                write_files(self.folder, self.prior.files())
        if self.world.leads:
            train_loss = self.losses[0] / self.losses[1] if self.losses[1] else None
            timing = {"seconds": round(self.seconds, 3), "images_per_second": round(reporter.speed, 1)}
            self.record.append("validation", step=self.step, **self.validation, train_loss=train_loss, **timing)
        self.losses = [0.0, 0.0]
        reporter.validated(self.step, self.validation)

    @torch.no_grad()
    def validated(self) -> dict[str, float]:
        """Figures over the validation images, the same in every process: `loss` in nats a token, `bits_per_token`,
        `bits_per_image`, and of several maps `bits_0`, ... a token."""
        tokens_MT, labels = self.corpus.validation_MT, self.corpus.labels
        first, last = (len(tokens_MT) * rank // self.world.size for rank in (self.world.rank, self.world.rank + 1))
        totals_T = torch.zeros(self.prior.length, dtype=torch.float64, device=self.world.device)
        self.prior.eval()
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            for start in range(first, last, len(self.rows)):
                here = slice(start, min(start + len(self.rows), last))
                labels_B = None if labels is None else self._sent(labels.validation_M[here])
                totals_T += self.prior.log_probs(self._sent(tokens_MT[here]), labels_B).double().sum(0)
        self.prior.train()
        means_T = -self.world.sum(totals_T) / len(tokens_MT)
        loss = means_T.mean().item()
        figures = {"loss": loss, "bits_per_token": loss / BIT, "bits_per_image": means_T.sum().item() / BIT}
        if len(self.prior.grids) > 1:
            slots = range(len(self.prior.grids))
            figures |= {f"bits_{slot}": means_T[self.prior.steps(slot)].mean().item() / BIT for slot in slots}
        return {**figures, "images": len(tokens_MT), "tokens": tokens_MT.numel()}

    def _begin(self) -> None:
        self.begin_record({
            "id": self.config.run_id,
            **self.config.as_dict(),
            "data": self.config.source,
            "quantizer": KIND,  # so that `topovq runs` lists it among the tokenizers
            "codebook_size": max(grid.size for grid in self.prior.grids),
            "tokenizer": self.prior.tokenizer,
            "tokens_per_image": self.prior.length,
            "classes": self.prior.classes,
            "train_images": len(self.corpus.train_NT),
            "validation_images": len(self.corpus.validation_MT),
            "parameters": sum(p.numel() for p in self.prior.parameters()),
            "head_parameters": sum(p.numel() for head in self.prior.outputs for p in head.parameters()),
            **environment(self.world.device, self.world.size),
        })  # fmt: skip

    def state(self) -> dict[str, Any]:
        return {"skipped": 0.0, "losses": self.losses}

    def take(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]


class PriorReporter(Reporter):
    """Shows the training of a prior: the loss in bits a token."""

    def begin(self, prior: Prior, corpus: Corpus, device: torch.device) -> None:
        """What is trained on what, before the first step."""
        classes = f" of {prior.classes} classes" if prior.classes else ""
        train, validation = len(corpus.train_NT), len(corpus.validation_MT)
        self.say(f"tokens of {train:,} training and {validation:,} validation images{classes}, {prior.length} an image")
        parameters = sum(p.numel() for p in prior.parameters())
        codes = " and ".join(f"{grid.size:,}" for grid in dict.fromkeys(prior.grids))
        self.say(f"a prior over {codes} codes: {parameters:,} parameters, {self.steps:,} steps on {place_of(device)}")

    def look(self, step: int, loss: float, speed: float) -> None:
        """The mean loss since the last look; `speed` is in steps a second."""
        self.speed = speed * self.batch_size
        figures = f"{loss / BIT:.3f} bits a token · {self.speed:,.0f} images/s"
        self.bar.update(self.task, completed=step, figures=figures)
        self.warn_of_nan(step, loss)

    def validated(self, step: int, figures: dict[str, float]) -> None:
        token, image = figures["bits_per_token"], figures["bits_per_image"]
        self.say(f"step {step:>7,}  validation {token:.3f} bits a token, {image:,.1f} an image")
