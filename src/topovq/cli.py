"""The `topovq` command: every sub-command is a typed dataclass and one call."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json import JSONDecodeError, dumps, loads
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import torch
import tyro
from rich.console import Console
from tyro.conf import Positional, arg

import topovq
from topovq.commands.maps import Map, Place
from topovq.commands.prior import Complete, Prior, Sample
from topovq.commands.tokenize import Decode, Encode, OnRun
from topovq.exits import leads, lines_that_fit, one_line_errors, say
from topovq.prior.settings import kind_in
from topovq.prior.transformer import KIND
from topovq.storage import refuse_to_overwrite
from topovq.tokenizer.data import SOURCES
from topovq.tokenizer.models import check_name
from topovq.tokenizer.training import TrainConfig, open_data, train
from topovq.tokenizer.training import evaluate as evaluate_run
from topovq.tokenizer.training import info as describe_run
from topovq.tokenizer.training.progress import duration, shown
from topovq.tokenizer.training.record import finite
from topovq.tokenizer.training.runs import list_runs, summary

DESCRIPTION = """Train tokenizers whose codes live on a map (Kohonen-VAE), and use them.

  topovq demo                         two small models side by side, in minutes
  topovq train photos --out runs/a    train on photographs of the package
  topovq train MY_IMAGES --out runs/b --model vqvae2 --image-size 256
  topovq runs                         the runs in runs/, with their figures
  topovq info runs/a                  what the run is and how far it got
  topovq report runs/a runs/b         what they learned, on one page
  topovq explore runs/a               the map in the browser: look, shift, paint
  topovq film runs/a -o film.webp     how its map unfolded (train --snapshots 60)
  topovq evaluate runs/a              its figures on the validation images
  topovq encode runs/a MY_IMAGES -o tokens.parquet
  topovq decode runs/a tokens.parquet -o decoded/
  topovq prior runs/a --out runs/p    learn which tokens go together
  topovq sample runs/p -o samples     new images, drawn token by token
  topovq complete runs/p IMAGE        keep the upper half, draw the rest
  topovq map TABLE.parquet --grid 32x32 -o MAP      a map of a table, of any size
  topovq place MAP TABLE.parquet -o places.parquet  where its rows lie on it
  topovq --version

Several GPUs: torchrun --nproc-per-node 8 -m topovq train ...
Several machines: topovq encode ... --engine ray --address HOST:6379

Tab completion: topovq --tyro-print-completion bash (or zsh, tcsh)"""

DATA_SETS = {
    "photos": "crops of photographs inside scikit-image and scikit-learn: no download",
    "cifar10": "60,000 images of 32x32; fetched once, or a copy at --data-path",
    "folder": "any tree of images, at --data-path; or give the folder itself",
    "shards": "images in .tar files, at --data-path; or give 'train-{000..003}.tar'",
    "imagenet": "ImageNet at 256x256, train/ and val/ or .tar files, at --data-path",
    "faces": "CelebA-HQ and AFHQ at 256x256, at --data-path CELEBAHQ::AFHQ",
}


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE words as a dict; a value is JSON where it can be read so (0.01, true, [16, 32]), else a string."""
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ValueError(f"{word!r} is not of the form KEY=VALUE, such as tau=0.01")
        try:
            options[key] = loads(value)
        except JSONDecodeError:
            options[key] = value
    return options


Options = Annotated[
    dict[str, Any],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="KEY=VALUE ...",
        instance_from_str=lambda words: parse_options(words),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda options: [f"{key}={dumps(value)}" for key, value in options.items()],
    ),
]


@dataclass
class Train(TrainConfig):
    """Train a model; the run's folder gets a record, checkpoints and the model.

    DATA is a data set's name or the path of your images.

    Ctrl-C, SIGTERM and SIGHUP write a checkpoint first (exit codes 130, 143, 129).

    The same command with --resume continues a run that was stopped.

    What the bar says:

      loss   of the last training steps, the quantizer's own loss included
      use    98%/2M: 98% of the codes were chosen at least once in the last 2M
             tokens. That is usage everywhere; at validations it is of the tokens
             of the validation images, which are never trained on
      perp   perplexity: so many codes, used evenly, would be as diverse
      dead   how many codes none of these tokens chose
      drift  how far the codes moved since the last look, as a share of their
             spread; it falls towards the end
    """

    data: Annotated[Positional[str], arg(metavar="DATA")] = "photos"
    """Data set by name (`topovq data` lists them), a folder of images, or tar shards: a folder or a pattern such
    as 'train-{000..003}.tar' or 'shards/*.tar'."""
    preset: Literal["auto", "small", "full"] = "auto"
    """Sizes that are not given: full (the paper's), small (minutes on a CPU), or auto (full on a GPU, else small)."""
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
            say(f"best validation loss {result.best_loss:.5f} in {duration(result.seconds)}")
            say(f"the run: {result.folder}\nits report: {page}")


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
            print(dumps(finite(figures), indent=2))


@dataclass
class Info:
    """Print what a run or a prior is and how far it got."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run, or of a prior."""
    json: bool = False
    """All there is to know, as JSON."""

    def __call__(self) -> None:
        from topovq.prior import describing

        is_prior = kind_in(self.run) == KIND
        facts = describing.info(self.run) if is_prior else describe_run(self.run)
        lines = describing.summary(facts) if is_prior else summary(facts)
        print(dumps(finite(facts), indent=2) if self.json else "\n".join(lines))


@dataclass
class Runs:
    """List the runs in a folder with the figures of their last validations."""

    folder: Annotated[Positional[Path], arg(metavar="FOLDER")] = Path("runs")
    """Where the runs are, at any depth."""

    def __call__(self) -> None:
        Console(highlight=False).print(list_runs(self.folder))


@dataclass
class Data:
    """Fetch a data set if need be, read every image, and describe it as JSON; without a name, list the names.

    The exit code is 1 if some image cannot be read. Training passes such images over.
    """

    name: Annotated[Positional[str | None], arg(metavar="NAME")] = None
    """Data set by name, a folder of images, or tar shards."""
    data_path: Path | None = None
    """Where the data set named by NAME lies, if not at its usual place."""

    def __call__(self) -> None:
        if self.name is None:
            print("\n".join(f"{name:10}{DATA_SETS[name]}" for name in SOURCES))
            return
        with open_data(self.name, self.data_path) as source:
            checked = sum(shown(source.check(), "reading", None))
            facts = source.describe() | {"checked": checked, "unreadable": source.unreadable}
        print(dumps(facts, indent=2))
        if source.unreadable:
            sys.exit(1)


@dataclass
class Demo:
    """Train a Kohonen-VAE and its EMA-VQ twin on photographs (CPU, a few minutes at most) and draw what differs."""

    out: Path = Path("runs/demo")
    """Folder for the two runs and the page."""
    steps: int = 600
    """Training steps of each model."""
    generate: bool = False
    """Another demo, of about a minute: a tokenizer and a prior of handwritten digits, and new digits that they draw."""
    quick: bool = False
    """10 steps instead, in seconds: to see that everything works, not what the models learn."""

    def __call__(self) -> None:
        from topovq.demo import demo
        from topovq.demo_generate import demo_generate

        (demo_generate if self.generate else demo)(self.out, 10 if self.quick else self.steps)


@dataclass
class Report:
    """Write one HTML page on a run, or on several side by side: curves, maps, reconstructions, configuration."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [RUN ...]")]
    """Folders of the runs."""
    out: Annotated[Path, arg(aliases=["-o"])] = Path("report.html")
    """The page; it needs no other file and no network."""
    force: bool = False
    """Overwrite a page that is there."""

    def __call__(self) -> None:
        from topovq.view.report import write_report

        refuse_to_overwrite(self.out, self.force)
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
    follow: bool = False
    """Show how the map unfolds instead, while it trains or afterwards: best of a run with `train --snapshots 60`."""
    prior: Annotated[Path | None, arg(metavar="PRIOR")] = None
    """A prior of the first run: the page Generate draws new images, and completes others where you paint them out."""

    def __call__(self) -> None:
        from topovq.view.explorer import explore

        explore(self.runs, self.port, self.images, self.host, self.follow, self.prior)


@dataclass
class Film:
    """Write how a run's map unfolded as an animation, from what `topovq train --snapshots N` kept."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    out: Annotated[Path, arg(aliases=["-o"])] = Path("film.webp")
    """The animation, .webp or .gif."""
    map: int = 0
    """Which of a model's maps, 0 being the coarsest."""
    force: bool = False
    """Overwrite a file that is there."""

    def __call__(self) -> None:
        from topovq.view.film import write_film

        refuse_to_overwrite(self.out, self.force)
        say(f"The film: {write_film(self.run, self.out, which=self.map).resolve()}")


COMMANDS = (
    *(Train, Evaluate, Encode, Decode, Prior, Sample, Complete, Map, Place),
    *(Info, Runs, Data, Demo, Report, Explore, Film),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with one_line_errors("topovq"):
        parse(arguments)()


def parse(arguments: Sequence[str] | None) -> Callable[[], None]:
    """The command that the arguments name; without any, those of the process."""
    choices = {cls.__name__.lower(): cls for cls in COMMANDS}
    first = next(iter(sys.argv[1:] if arguments is None else arguments), "--help")
    if first == "--version":
        return lambda: print(f"topovq {topovq.__version__}")
    if first == "reproduce":
        raise ValueError("reproduce is now `python -m experiments NAME`, in a clone")
    listed = first.startswith("-")  # the list of commands has a line for each, the help of one has all
    if not listed:
        check_name("command", first, choices)
    about = {name: (cls.__doc__ or "").splitlines()[0] if listed else None for name, cls in choices.items()}
    named = [Annotated[cls, tyro.conf.subcommand(name, description=about[name])] for name, cls in choices.items()]
    one_of: Any = Union[tuple(named)]  # noqa: UP007 (they are not known before)
    with lines_that_fit(choices):
        command: Callable[[], None] = tyro.cli(
            one_of,
            prog="topovq",
            description=DESCRIPTION,
            args=arguments,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        )
    return command
