"""What a prior is and how far it got: `topovq info` of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topovq.prior.settings import steps_done
from topovq.storage import CONFIG, read_json
from topovq.tokenizer.training.checkpoint import checkpoints
from topovq.tokenizer.training.record import RECORD_FILE, read_record


def info(folder: str | Path) -> dict[str, Any]:
    """What there is to know about a prior without its weights, from its record and its configuration."""
    folder = Path(folder)
    record, places = folder / RECORD_FILE, [folder, *reversed(checkpoints(folder))]
    lines = read_record(record) if record.is_file() else [{}]
    validations = [line for line in lines if line.get("event") == "validation"]
    found = [line["bits_per_token"] for line in validations if line.get("bits_per_token") is not None]
    return {
        "prior": str(folder),
        "finished": lines[-1].get("event") == "final",
        "step": steps_done(folder, lines),
        "model": next((read_json(place / CONFIG) for place in places if (place / CONFIG).is_file()), None),
        "config": lines[0],
        "validation": validations[-1] if validations else None,
        "best_bits_per_token": min(found, default=None),
    }


def summary(facts: Mapping[str, Any]) -> list[str]:
    """What `info` tells of a prior, in a few lines."""
    model, config, last = facts["model"] or {}, facts["config"], facts["validation"]
    told = {"prior": facts["prior"]}
    run, tokenizer = model.get("run") or config.get("run") or config.get("source"), model.get("tokenizer")
    told["of run"] = f"{run}" + (f", tokenizer {tokenizer[:12]}" if tokenizer else "")
    if config:
        state = "finished" if facts["finished"] else "not finished"
        told["state"] = f"step {facts['step']:,} of {config['steps']:,}, {state}"
        train, validation = config["train_images"], config["validation_images"]
        told["data"] = f"{config['source']}: {train:,} training and {validation:,} validation images"
        told["model"] = f"{config['parameters']:,} parameters, head {config['head']}"
    if classes := model.get("classes"):
        told["classes"] = f"{classes:,}: {', '.join((model.get('class_names') or [])[:5])}" + ", ..." * (classes > 5)
    if config:
        best = facts["best_bits_per_token"]
        bits = "no finite loss" if best is None else f"best {best:.3f} bits a token"
        told["validation"] = bits if last is not None else "none yet"
    return [f"{name:12}{text}" for name, text in told.items()]
