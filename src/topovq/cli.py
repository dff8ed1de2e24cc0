"""The `topovq` command: every sub-command is a typed dataclass and one call."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from topovq.tokenizer.data import SOURCES
from topovq.tokenizer.training import (
    CheckpointError,
    Diverged,
    Interrupted,
    MissingExtra,
    TrainConfig,
    open_data,
    train,
)
from topovq.tokenizer.training import evaluate as evaluate_run
from topovq.tokenizer.training import info as describe_run
from topovq.tokenizer.training.interrupt import ending_signals, leave_lost_terminal
from topovq.tokenizer.training.record import finite

DESCRIPTION = """Train tokenizers whose codes live on a map (Kohonen-VAE), and use them.

  topovq demo                                     two small models on photographs, side by side, in a few minutes
  topovq train photos --out runs/a                train on the photographs that come with the package
  topovq train MY_IMAGES --out runs/b --model vqvae2 --image-size 256
  topovq info runs/a                              what the run is and how far it got
  topovq report runs/a runs/b -o report.html      what they learned, on one page
  topovq explore runs/a                           the map in the browser: look, shift, paint
  topovq evaluate runs/a                          its figures on the validation images
  topovq encode runs/a MY_IMAGES -o tokens.parquet
  topovq decode runs/a tokens.parquet -o decoded/

Several GPUs: torchrun --nproc-per-node 8 -m topovq train ..."""

DATA_SETS = {
    "photos": "crops of the photographs inside scikit-image and scikit-learn: nothing to download",
    "cifar10": "60,000 images of 32x32; --data-path takes a copy of the archive, else it is fetched once",
    "folder": "any tree of images, at --data-path; or give the folder itself instead of a name",
    "shards": "images inside .tar files, at --data-path; or give the files themselves: 'train-{000..003}.tar'",
    "imagenet": "ImageNet at 256x256, a folder with train/ and val/ or .tar files, at --data-path",
    "faces": "CelebA-HQ and AFHQ at 256x256, at --data-path CELEBAHQ::AFHQ or in one place",
}


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE words as a dict; a value is JSON where it can be read so (0.01, true, [16, 32]), else a string."""
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ValueError(f"{word!r} is not of the form KEY=VALUE, such as tau=0.01")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


Options = Annotated[
    dict[str, Any],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="KEY=VALUE ...",
        instance_from_str=lambda words: parse_options(words),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda options: [f"{key}={json.dumps(value)}" for key, value in options.items()],
    ),
]


@dataclass
class Train(TrainConfig):
    """Train a model; the run's folder gets a record, checkpoints and the model.

    DATA is a data set's name or the path of your images. The same command with --resume continues a run that was
    stopped; SIGTERM, SIGHUP and Ctrl-C write a checkpoint first (exit codes 143, 129 and 130).
    """

    data: Annotated[Positional[str], arg(metavar="DATA")] = "photos"
    """Data set by name (`topovq data` lists them), a folder of images, or tar shards: a folder or a pattern such
    as 'train-{000..003}.tar' or 'shards/*.tar'."""
    model_options: Options = dataclasses.field(default_factory=dict)
    """Other arguments of the model, such as hidden=64 stride=8."""
    quantizer_options: Options = dataclasses.field(default_factory=dict)
    """Other arguments of the quantizer, such as neighborhood=gaussian tau=0.01 'grid=[16,32]'."""
    compile: bool = dataclasses.field(default_factory=torch.cuda.is_available)
    """torch.compile the model; it takes half a minute to start."""

    def __call__(self) -> None:
        from topovq.view.report import REPORT_FILE, write_report

        result = train(self)
        if leads():
            page = write_report([result.folder], result.folder / REPORT_FILE)
            say(
                f"best validation loss {result.best_loss:.5f} in {result.seconds:,.0f} s; the run is in {result.folder}"
                f", its report is {page}"
            )


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
class Evaluate(OnRun):
    """Print a run's figures on validation images as JSON: loss, psnr, perplexity, usage."""

    data: str | None = None
    """Another data set than the run's own, by name or path."""
    data_path: Path | None = None
    """Where the data set lies, if not at its usual place."""

    def __call__(self) -> None:
        figures = evaluate_run(self.run, self.data, self.data_path, self.batch_size, self.device)
        if leads():
            print(json.dumps(finite(figures), indent=2))


@dataclass(kw_only=True)
class Encode(OnRun):
    """Write the tokens of images to a .parquet or .npz file, any number of them, a few batches in memory at a time."""

    images: Annotated[Positional[Path], arg(metavar="IMAGES")]
    """A folder of images (at any depth), one image, or tar shards: a folder or a pattern such as 'val-*.tar'."""
    out: Annotated[Path, arg(aliases=["-o"])]
    """The token file; under torchrun each process writes a shard of it."""
    workers: int | None = None
    """Processes that decode images; one per core by default."""

    def __call__(self) -> None:
        from topovq.tokenizer.tokens import encode

        done = encode(
            self.run,
            self.images,
            self.out,
            batch_size=self.batch_size,
            device=self.device,
            workers=self.workers,
            progress=True,
        )
        for name, reason in done.skipped.items():
            say(f"skipped {name}: {reason}")
        say(f"{images(done.images)} encoded to {done.path}" + f", {len(done.skipped):,} skipped" * bool(done.skipped))


@dataclass(kw_only=True)
class Decode(OnRun):
    """Write the images that tokens stand for, as PNG files."""

    tokens: Annotated[Positional[Path], arg(metavar="TOKENS")]
    """A file that `topovq encode` wrote."""
    out: Annotated[Path, arg(aliases=["-o"])]
    """Folder for the images."""

    def __call__(self) -> None:
        from topovq.tokenizer.tokens import decode

        done = decode(self.run, self.tokens, self.out, batch_size=self.batch_size, device=self.device, progress=True)
        say(f"{images(done)} decoded to {self.out}")


@dataclass
class Info:
    """Print what a run is and how far it got, as JSON."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""

    def __call__(self) -> None:
        print(json.dumps(finite(describe_run(self.run)), indent=2))


@dataclass
class Data:
    """Fetch a data set if need be, check it and describe it; without a name, list the names."""

    name: Annotated[Positional[str | None], arg(metavar="NAME")] = None
    """Data set by name, a folder of images, or tar shards."""
    data_path: Path | None = None
    """Where the data set named by NAME lies, if not at its usual place."""

    def __call__(self) -> None:
        if self.name is None:
            print("\n".join(f"{name:10}{DATA_SETS[name]}" for name in SOURCES))
            return
        with open_data(self.name, self.data_path) as source:
            print(json.dumps(source.describe(), indent=2))


@dataclass
class Demo:
    """Train a Kohonen-VAE and its EMA-VQ twin on photographs (CPU, a few minutes at most) and draw what differs."""

    out: Path = Path("runs/demo")
    """Folder for the two runs and the page."""
    steps: int = 600
    """Training steps of each model."""
    quick: bool = False
    """10 steps instead, in seconds: to see that everything works, not what the models learn."""

    def __call__(self) -> None:
        from topovq.demo import demo

        demo(self.out, 10 if self.quick else self.steps)


@dataclass
class Report:
    """Write one HTML page on a run, or on several side by side: curves, maps, reconstructions, configuration."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [RUN ...]")]
    """Folders of the runs."""
    out: Annotated[Path, arg(aliases=["-o"])] = Path("report.html")
    """The page; it needs no other file and no network."""

    def __call__(self) -> None:
        from topovq.view.report import write_report

        say(f"The page: {write_report(self.runs, self.out).resolve()}")


@dataclass
class Explore:
    """Open a run in the browser: its map, images and their tokens, shifts; two runs are shown side by side."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [RUN]")]
    """Folders of the runs."""
    port: int = 8765
    """Port to listen at; 0 takes any free one."""
    images: Path | None = None
    """A folder of images to pick from, besides the validation images."""
    host: str = "127.0.0.1"
    """Address to listen at; the default is reached from this machine alone, others want a token."""

    def __call__(self) -> None:
        from topovq.view.explorer import explore

        explore(self.runs, self.port, self.images, self.host)


COMMANDS = (Train, Evaluate, Encode, Decode, Info, Data, Demo, Report, Explore)


def leads() -> bool:
    """Whether this is the process that speaks for all that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def images(number: int) -> str:
    return f"{number:,} image" + "s" * (number != 1)


def say(text: str) -> None:
    Console(highlight=False).print(text, soft_wrap=True, markup=False)


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the command as an exception does, so that half-written files go and workers end.
    Training has its own answer to them."""

    def unwind(signum: int, frame: FrameType | None) -> None:
        leave_lost_terminal()
        sys.exit(128 + signum)

    before = {signum: signal.signal(signum, unwind) for signum in ending_signals()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Have a user's mistake end in one line on stderr and exit code 2, other failures in 1."""
    try:
        with sigterm_unwinds():
            yield
    except Interrupted as stopped:
        if leads():
            print(f"{program}: {stopped}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` has seen enough; what is still to be flushed goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, TypeError, FileExistsError, FileNotFoundError, MissingExtra) as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2)
    except (OSError, CheckpointError, Diverged) as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with one_line_errors("topovq"):
        parse(arguments)()


def parse(arguments: Sequence[str] | None) -> Callable[[], None]:
    """The command that the arguments name; without any, those of the process."""
    if (sys.argv[1:] if arguments is None else arguments)[:1] == ["reproduce"]:
        raise ValueError("reproduce is now `python -m experiments NAME`, in a clone of the repository")
    choices: dict[str, Callable[..., Any]] = {cls.__name__.lower(): cls for cls in COMMANDS}
    command: Callable[[], None] = tyro.extras.subcommand_cli_from_dict(
        choices, prog="topovq", description=DESCRIPTION, args=arguments, config=(tyro.conf.OmitArgPrefixes,)
    )
    return command
