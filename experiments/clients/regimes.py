"""Other regimes than that of the study `clients`, small but real: rows of docs/results/regimes.csv.

    python -m experiments.clients.regimes OUT.csv --data FOLDER --audio RECORDINGS       on a GPU, some minutes
    python -m experiments.clients.regimes OUT.csv --data FOLDER --audio RECORDINGS --small      a small model, on a CPU

FOLDER holds imagenet160 and faces256 (clients/run.py). RECORDINGS holds the wav files of the Free Spoken Digit Dataset
(3,000 of six speakers, github.com/Jakobovski/free-spoken-digit-dataset); those with an index below 5 are its test set.
Either may be left out: rows of OUT.csv that are not measured again stay.

    fine-tuning         a model that was trained on photographs goes on with faces; `jumped` is the share of its codes
                        that end farther from where they were than two codes are apart on average
    10 x learning rate  1e-3
    256 tokens a batch  for 16,384 codes
    1 x 1, 3 x 3        tokens an image
    mel frames          8 codebooks in a row for log-mel frames of speech, without a model; `error` is the share of
                        their variance that is left, `least_used` the use of the codebook that is used least
"""

from __future__ import annotations

import argparse
import csv
import wave
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.clients.images import load_both
from experiments.clients.run import Cell, Run
from experiments.peers import their
from experiments.records import environment
from experiments.tables import Line, lines_as_csv
from topovq import ResidualVQ
from topovq.metrics import code_counts, perplexity, usage

METHODS = ("recommended", "vqp-rewritten", "ema")
NEW = "faces256"
FINE_TUNING = "fine-tuning"
SMALL = Cell(K=1_024, steps=400, crop=32, hidden=16)
KEY = ("regime", "method", "K", "d", "steps", "tokens_per_batch", "n")
COLUMNS = ("psnr", "error", "used", "least_used", "tokens_per_code", "perplexity", "topographic_error", "jumped", "ms")
# Speech: windows of 32 ms every 10 ms at 8 kHz
RATE, WINDOW, HOP, BANDS = 8_000, 256, 80, 64
LEVELS, CODES, UPDATES, BATCH = 8, 512, 1_500, 2_048


def regimes(small: bool) -> dict[str, Cell]:
    base = SMALL if small else Cell()
    tokens = (base.crop // base.stride) ** 2
    few = replace(base, K=1_024, stride=32)
    return {
        "10 x learning rate": replace(base, learning_rate=10 * base.learning_rate),
        "256 tokens a batch": replace(base, K=16_384, batch=256 // tokens),
        "1 x 1 tokens": replace(few, crop=32),
        "3 x 3 tokens": replace(few, crop=96),
        FINE_TUNING: base,
    }


def train(regime: str, cell: Cell, images: dict[str, tuple[Tensor, Tensor]]) -> Line:
    """What a run of a regime has become."""
    run = Run(cell, *images[cell.data])
    run.advance(cell.steps)
    jumped = None
    if regime == FINE_TUNING:
        before_KD = codes_of(run)
        run.see(*images[NEW])
        run.advance(cell.steps)
        spread = (before_KD - before_KD.roll(len(before_KD) // 2 + 1, 0)).norm(dim=1).mean()
        jumped = float(((codes_of(run) - before_KD).norm(dim=1) > spread).double().mean())
    measured = {name: value for name, value in run.measure().items() if name in COLUMNS}
    return {**measured, "jumped": jumped, "ms": run.ms}


def codes_of(run: Run) -> Tensor:
    codes: Any = run.quantizer.codebook
    return codes.detach().float().clone()


# Speech


def mel_frames(folder: Path) -> tuple[Tensor, Tensor]:
    """Log-mel frames [N, BANDS] of the recordings, training and test, each band with mean 0 and variance 1."""
    paths = sorted(folder.glob("*.wav"))
    if not paths:
        raise FileNotFoundError(f"there are no wav files in {folder}")
    frames: dict[bool, list[Tensor]] = {False: [], True: []}
    filters = mel_filters()
    for path in paths:
        with wave.open(str(path)) as file:
            if (file.getframerate(), file.getsampwidth(), file.getnchannels()) != (RATE, 2, 1):
                raise ValueError(f"{path}: expected one channel of 16 bits at {RATE} Hz")
            sound = torch.from_numpy(np.frombuffer(file.readframes(file.getnframes()), np.int16) / 2**15).float()
        sound = torch.nn.functional.pad(sound, (0, max(0, WINDOW - len(sound))))
        power = torch.stft(sound, WINDOW, HOP, window=torch.hann_window(WINDOW), center=False, return_complex=True)
        index = int(path.stem.rsplit("_", 1)[1])
        frames[index < 5].append((filters @ power.abs().square() + 1e-6).log().T)
    trained, tested = torch.cat(frames[False]), torch.cat(frames[True])
    mean, std = trained.mean(0), trained.std(0)
    return (trained - mean) / std, (tested - mean) / std


def mel_filters() -> Tensor:
    """Triangles [BANDS, WINDOW / 2 + 1], evenly spaced on the mel scale from 0 to half the rate."""
    most = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, most, BANDS + 2) / 2595) - 1)
    at = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    low, middle, high = (edges[first : first + BANDS, None] for first in range(3))
    triangles = np.clip(np.minimum((at - low) / (middle - low), (high - at) / (high - middle)), 0, None)
    return torch.from_numpy(triangles).float()


def quantize_speech(method: str, frames: tuple[Tensor, Tensor], updates: int) -> Line:
    """A ResidualVQ that learns from batches of frames, then what it leaves of the test frames."""
    torch.manual_seed(0)
    trained, tested = frames
    layer: Any
    if method == "vqp":
        options = {"kmeans_init": True, "threshold_ema_dead_code": 2, "decay": 0.99, "rotation_trick": False}
        layer = their("ResidualVQ")(dim=BANDS, codebook_size=CODES, num_quantizers=LEVELS, **options)
    else:
        ema: Any = {"neighborhood": "none"} if method == "ema" else {}
        layer = ResidualVQ(BANDS, CODES, LEVELS, **ema)
    layer = layer.to(trained.device).train()
    for _ in range(updates):
        layer(trained[torch.randint(0, len(trained), (1, BATCH), device=trained.device)])
    with torch.no_grad():
        quantized, indices, *_ = layer.eval()(tested[None])
    counts = [code_counts(level, CODES) for level in indices[0].unbind(-1)]
    used = [float(usage(level)) for level in counts]
    return {
        "error": float((tested - quantized[0]).square().mean() / tested.square().mean()),
        "used": sum(used) / LEVELS,
        "least_used": min(used),
        "tokens_per_code": len(tested) / CODES,
        "perplexity": sum(float(perplexity(level)) for level in counts) / LEVELS,
    }


def rows(data: Path | None, audio: Path | None, small: bool, device: torch.device) -> Iterator[Line]:
    if audio is not None:
        frames = mel_frames(audio)
        frames = frames[0].to(device), frames[1].to(device)
        for method in ("recommended", "vqp", "ema"):
            key = {"regime": "mel frames, 8 levels", "method": method, "K": CODES, "d": BANDS, "steps": UPDATES}
            yield {**key, "tokens_per_batch": BATCH, **quantize_speech(method, frames, UPDATES)}
    if data is not None:
        images: dict[str, tuple[Tensor, Tensor]] = {}
        for regime, cell in regimes(small).items():
            for name in (cell.data, NEW) if regime == FINE_TUNING else (cell.data,):
                if name not in images:
                    images[name] = load_both(data, name, device)
            for method in METHODS:
                key = {"regime": regime, "method": method, "K": cell.K, "d": cell.d, "steps": cell.steps}
                key["tokens_per_batch"] = cell.batch * (cell.crop // cell.stride) ** 2
                yield {**key, **train(regime, replace(cell, method=method), images)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the CSV file")
    parser.add_argument("--data", type=Path, help="folder of the images")
    parser.add_argument("--audio", type=Path, help="folder of the recordings")
    parser.add_argument("--small", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--commit", help="of the source, where that is not in a git repository")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = environment(device, asked.commit)
    for row in rows(asked.data, asked.audio, asked.small, device):
        shown = {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in row.items()}
        print(*(f"{name}={value}" for name, value in shown.items() if value is not None), flush=True)
        add(asked.out, {**shown, "n": 1, **facts})


def add(out: Path, row: Line) -> None:
    """Write a row to the CSV file, in the place of one of the same regime and method."""
    before: list[Line] = []
    if out.exists():
        with open(out, newline="") as file:
            before = [each for each in csv.DictReader(file) if any(each[name] != row[name] for name in KEY[:2])]
    facts = dict.fromkeys(name for each in (*before, row) for name in each if name not in (*KEY, *COLUMNS))
    out.write_text(lines_as_csv([*before, row], [*KEY, *COLUMNS, *facts]))


if __name__ == "__main__":
    main()
