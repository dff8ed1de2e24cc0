"""Runs in a few lines for a person to read: `topovq info` and `topovq runs`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from topovq.tokenizer.training.checkpoint import checkpoints, step_of
from topovq.tokenizer.training.progress import duration
from topovq.tokenizer.training.record import RECORD_FILE, read_record

COLUMNS = ("run", "data", "quantizer", "codes", "step", "loss", "psnr", "usage")


def summary(facts: Mapping[str, Any]) -> list[str]:
    """What `info` tells of a run, in at most ten lines."""
    model, config, last = facts["model"], facts["config"], facts["validation"]
    shapes = " and ".join("x".join(map(str, shape)) for shape in facts["tokens_per_image"])
    told = {"run": facts["run"]}
    if config:
        state = "finished" if facts["finished"] else f"not finished, {config['steps']:,} steps are to be done"
        told["state"] = f"step {facts['step'] or 0:,}, {state}"
        told["data"] = _data(config)
        told["training"] = f"{config['steps']:,} steps of {config['batch_size']:,} images, seed {config['seed']}"
        told["hardware"] = str(config["hardware"])
    told["model"] = f"{model['model']}, {facts['parameters']:,} parameters, images of {_square(model['image_size'])}"
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


def _square(side: int) -> str:
    return f"{side}x{side}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
