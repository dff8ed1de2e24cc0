"""New images from a prior, and the rest of images that are there in part: `topovq sample` and `topovq complete`."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import UnidentifiedImageError
from torch import Tensor

from topovq.distributed import pick_device
from topovq.prior.choosing import check_drawing, check_drawn
from topovq.prior.contact import WHITE, enlarged, sheet
from topovq.prior.corpus import training_images
from topovq.prior.nearest import Nearest, find_nearest
from topovq.prior.settings import none_in
from topovq.prior.transformer import Prior
from topovq.prior.written import check_folder, replace
from topovq.storage import CONFIG, model_id, refuse_to_overwrite
from topovq.tokenizer.data import Source
from topovq.tokenizer.models import Tokenizer, check_name, codes_of, load_pretrained
from topovq.tokenizer.models.inputs import as_batch
from topovq.tokenizer.tokenfile import open_writer
from topovq.tokenizer.tokens import image_name, write_png, write_pngs
from topovq.tokenizer.training import open_data
from topovq.tokenizer.training.config import check_seed
from topovq.tokenizer.training.progress import shown
from topovq.tokenizer.training.record import RECORD_FILE, read_record
from topovq.tokenizer.training.runs import model_folder

TOKENS, SHEET, IMAGES, NEAREST = "tokens.parquet", "sheet.png", "images", "nearest.png"
MOST_SHOWN = 400  # images on the contact sheet
MOST_BESIDE = 16  # samples that are shown beside the training images nearest to them
BESIDE = 3  # ... of which so many


@dataclass(frozen=True)
class Pair:
    """A prior and the tokenizer whose tokens it draws, on one device."""

    prior: Prior
    model: Tokenizer

    @property
    def device(self) -> torch.device:
        return self.prior.place.weight.device

    def decode(self, tokens_BT: Tensor) -> Tensor:
        """Sequences [B, T] -> images uint8 [B, C, H, W] on the CPU."""
        levels = self.prior.to_levels(tokens_BT)
        return self.model.decode(levels if len(levels) > 1 else levels[0]).cpu()


def open_prior(
    folder: str | Path,
    run: str | Path | None = None,
    device: str = "auto",
    *,
    remedy: str = "give its own by --run RUN",
) -> Pair:
    """The prior in `folder` and its tokenizer, for use; another tokenizer than the one it was trained on is refused.

    run     where the tokenizer is, if not where it was when the prior was trained
    remedy  what to do about another tokenizer, for the message
    """
    place, folder = pick_device(device), Path(folder)
    if not (folder / CONFIG).is_file():
        raise none_in(folder)
    prior = Prior.from_pretrained(folder)
    where = run or prior.run
    if where is None:
        raise ValueError(f"the prior in {folder} does not say where its tokenizer is: give --run RUN")
    if not Path(where).is_dir():
        raise FileNotFoundError(f"the tokenizer of {folder} is not at {where} any more: say where it is by --run RUN")
    found = model_folder(where)
    if prior.tokenizer is not None and model_id(found) != prior.tokenizer:
        raise ValueError(
            f"the prior in {folder} belongs to another tokenizer ({prior.tokenizer[:12]}) than the one in {found} "
            f"({model_id(found)[:12]}): its tokens would mean nothing to this one; {remedy}"
        )
    model = load_pretrained(found)
    if [tuple(shape) for shape in model.token_shapes] != prior.shapes:
        raise ValueError(f"the prior in {folder} draws tokens {prior.shapes}; the tokenizer takes {model.token_shapes}")
    return Pair(prior.to(place), model.to(place))


def label_number(prior: Prior, label: str | int | None) -> int | None:
    """The number of a class from its name or number."""
    if label is None:
        return None
    label = str(label)
    if not prior.classes:
        raise ValueError(
            f"label {label!r} was asked for, but this prior knows no classes: it was trained without --labels"
        )
    names = prior.class_names or []
    if label in names:
        return names.index(label)
    if label.isdecimal() and int(label) < prior.classes:
        return int(label)
    if label.lstrip("-").isdecimal() or not names:
        raise ValueError(
            f"label {label} is out of range: the prior's {prior.classes} classes are 0 to {prior.classes - 1}"
        )
    check_name("label", label, names)
    raise AssertionError("a known name was found above")


@torch.no_grad()
def draw(
    pair: Pair,
    number: int,
    *,
    labels_N: Tensor | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    guidance: float = 1.0,
    seed: int = 0,
    batch_size: int = 256,
    known_T: Tensor | None = None,
    progress: bool = False,
) -> Tensor:
    """Tokens int64 [N, T] on the CPU: what `Prior.sample` gives, some at a time, from random numbers of `seed`.

    `pair.decode` makes images of them, uint8 [N, C, H, W]. `known_T` are tokens to keep, -1 where one is to be drawn.
    """
    if number < 1:
        raise ValueError(f"number={number} must be at least 1")
    prior, device = pair.prior, pair.device
    if labels_N is not None and len(labels_N) != number:
        raise ValueError(f"{len(labels_N)} labels do not fit {number} images: one each is expected")
    labels_N = None if labels_N is None else torch.as_tensor(labels_N)
    uniform_NTF = prior.uniform(number, torch.Generator().manual_seed(seed))
    found = []
    for first in shown(range(0, number, batch_size), "sampling", -(-number // batch_size), progress):
        here = slice(first, min(first + batch_size, number))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            tokens_BT = prior.sample(
                here.stop - here.start,
                labels_N[here].to(device) if labels_N is not None else None,
                temperature=temperature,
                top_p=top_p,
                guidance=guidance,
                uniform_BTF=uniform_NTF[here].to(device),
                known_BT=known_T.expand(here.stop - here.start, -1).to(device) if known_T is not None else None,
            )
        found.append(tokens_BT)
    tokens_NT = torch.cat(found).cpu()
    check_drawn(tokens_NT)
    return tokens_NT


@dataclass(frozen=True)
class Sampled:
    """What `sample` wrote: the contact sheet, and where training images were given, which are nearest to samples.

    nearest  of the first samples, with distances; `copies` of these samples have the very tokens of an image there
    """

    sheet: Path
    nearest: Nearest | None = None
    copies: int = 0


def sample(
    folder: str | Path,
    number: int,
    out: str | Path,
    *,
    label: str | int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    guidance: float = 1.0,
    seed: int = 0,
    run: str | Path | None = None,
    batch_size: int = 256,
    device: str = "auto",
    force: bool = False,
    progress: bool = False,
    nearest: str | Path | None = None,
) -> Sampled:
    """Write `number` new images of the prior in `folder`: `out`/images/, `out`/tokens.parquet and `out`/sheet.png.

    label    a class by name or number; without one, a prior that knows classes draws them in turn, and every image lies
             in the folder of its class
    force    replaces what an earlier sample wrote into `out` (`out`/samples.json lists it), and nothing else
    nearest  training images, as `topovq train` takes them: `out`/nearest.png shows the first 16 samples, each beside
             the 3 training images that are nearest to it (`topovq.prior.nearest`)
    Other arguments are those of `Prior.sample`. `batch_size` images are drawn at a time, which changes speed alone.
    """
    for name, value in (("number", number), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    check_drawing(temperature, top_p, guidance)
    check_seed(seed)
    out, pictures = Path(out), [SHEET] if nearest is None else [SHEET, NEAREST]
    earlier = check_folder(out, [TOKENS, IMAGES, *pictures], force)
    pair = open_prior(folder, run, device)
    chosen, names = label_number(pair.prior, label), pair.prior.class_names
    labels_N = None
    if pair.prior.classes:
        every = torch.arange(number) % pair.prior.classes
        labels_N = every if chosen is None else torch.full_like(every, chosen)
    _check_guidance(guidance, pair.prior, labels_N is not None)
    files = _file_names(pair.prior, labels_N, number)
    how: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "guidance": guidance, "seed": seed}
    model, shown_NCHW = pair.model, list[Tensor]()
    with contextlib.ExitStack() as stack:
        train = None
        if nearest is not None:  # opened first: what is wrong with it is known before anything is drawn
            train = stack.enter_context(open_data(str(nearest), None, model.image_size))
        tokens_NT = draw(pair, number, labels_N=labels_N, **how, batch_size=batch_size, progress=progress)
        told = {"prior": str(folder), "number": number, "label": label, **how}
        replace(out, earlier, [TOKENS, *pictures, *(f"{IMAGES}/{file}" for file in files)], told)
        with open_writer(out / TOKENS, model.token_shapes, codes_of(model.quantizers), pair.prior.tokenizer) as writer:
            for first in range(0, number, batch_size):
                part = tokens_NT[first : first + batch_size]
                writer.write(files[first : first + batch_size], pair.prior.to_levels(part))
                pixels_BCHW = pair.decode(part.to(pair.device))
                write_pngs(out / IMAGES, files[first : first + batch_size], pixels_BCHW)
                shown_NCHW.append(pixels_BCHW[: max(0, MOST_SHOWN - first)])
        columns = len(names) if names and chosen is None and 2 <= len(names) <= 20 else None
        write_png(out / SHEET, sheet(enlarged(torch.cat(shown_NCHW)), columns))
        if train is None:
            return Sampled(out / SHEET)
        samples = torch.cat(shown_NCHW)[:MOST_BESIDE]
        found = _nearest(pair, samples, train, Path(folder), progress)
    write_png(out / NEAREST, sheet(enlarged(found.beside(samples)), found.images.shape[1] + 1))
    return Sampled(out / SHEET, found, _copies(pair, tokens_NT[:MOST_BESIDE], found))


def _check_guidance(guidance: float, prior: Prior, labeled: bool) -> None:
    """Refuse to follow a class more closely where there is none."""
    if guidance != 1 and not labeled:
        none = "this prior knows none: it was trained without --labels"
        why = "say which by --label (label)" if prior.classes else none
        raise ValueError(f"guidance={guidance!r} needs a class, which it follows more closely: {why}")


def _file_names(prior: Prior, labels_N: Tensor | None, number: int) -> list[str]:
    """00000.png, or cat/00000.png of a prior with classes."""
    folders = [""] * number
    if labels_N is not None:
        names = prior.class_names
        folders = [f"{names[label] if names else label}/" for label in labels_N.tolist()]
    digits = max(5, len(str(number - 1)))
    return [str(image_name(f"{each}{i:0{digits}}.png")) for i, each in enumerate(folders)]


def _nearest(pair: Pair, samples: Tensor, train: Source, folder: Path, progress: bool) -> Nearest:
    """The training images nearest to samples; of a source that draws endlessly those that the prior learned from."""
    record = folder / RECORD_FILE
    told = read_record(record)[0] if record.is_file() else {}
    batches = training_images(train, told.get("images"), told.get("seed", 0))
    if pair.model.channels == 1:
        batches = (batch.float().mean(1, keepdim=True).round().to(torch.uint8) for batch in batches)
    compared = shown(batches, "comparing with training images", None, progress)
    return find_nearest(samples.to(pair.device), compared, BESIDE)


def _copies(pair: Pair, tokens_NT: Tensor, found: Nearest) -> int:
    """How many samples have the very tokens of an image that is nearest to them."""
    levels = pair.model.encode(found.images.flatten(0, 1).to(pair.device))
    near_NkT = pair.prior.to_sequence(levels).cpu().unflatten(0, found.images.shape[:2])
    return int((near_NkT == tokens_NT[:, None]).all(2).any(1).sum())


def complete(
    folder: str | Path,
    image: str | Path,
    out: str | Path,
    *,
    number: int = 8,
    keep: float = 0.5,
    label: str | int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    guidance: float = 1.0,
    seed: int = 0,
    run: str | Path | None = None,
    device: str = "auto",
    force: bool = False,
) -> Path:
    """Keep the upper part of an image's tokens and draw the rest, `number` times: one picture, `out` (.png).

    It shows the image as the tokenizer decodes it, what was kept, and the images that came of it. `keep` is the share
    of the rows. Tokens near the border have seen some pixels below it, as the encoder looks around.
    """
    out = Path(out)
    if out.suffix.lower() != ".png":
        raise ValueError(f"{str(out)!r} must end in .png: the picture is a PNG file")
    refuse_to_overwrite(out, force)
    if number < 1:
        raise ValueError(f"number={number} must be at least 1")
    check_drawing(temperature, top_p, guidance)
    check_seed(seed)
    pair = open_prior(folder, run, device)
    chosen = label_number(pair.prior, label)
    _check_guidance(guidance, pair.prior, chosen is not None)
    tokens_1T = pair.prior.to_sequence(pair.model.encode(_read(Path(image), pair.model))).cpu()
    known_T = torch.where(kept_steps(pair.prior, keep), tokens_1T[0], -1)
    labels_N = None if chosen is None else torch.full((number,), chosen)
    how: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "guidance": guidance}
    drawn_NT = draw(pair, number, labels_N=labels_N, **how, seed=seed, known_T=known_T)
    original = pair.decode(tokens_1T.to(pair.device))
    kept = original.clone()
    kept[:, :, round(keep * kept.shape[2]) :] = WHITE
    completed = pair.decode(drawn_NT.to(pair.device))
    write_png(out, sheet(enlarged(torch.cat([original, kept, completed])), number + 2))
    return out


def _read(image: Path, model: Tokenizer) -> Tensor:
    """The central square of an image file, uint8 [1, C, S, S]."""
    if not image.is_file():
        problem = "is a folder; give one image" if image.is_dir() else "is not there; give the path of an image"
        raise FileNotFoundError(f"{image} {problem}")
    try:
        return as_batch(str(image), model)
    except UnidentifiedImageError:
        raise ValueError(f"{image} is not an image of a known format") from None
    except Exception as error:  # damaged bytes raise a dozen types in Pillow's decoders
        raise ValueError(f"{image} cannot be read as an image: {error}") from None


def kept_steps(prior: Prior, keep: float) -> Tensor:
    """Which tokens lie in the upper share `keep` of an image: bool [T], of every level."""
    if not 0 <= keep < 1:
        raise ValueError(f"keep={keep!r} must be at least 0 and below 1: the share of the rows that stays")
    parts = []
    for height, *rest in prior.shapes:
        rows = (torch.arange(height) + 0.5) / height < keep
        parts.append(rows.repeat_interleave(math.prod(rest)))
    return torch.cat(parts)
