"""The commands that generate: `topovq prior`, `sample` and `complete`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from tyro.conf import Positional, arg

from topovq.exits import leads, say
from topovq.prior.settings import PriorConfig, unfinished
from topovq.tokenizer.training.progress import duration


@dataclass
class Prior(PriorConfig):
    """Train a prior: a model of which tokens go together, from which `topovq sample` draws new images.

    SOURCE is a run, whose own images are encoded first, or a token file (.parquet, .npz) with --run.

    Ctrl-C, SIGTERM and SIGHUP write a checkpoint first; the same command with --resume continues.

    Several GPUs: torchrun --nproc-per-node 8 -m topovq prior ...
    """

    source: Annotated[Positional[str], arg(metavar="SOURCE")]
    """A run, whose tokenizer then encodes its own data set; or a token file that `topovq encode` wrote."""
    preset: Literal["auto", "small", "full"] = "auto"
    """Sizes that are not given: full, small (minutes on a CPU with 256 tokens an image), or auto (full on a GPU, else
    small). If it is not given, the command takes auto, and PriorConfig full."""
    head: Literal["map", "flat", "tied"] = "map"
    """map (a row of the map, then a column; of maps of up to three axes), flat (one softmax over all codes) or tied
    (flat, tied to the codes)."""
    compile: bool = dataclasses.field(default_factory=torch.cuda.is_available)
    """torch.compile the transformer, which takes half a minute to start. If it is not given, the command does where the
    machine has CUDA, and PriorConfig where `device` is CUDA."""

    def __call__(self) -> None:
        from topovq.prior.fitting import BIT, fit

        result = fit(self)
        if leads():
            say(f"best validation {result.best_loss / BIT:.3f} bits a token in {duration(result.seconds)}")
            say(f"the prior: {result.folder}\nnew images: topovq sample {result.folder} -o samples")


@dataclass(kw_only=True)
class Draw:
    """What commands that draw tokens have in common."""

    prior: Annotated[Positional[Path], arg(metavar="PRIOR")]
    """Folder of the prior."""
    label: str | None = None
    """Class, by name or number, of a prior that was trained with --labels."""
    temperature: float = 1.0
    """Below 1 draws likelier tokens, above 1 bolder ones; 0 takes the likeliest row and column."""
    top_p: float = 1.0
    """Draw among the likeliest rows, and columns, that together have this probability."""
    guidance: float = 1.0
    """Above 1 follows the label more closely (classifier-free guidance), at twice the work."""
    seed: int = 0
    """The same seed gives the same images."""
    run: Path | None = None
    """Where the tokenizer's run is, if it was moved."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda or cuda:N."""
    force: bool

    def tell_unfinished(self) -> None:
        """Say so where the prior's training is not finished."""
        if told := unfinished(self.prior):
            say(f"note: {told}")

    @property
    def how(self) -> dict[str, Any]:
        names = ("label", "temperature", "top_p", "guidance", "seed", "run", "device", "force")
        return {name: getattr(self, name) for name in names}


@dataclass(kw_only=True)
class Sample(Draw):
    """Draw new images from a prior: PNG files, their tokens, and one contact sheet.

    Of a prior with classes and without --label, every class has its turn, and images lie in images/CLASS/.

    With --nearest, nearest.png shows the first 16 images, each beside the 3 training images nearest to it: so you see
    whether it is a copy. The distance is the root of the mean squared difference of pixels, from 0 to 255.
    """

    number: Annotated[int, arg(aliases=["-n"])] = 64
    """How many images."""
    out: Annotated[Path, arg(aliases=["-o"])]
    """Folder for images/, tokens.parquet, sheet.png and samples.json, which lists them."""
    nearest: Annotated[str | None, arg(metavar="DATA")] = None
    """The training images, as `topovq train` takes them: a folder, shards, or a data set's name."""
    batch_size: int = 256
    """Images drawn at a time; has no effect on the result but for rounding."""
    force: bool = False
    """Replace what an earlier sample wrote to the folder. Other files stay, and are refused if they are in the way."""

    def __call__(self) -> None:
        from topovq.prior.generate import NEAREST, sample

        self.tell_unfinished()
        options: dict[str, Any] = {"batch_size": self.batch_size, "nearest": self.nearest, "progress": True}
        done = sample(self.prior, self.number, self.out, **options, **self.how)
        say(f"{self.number:,} image" + "s" * (self.number != 1) + f" in {self.out}; all at a glance: {done.sheet}")
        if done.nearest is not None:
            number, least = len(done.nearest.images), float(done.nearest.distances.min())
            say(f"beside the training images nearest to them: {self.out / NEAREST}")
            say(f"the least distance of these {number} is {least:.1f} of 255")
            say(f"{done.copies} of them have exactly the tokens of an image beside them")


@dataclass(kw_only=True)
class Complete(Draw):
    """Keep the upper half of an image and draw the rest from a prior: one picture with several outcomes.

    It shows the image as the tokenizer decodes it, what is kept of it, and what was drawn.
    """

    image: Annotated[Positional[Path], arg(metavar="IMAGE")]
    """The image; its central square is taken."""
    out: Annotated[Path, arg(aliases=["-o"])] = Path("completed.png")
    """The picture, .png."""
    number: Annotated[int, arg(aliases=["-n"])] = 8
    """How many outcomes."""
    keep: float = 0.5
    """Share of the rows that is kept."""
    force: bool = False
    """Overwrite a picture that is there."""

    def __call__(self) -> None:
        from topovq.prior.generate import complete

        self.tell_unfinished()
        say(
            f"The picture: {complete(self.prior, self.image, self.out, number=self.number, keep=self.keep, **self.how)}"
        )
