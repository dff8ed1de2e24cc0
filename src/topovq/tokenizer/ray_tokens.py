"""`topovq encode` and `topovq decode` with `--engine ray`: every shard is one task of an actor that holds the model.

A shard's file is written by the code that torchrun runs, whole or not at all, under the name that torchrun would give
it. So a task that was lost with its machine is done again by another, and a run that was cut off goes on: what is there
is whole. The run, the images and the folder for the output must be at the same paths on all machines.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from topovq.cluster import ask_for, cpus_beside_a_gpu, join_ray, original_errors
from topovq.storage import model_id, no_empty_folder, refuse_to_overwrite, remove_abandoned, remove_leftovers_of
from topovq.tokenizer.data import find_images, parts_of
from topovq.tokenizer.data.loader import Records
from topovq.tokenizer.models import Tokenizer, load_pretrained
from topovq.tokenizer.tokenfile import check_suffix, model_of, read_tokens, shard_path, token_files
from topovq.tokenizer.tokens import Decoder, Encoder, Places, check_model, check_numbers, none_readable
from topovq.tokenizer.training.progress import shown
from topovq.tokenizer.training.runs import model_folder

FEW = 32  # shards


@dataclass(frozen=True)
class EncodedParts:
    """What `encode_on_ray` did: its files, in order, their images, which could not be read, and how many files were
    there already."""

    paths: list[Path]
    images: int
    skipped: dict[str, str]
    kept: int


def encode_on_ray(
    run: str | Path,
    images: str | Path,
    out: str | Path,
    *,
    address: str | None = None,
    actors: int | None = None,
    batch_size: int = 256,
    device: str = "auto",
    workers: int | None = None,
    force: bool = False,
    progress: bool = False,
) -> EncodedParts:
    """Write the tokens of `images` to files named after `out`, one for each shard of them, on a Ray cluster.

    address  of the cluster; without one Ray is started on this machine
    actors   processes that hold the model; by default one for each GPU, or each CPU where there is none
    workers  processes that decode images for one actor; by default its share of the CPUs beside a GPU, else it decodes
             them itself

    Images in a folder are taken 2,048 at a time. Files that are there already are kept if they are of this model and
    these images: a run that was cut off goes on with those that are missing. `force` writes all of them anew.
    """
    out = Path(os.path.abspath(out))
    check_suffix(out)
    check_numbers(batch_size, workers)
    folder = model_folder(run).resolve()
    ours = model_id(folder)
    with no_empty_folder(out.parent), contextlib.ExitStack() as afterwards, join_ray(address) as ray:
        records = find_images(os.path.abspath(images), functools.partial(_each, ray))
        parts = parts_of(records)
        paths = [shard_path(out, i, len(parts)) for i in range(len(parts))]
        afterwards.callback(remove_leftovers_of, paths)  # of actors that were lost or ended in the middle of one
        _check_files(out, paths, ours, force)
        number, cpus, gpus = ask_for(ray, actors, device, max(1, workers or 0))
        if gpus and workers is None:
            cpus = workers = cpus_beside_a_gpu(ray)
        tasks = ({"task": pickle.dumps((str(path), records.take(part)))} for path, part in zip(paths, parts))
        how = {"folder": str(folder), "id": ours, "batch_size": batch_size, "workers": workers or 0, "force": force}
        results = _run(ray, _EncodingActor, tasks, number, cpus, gpus, how)
        done = {row["path"]: row for row in shown(results, "encoding", len(paths), progress)}
        in_order = [done[str(path)] for path in paths]
        skipped = {name: why for row in in_order for name, why in json.loads(row["skipped"]).items()}
        total = sum(row["images"] for row in in_order)
        if not total:
            for path in paths:
                path.unlink(missing_ok=True)
            raise none_readable(len(records), images, skipped)
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(
                f"{path} was written, but is not here: {out.parent} must be one folder for all machines"
            )
    return EncodedParts(paths, total, skipped, sum(row["kept"] for row in in_order))


def decode_on_ray(
    run: str | Path,
    tokens: str | Path,
    out: str | Path,
    *,
    address: str | None = None,
    actors: int | None = None,
    batch_size: int = 256,
    device: str = "auto",
    force: bool = False,
    progress: bool = False,
) -> int:
    """Write the images that `tokens` stand for below the folder `out` as PNG files, on a Ray cluster; how many.

    Every token file is one task. As in `decode`, all is checked before the first image is written.
    """
    check_numbers(batch_size)
    out = Path(os.path.abspath(out))
    folder = model_folder(run).resolve()
    ours = model_id(folder)
    files = [Path(os.path.abspath(path)) for path in token_files(Path(tokens))]
    with contextlib.ExitStack() as afterwards, join_ray(address) as ray:
        if not force:
            for path in files:
                check_model(path, folder, ours)
        number, cpus, gpus = ask_for(ray, actors, device, 1)
        seen = _each(ray, functools.partial(_places, str(folder), batch_size, out, force), files)
        if sum(map(len, seen)) != len(set().union(*seen)):  # which of them are two is said by looking at all here
            decoder, places = Decoder(load_pretrained(folder), torch.device("cpu"), batch_size), Places(out)
            for path in files:
                decoder.check(path, places, force)
        afterwards.callback(remove_abandoned, out, below=True)  # of actors that ended in the middle of an image
        tasks = ({"task": str(path)} for path in files)
        how = {"folder": str(folder), "id": ours, "batch_size": batch_size, "out": str(out)}
        results = _run(ray, _DecodingActor, tasks, number, cpus, gpus, how)
        return sum(row["images"] for row in shown(results, "decoding", len(files), progress))


class _EncodingActor:
    """Holds the model; writes the token file of a shard."""

    def __init__(self, folder: str, id: str, batch_size: int, workers: int, force: bool) -> None:
        self.encoder, self.force = Encoder(*_load(folder, id), id, batch_size, workers), force

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        name, records = pickle.loads(batch["task"][0])
        path = Path(name)
        kept = path.exists() and not self.force
        if kept:
            images, skipped = _what_is_there(path, records, self.encoder.batch_size)
        else:
            with self.encoder.file(path) as writer:
                done = self.encoder.write(writer, path, records, range(len(records)), False)
            images, skipped = done.images, done.skipped
        return {"path": [name], "images": [images], "skipped": [json.dumps(skipped)], "kept": [kept]}


class _DecodingActor:
    """Holds the model; writes the images of a token file."""

    def __init__(self, folder: str, id: str, batch_size: int, out: str) -> None:
        self.decoder, self.out = Decoder(*_load(folder, id), batch_size), Path(out)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        return {"images": [self.decoder.write(Path(str(batch["task"][0])), self.out, False)]}


def _load(folder: str, id: str) -> tuple[Tokenizer, torch.device]:
    """The model, at the GPU that Ray gave this actor or else the CPU."""
    import ray

    found = model_id(Path(folder))
    if found != id:
        raise ValueError(f"{folder} holds another model at {platform.node()} ({found[:12]}) than here ({id[:12]})")
    device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
    return load_pretrained(folder).to(device), device


def _places(folder: str, batch_size: int, out: Path, force: bool, path: Path) -> set[bytes]:
    """Where the images of a token file go; refuses what `Decoder.check` refuses."""
    places = Places(out)
    Decoder(load_pretrained(folder), torch.device("cpu"), batch_size).check(path, places, force)
    return places.seen


def _what_is_there(path: Path, records: Records, batch_size: int) -> tuple[int, dict[str, str]]:
    """The number of images of a file that is there already, and which of the shard it has not."""
    expected = [name.decode(errors="backslashreplace") for name in records.names_N]
    found = [name for names, _ in read_tokens(path, batch_size) for name in names]
    there = set(found)
    if [name for name in expected if name in there] != found:
        raise FileExistsError(f"{path} is there already, with other images; --force (force=True) overwrites it")
    why = "it could not be read when the file was written"
    return len(found), {name: why for name in expected if name not in there}


def _check_files(out: Path, paths: list[Path], ours: str, force: bool) -> None:
    """Refuse to write among files of another model, or that are another number of files."""
    for other in sorted(out.parent.glob(f"{out.stem}-*-of-*{out.suffix}")) + [out] * out.exists():
        if other not in paths:
            raise FileExistsError(
                f"{other} is there already, and none of the {len(paths)} files to be written; move it"
            )
    for path in paths:
        if path.exists() and not force and model_of(path) != ours:
            refuse_to_overwrite(path, force)


def _each(ray: Any, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """The function of each item, on the cluster; of a few of them here, sooner than a process there has started."""
    items = list(items)
    if len(items) <= FEW:
        return [function(item) for item in items]
    task = ray.remote(_call)
    with original_errors(ray):
        results: list[Any] = ray.get([task.remote(function, item) for item in items])
    return results


def _call(function: Callable[[Any], Any], item: Any) -> Any:
    return function(item)


def _run(
    ray: Any, actor: type, tasks: Iterable[Mapping[str, Any]], number: int, cpus: int, gpus: int, how: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """What the actors say of each task, as they come; a task that is lost with its machine is done again."""
    rows = list(tasks)
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        actor,
        fn_constructor_kwargs=how,
        batch_size=1,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=min(number, len(rows)), max_tasks_in_flight_per_actor=1),
        num_cpus=cpus,
        num_gpus=gpus,
    )
    with original_errors(ray):
        yield from dataset.iter_rows()
