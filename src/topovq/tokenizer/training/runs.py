"""Runs after training: their model, how well it does on their data set, and both in a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from topovq.distributed import join_world
from topovq.storage import CONFIG
from topovq.tokenizer.data import open_data
from topovq.tokenizer.models import Tokenizer, load_pretrained, outline
from topovq.tokenizer.training.checkpoint import checkpoints, newest_whole, step_of
from topovq.tokenizer.training.evaluate import validate
from topovq.tokenizer.training.progress import duration
from topovq.tokenizer.training.record import RECORD_FILE, read_record

COLUMNS = ("run", "data", "quantizer", "codes", "step", "loss", "psnr", "usage")  # of a list of runs


def load_run(run: str | Path) -> Tokenizer:
    """The model of a run (the newest checkpoint of an unfinished one) or of a `save_pretrained` folder, for eval."""
    return load_pretrained(model_folder(run))


def model_folder(run: str | Path) -> Path:
    """Where the model of a run lies: its folder where it is finished, else its newest checkpoint that is whole.

    A finished run that is made longer keeps its old model beside newer checkpoints until it is finished again.
    """
    run = Path(run)
    if not run.is_dir():
        raise FileNotFoundError(f"there is no run at {run}; `topovq train --out {run}` would make one")
    record = run / RECORD_FILE
    unfinished = record.exists() and read_record(record)[-1]["event"] != "final"
    saved = (run / CONFIG).exists()
    newest = newest_whole(run) if unfinished or not saved else None
    if newest is None and not saved:
        raise FileNotFoundError(f"{run} holds neither a model ({CONFIG}) nor a checkpoint that is whole")
    return run if newest is None else newest


def evaluate(
    run: str | Path, data: str | None = None, data_path: Path | None = None, batch_size: int = 256, device: str = "auto"
) -> dict[str, Any]:
    """The figures of `topovq.tokenizer.training.validate` for a run's model, on its own data set or another; fp32."""
    model = load_run(run)
    workers = None
    if data is None:
        data, stored, workers = data_of(read_record(Path(run) / RECORD_FILE)[0])
        data_path = data_path or stored
    with join_world(device) as world, open_data(data, data_path, model.image_size, workers) as source:
        return validate(model.to(world.device), source, batch_size, world)


def data_of(config: Mapping[str, Any]) -> tuple[str, Path | None, int | None]:
    """What a record's first line tells of the data: its name, where it lies, and how many processes decode it."""
    data, path, workers = (config.get(name) for name in ("data", "data_path", "workers"))
    if not isinstance(data, str) or not isinstance(path, str | None) or not isinstance(workers, int | None):
        raise ValueError(f"the record names no data set: data={data!r}, data_path={path!r}, workers={workers!r}")
    return data, Path(path) if path else None, workers


def info(run: str | Path) -> dict[str, Any]:
    """What there is to know about a run without its data: its configuration, where it stands, the model's sizes.

    No model is built: it is known from its configuration and the header of its weights.
    """
    run = Path(run)
    model = outline(model_folder(run))
    lines = read_record(run / RECORD_FILE) if (run / RECORD_FILE).exists() else [{}]
    validations = [line for line in lines if line.get("event") == "validation"]
    losses = [line["loss"] for line in validations if line["loss"] is not None]
    found = checkpoints(run)
    return {
        "run": str(run),
        "finished": lines[-1].get("event") == "final",
        "step": step_of(found[-1]) if found else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_image": model.token_shapes,
        "model": model.config,
        "config": lines[0],
        "validation": validations[-1] if validations else None,
        "best_loss": min(losses, default=None),
    }


def summary(facts: Mapping[str, Any]) -> list[str]:
    """What `info` tells of a run, in at most ten lines."""
    model, config, last = facts["model"], facts["config"], facts["validation"]
    side, shapes = model["image_size"], " and ".join("x".join(map(str, shape)) for shape in facts["tokens_per_image"])
    told = {"run": facts["run"]}
    if config:
        state = "finished" if facts["finished"] else f"not finished, {config['steps']:,} steps are to be done"
        told["state"] = f"step {facts['step'] or 0:,}, {state}"
        told["data"] = _data(config)
        told["training"] = f"{config['steps']:,} steps of {config['batch_size']:,} images, seed {config['seed']}"
        told["hardware"] = str(config["hardware"])
    told["model"] = f"{model['model']}, {facts['parameters']:,} parameters, images of {side}x{side}"
    told["codes"] = f"{model['codebook_size']:,} of {model['code_dim']} dimensions, {model['quantizer']}"
    told["tokens"] = f"{shapes} an image"
    if last:
        loss, psnr = _number(last["loss"], ".5f"), _number(last["psnr"], ".2f")
        told["validation"] = (
            f"loss {loss} (best {_number(facts['best_loss'], '.5f')}), {psnr} dB, {last['images']:,} images, "
            f"{duration(last['seconds'])} in"
        )
        tokens = f"{last['tokens']:,} " if "tokens" in last else ""
        told["usage"] = f"{_number(last['usage'], '.1%')} of the codes in the {tokens}tokens of these images"
    return [f"{name:12}{text}" for name, text in told.items()]


def list_runs(folder: Path) -> Table:
    """The runs in `folder`, at any depth, with the figures of their last validations."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; `topovq train` makes its runs in runs/")
    found = sorted(path.parent for path in folder.rglob(RECORD_FILE))
    if not found:
        raise FileNotFoundError(f"there is no run in {folder}: no {RECORD_FILE} at any depth")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        words = name in ("run", "data", "quantizer")
        table.add_column(name, justify="left" if words else "right", no_wrap=True, overflow="ellipsis")
    for run in found:
        name = run.relative_to(folder).as_posix() if run != folder else run.resolve().name
        table.add_row(name, *_figures(read_record(run / RECORD_FILE), checkpoints(run)))
    return table


def _figures(lines: list[dict[str, Any]], saved: list[Path]) -> list[str]:
    config, validations = lines[0], [line for line in lines if line["event"] == "validation"]
    last = validations[-1] if validations else {}
    done = max([*(line["step"] for line in lines[1:]), *map(step_of, saved)], default=0)  # one may be stopped between
    return [
        Path(config["data"]).name,
        config["quantizer"],
        f"{config['codebook_size']:,}",
        f"{done:,}" if done == config["steps"] else f"{done:,}/{config['steps']:,}",
        *(_number(last.get(name), form) for name, form in (("loss", ".5f"), ("psnr", ".2f"), ("usage", ".1%"))),
    ]


def _data(config: Mapping[str, Any]) -> str:
    train, validation = config.get("source_train_images"), config["source_validation_images"]
    number = "endless crops as" if train is None else f"{train:,}"
    return f"{config['data']}: {number} training and {validation:,} validation images"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
