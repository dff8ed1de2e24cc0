"""The course of a training in the record is that of the batches themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinySource, tiny_config

from topovq.metrics import code_counts, perplexity
from topovq.quantizers import Quantizer
from topovq.tokenizer.models import Tokenizer
from topovq.tokenizer.training import read_record, train


def traces(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_record(folder / "record.jsonl") if line["event"] == "trace"]


def test_every_third_batch_is_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, used = [], []
    original = Tokenizer.losses

    def kept(self: Tokenizer, x: torch.Tensor) -> Any:
        found = original(self, x)
        losses.append(float(found[1].detach()))
        return found

    def keep(module: Any, _: Any, output: Any) -> None:
        if isinstance(module, Quantizer) and module.training:
            used.append(float(perplexity(code_counts(output.indices, module.codebook_size))))

    monkeypatch.setattr(Tokenizer, "losses", kept)
    hook = torch.nn.modules.module.register_module_forward_hook(keep)
    try:
        train(tiny_config(tmp_path / "run", trace_every=3), source=TinySource(), quiet=True)
    finally:
        hook.remove()
    assert len(losses) == len(used) == 12
    found = traces(tmp_path / "run")
    assert [(line["step"], line["first"], line["every"]) for line in found] == [(4, 3, 3), (8, 6, 3), (12, 9, 3)]
    assert [x for line in found for x in line["losses"]] == pytest.approx(losses[2::3], rel=1e-5)
    assert [x for line in found for x in line["perplexities"][0]] == pytest.approx(used[2::3], rel=1e-5)
    usual = tiny_config(tmp_path / "usual")
    train(usual, source=TinySource(), quiet=True)
    assert traces(tmp_path / "usual") == []
    told = [
        [{k: v for k, v in line.items() if k in ("loss", "train_loss", "perplexity")} for line in read_record(path)]
        for path in (tmp_path / "usual" / "record.jsonl", tmp_path / "run" / "record.jsonl")
    ]
    assert [line for line in told[0] if line] == [line for line in told[1] if line]  # looking changes nothing


def test_a_resumed_run_has_the_course_of_a_whole_one(tmp_path: Path) -> None:
    for folder, lengths in (("whole", [12]), ("parts", [6, 12])):
        for steps in lengths:
            config = tiny_config(tmp_path / folder, trace_every=2, steps=steps, checkpoint_every=3, resume=True)
            train(config, source=TinySource(), quiet=True)
    points = [
        [(line["first"] + 2 * i, loss) for line in traces(tmp_path / folder) for i, loss in enumerate(line["losses"])]
        for folder in ("whole", "parts")
    ]
    assert points[0] == points[1]
    assert [step for step, _ in points[0]] == [2, 4, 6, 8, 10, 12]
