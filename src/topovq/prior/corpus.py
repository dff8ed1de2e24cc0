"""The tokens that a prior learns from, as sequences: those of a run's own images, or of a token file.

They are kept in the prior's folder as `tokens.safetensors`: `train` and `validation` int32 [N, T], and the classes
`train_labels` and `validation_labels` where there are any. Ranks and resumed trainings read them from there.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from topovq.distributed import World
from topovq.storage import CONFIG, DamagedFile, atomic_file, model_id, remove_leftovers
from topovq.tokenizer.data import Source, open_data
from topovq.tokenizer.data.labels import Labels, labels_by_folder
from topovq.tokenizer.data.order import split
from topovq.tokenizer.models import Tokenizer, as_levels, codes_of
from topovq.tokenizer.token_coded import SUFFIX
from topovq.tokenizer.tokenfile import model_of, read_tokens, token_files
from topovq.tokenizer.training.checkpoint import checkpoints
from topovq.tokenizer.training.progress import shown
from topovq.tokenizer.training.record import RECORD_FILE, read_record
from topovq.tokenizer.training.runs import data_of, model_folder

if TYPE_CHECKING:
    from topovq.prior.settings import PriorConfig

TOKENS_FILE = "tokens.safetensors"
SUFFIXES = (".parquet", ".npz")
BATCH = 256  # images encoded, or rows read, at a time


@dataclass(frozen=True)
class Corpus:
    """Sequences int32 [N, T] that train and [M, T] that validate, and their classes int64 if there are any."""

    train_NT: Tensor
    validation_MT: Tensor
    labels: Labels | None


def tokenizer_folder(config: PriorConfig) -> Path:
    """Where the tokenizer lies whose tokens these are."""
    source = Path(config.source)
    if source.suffix not in SUFFIXES:
        if source.suffix == SUFFIX:
            raise ValueError(
                f"{config.source!r} is coded by a prior, and none can learn from that: encode the images again without "
                "--compress, to a .parquet or .npz file"
            )
        if source.is_file():
            raise ValueError(f"{config.source!r} is no token file, which ends in .parquet or .npz, and no run's folder")
        if config.run is not None:
            kind = "a run already" if _is_run(source) else "no token file, which ends in .parquet or .npz"
            raise ValueError(f"{config.source!r} is {kind}; --run (here {str(config.run)!r}) goes with a token file")
        return model_folder(source)
    if config.run is None:
        raise ValueError(f"whose tokens does {config.source} hold? Give the run that encoded them: --run RUN")
    return model_folder(config.run)


def _is_run(folder: Path) -> bool:
    return (folder / RECORD_FILE).exists() or (folder / CONFIG).exists() or bool(checkpoints(folder))


def make_corpus(config: PriorConfig, folder: Path, model: Tokenizer, world: World, quiet: bool) -> Corpus:
    """The corpus of `config`, from the file in its folder, or made and written there by the first process."""
    assert config.out is not None
    path = config.out / TOKENS_FILE
    told = {"source": config.source, "labels": config.labels, "images": config.images, "model": model_id(folder)}
    if world.leads:
        remove_leftovers(config.out)
    if world.leads and not path.exists():
        if Path(config.source).suffix in SUFFIXES:
            corpus = _from_file(Path(config.source), folder, model, config.labels)
        else:
            corpus = _from_run(config, model.to(world.device), quiet)
            model.cpu()
        _write(path, corpus, told)
    world.wait()
    return _read(path, told)


def _from_run(config: PriorConfig, model: Tokenizer, quiet: bool) -> Corpus:
    record = Path(config.source) / RECORD_FILE
    if not record.is_file():
        raise FileNotFoundError(
            f"{config.source} has no {RECORD_FILE} that names its images; encode some and give the token file, with "
            f"--run {config.source}"
        )
    data, where, workers = data_of(read_record(record)[0])
    with open_data(data, where, model.image_size, workers) as source:
        train = training_images(source, config.images, config.seed)
        train_NT = _encoded(model, train, "encoding training images", quiet)
        validation_MT = _encoded(model, source.validation(BATCH), "encoding validation images", quiet)
        return Corpus(train_NT, validation_MT, source.labels() if config.labels else None)


def training_images(source: Source, images: int | None, seed: int) -> Iterator[Tensor]:
    """The images that a prior learns from, uint8 [B, 3, S, S]: all there are, or so many of a source that draws them
    endlessly."""
    if source.train_images is not None or images is None:
        return source.each(BATCH)
    return islice(source.train(BATCH, seed=seed), -(-images // BATCH))


def _encoded(model: Tokenizer, batches: Iterator[Tensor], what: str, quiet: bool) -> Tensor:
    place = next(model.parameters()).device
    found = [flat(as_levels(model.encode(batch.to(place)))) for batch in shown(batches, what, None, not quiet)]
    return torch.cat(found)


def flat(levels: tuple[Tensor, ...]) -> Tensor:
    """Tokens of levels as sequences int32 [B, T] on the CPU, in the order of `Prior.to_sequence`."""
    return torch.cat([level.flatten(1) for level in levels], 1).int().cpu()


def _from_file(path: Path, folder: Path, model: Tokenizer, labels: bool) -> Corpus:
    names: list[str] = []
    parts: list[Tensor] = []
    for file in token_files(path):
        wrote = model_of(file)
        if wrote is not None and wrote != model_id(folder):
            raise ValueError(
                f"{file} was written by another tokenizer ({wrote[:12]}) than the one in {folder} "
                f"({model_id(folder)[:12]}): its tokens mean nothing to this one; give the run that encoded it"
            )
        for batch_names, levels in read_tokens(file, BATCH):
            found, expected = [tuple(level.shape[1:]) for level in levels], model.token_shapes
            if found != expected:
                raise ValueError(f"{file} holds tokens of the shapes {found} an image; the tokenizer's are {expected}")
            names += batch_names
            parts.append(flat(levels))
    if not names:
        raise ValueError(f"{path} holds no image")
    if len({*names}) < len(names):
        twice, times = Counter(names).most_common(1)[0]
        raise ValueError(f"{path} has {times} images of the name {twice!r}; the names of its images must all differ")
    tokens_NT = torch.cat(parts)
    low, high, codes = int(tokens_NT.min()), int(tokens_NT.max()), codes_of(model.quantizers)
    if low < 0 or high >= codes:
        raise ValueError(f"{path} holds tokens from {low} to {high}; the tokenizer's codes are 0 to {codes - 1}")
    train, validation = _sides(names, path)
    found_labels = None
    if labels:
        found_labels = labels_by_folder([names[i] for i in train], [names[i] for i in validation])
    return Corpus(tokens_NT[train], tokens_NT[validation], found_labels)


def _sides(names: list[str], path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Which images train and which validate: as for a folder of images (tokenizer/data/folder.py)."""
    top = [name.partition("/")[0] if "/" in name else "" for name in names]
    validates = np.isin(top, ("val", "valid", "validation"))
    trains = np.isin(top, "train")
    bytes_N = np.array([name.encode() for name in names], dtype=np.bytes_)
    return split(bytes_N, trains if trains.any() else ~validates, validates, str(path))


def _write(path: Path, corpus: Corpus, told: dict[str, object]) -> None:
    tensors = {"train": corpus.train_NT.contiguous(), "validation": corpus.validation_MT.contiguous()}
    names = None
    if corpus.labels is not None:
        names = corpus.labels.names
        tensors |= {"train_labels": corpus.labels.train_N, "validation_labels": corpus.labels.validation_M}
    metadata = {"told": json.dumps(told, sort_keys=True), "names": json.dumps(names)}
    metadata["sha256"] = _sum(tensors, metadata)
    with atomic_file(path) as temporary:
        temporary.write_bytes(safetensors.torch.save(tensors, metadata))


def _sum(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def _read(path: Path, told: dict[str, object]) -> Corpus:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        tensors = safetensors.torch.load_file(path)
        if metadata.pop("sha256") != _sum(tensors, metadata):
            raise DamagedFile(f"{path} is damaged: it is not what its SHA-256 says; delete it, and it is made again")
        if metadata["told"] != json.dumps(told, sort_keys=True):
            raise ValueError(f"{path} holds the tokens of another training: delete it, or choose another --out")
        names = json.loads(metadata["names"])
        train_NT, validation_MT = tensors["train"], tensors["validation"]
        labels = Labels(names, tensors["train_labels"], tensors["validation_labels"]) if names else None
    except (safetensors.SafetensorError, KeyError) as error:
        raise DamagedFile(f"{path} is damaged ({error}); delete it, and it is made again") from None
    return Corpus(train_NT, validation_MT, labels)
