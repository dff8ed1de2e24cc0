"""`topovq encode` and `topovq decode`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from topovq.commands.engines import OnEngine
from topovq.exits import say


@dataclass(kw_only=True)
class OnRun:
    """What commands that use a run's model have in common."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    batch_size: int = 256
    """Images at a time; has no effect on the result."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda or cuda:N."""


@dataclass(kw_only=True)
class OnActors(OnEngine):
    actors: int | None = None
    """Processes on Ray; by default one for each GPU, or for each CPU where there is none."""

    def ray_options(self) -> dict[str, Any]:
        """The address and the number of actors for Ray; both are refused without it."""
        options: dict[str, Any] = {"address": self.address, "actors": self.actors}
        self.refuse_unless_ray(**options)
        return options if self.engine == "ray" else {}


@dataclass(kw_only=True)
class Encode(OnActors, OnRun):
    """Write the tokens of images to a .parquet or .npz file (.tvq with --compress), any number of them.

    With --engine ray each tar or Parquet file, or each 2,048 images of a folder, has a token file of its own. The same
    command goes on after a run that was cut off: files that are there are kept.
    """

    images: Annotated[Positional[Path], arg(metavar="IMAGES")]
    """A folder of images (at any depth), one image, tar shards, or Parquet files with a column of bytes: a folder or
    a pattern such as 'val-*.tar'."""
    out: Annotated[Path, arg(aliases=["-o"])]
    """The token file; under torchrun and on Ray there are several, named after it."""
    compress: Annotated[Path | None, arg(metavar="PRIOR")] = None
    """A prior of the run (`topovq prior`), by whose probabilities the tokens are coded, without loss: a .tvq file.
    Not on Ray."""
    force: bool = False
    """Overwrite a token file that is there."""
    workers: int | None = None
    """Processes that decode images; one per core by default. On Ray: for each actor."""

    def __call__(self) -> None:
        options: dict[str, Any] = {**self.ray_options(), "batch_size": self.batch_size, "device": self.device}
        options |= {"workers": self.workers, "force": self.force, "progress": True}
        self.refuse_on_ray(compress=self.compress)
        if self.engine == "ray":
            from topovq.tokenizer.ray_tokens import encode_on_ray

            parts = encode_on_ray(self.run, self.images, self.out, **options)
            number, skipped = parts.images, parts.skipped
            where = str(parts.paths[0])
            if len(parts.paths) > 1:
                where += f" and {len(parts.paths) - 1} more"
            where += f" ({parts.kept} of {len(parts.paths)} there already)" * bool(parts.kept)
        else:
            from topovq.tokenizer.tokens import encode

            coder = coder_of(self.compress, self.run, self.device)
            done = encode(self.run, self.images, self.out, **options, coder=coder)
            number, skipped, where = done.images, done.skipped, str(done.path)
        for name, reason in skipped.items():
            say(f"skipped {name}: {reason}")
        say(f"{images(number)} encoded to {where}" + f", {len(skipped):,} skipped" * bool(skipped))
        if self.compress is not None and number:
            say(f"{done.path.stat().st_size / number:.1f} bytes an image, names included")


@dataclass(kw_only=True)
class Decode(OnActors, OnRun):
    """Write the images that tokens stand for, as PNG files."""

    tokens: Annotated[Positional[Path], arg(metavar="TOKENS")]
    """A file that `topovq encode` wrote, or the name after which several are named."""
    out: Annotated[Path, arg(aliases=["-o"])]
    """Folder for the images."""
    prior: Annotated[Path | None, arg(metavar="PRIOR")] = None
    """The prior that coded the tokens (`encode --compress`). Not on Ray."""
    force: bool = False
    """Decode tokens that another model wrote, and overwrite images that are there."""

    def __call__(self) -> None:
        options: dict[str, Any] = {**self.ray_options(), "batch_size": self.batch_size, "device": self.device}
        options |= {"force": self.force, "progress": True}
        self.refuse_on_ray(prior=self.prior)
        if self.engine == "ray":
            from topovq.tokenizer.ray_tokens import decode_on_ray

            done = decode_on_ray(self.run, self.tokens, self.out, **options)
        else:
            from topovq.tokenizer.tokens import decode

            coder = coder_of(self.prior, self.run, self.device)
            done = decode(self.run, self.tokens, self.out, **options, coder=coder)
        say(f"{images(done)} decoded to {self.out}")


def coder_of(prior: Path | None, run: Path, device: str) -> Any:
    """What codes tokens by a prior, where one is named."""
    if prior is None:
        return None
    from topovq.prior.coding import open_coder

    return open_coder(prior, run, device)


def images(number: int) -> str:
    return f"{number:,} image" + "s" * (number != 1)
