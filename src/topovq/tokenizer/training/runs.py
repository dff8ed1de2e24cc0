"""Runs after training: their model, their data set, and how well the one does on the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topovq.distributed import join_world
from topovq.tokenizer.models import CONFIG_FILE, Tokenizer, load_pretrained, outline
from topovq.tokenizer.training.checkpoint import checkpoints, newest_whole, step_of
from topovq.tokenizer.training.datasets import open_data
from topovq.tokenizer.training.evaluate import validate
from topovq.tokenizer.training.record import RECORD_FILE, read_record


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
    saved = (run / CONFIG_FILE).exists()
    newest = newest_whole(run) if unfinished or not saved else None
    if newest is None and not saved:
        raise FileNotFoundError(f"{run} holds neither a model ({CONFIG_FILE}) nor a checkpoint that is whole")
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
