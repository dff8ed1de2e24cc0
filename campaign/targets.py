"""What is attacked: the files of each format, what a user does with them, and when the result is right."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # what an optimizer would import in every case, for half a second
from PIL import Image

from campaign import mutate
from campaign.mutate import Mutation
from campaign.sound import SIZE, prior, trained, vectors
from topovq import KohonenVQ, SelfOrganizingMap
from topovq.cli import main
from topovq.exits import one_line_errors
from topovq.tokenizer.data.decode import decode as decode_image
from topovq.tokenizer.models import load_pretrained

Image.init()
Use = Callable[[], Any]


@dataclass(frozen=True)
class Attack:
    """One case: the file that was damaged, how, and what is known of it."""

    target: Target
    file: str
    how: str
    use: Use
    hostile: bool
    data: bytes


@dataclass(frozen=True)
class Target:
    """Files of one format.

    files    those that are attacked, relative to the case's folder
    uses     what a user does with them; each gives something to compare with what the sound files give
    inside   mutations of this format alone
    hostile  the folder of hostile.py whose files stand in for the first file
    judge    whether a result that differs from the sound one is right all the same
    """

    format: str
    files: tuple[str, ...]
    uses: tuple[Use, ...]
    inside: dict[str, Mutation] = field(default_factory=dict)
    hostile: str | None = None
    judge: Callable[[Attack, Any, Any, str], bool] = lambda attack, got, sound, text: False


def printed(*words: str) -> Any:
    """What a command prints, as JSON: strictly, since NaN is none."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(list(words))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(out.getvalue(), parse_constant=refuse)


def tokens_of(path: str) -> dict[str, bytes]:
    with np.load(path) as arrays:
        return {str(name): row.tobytes() for name, row in zip(arrays["image"], arrays["tokens"], strict=True)}


def encode(run: str, images: str) -> dict[str, bytes]:
    main(["encode", run, images, "-o", "out.npz", "--workers", "0", "--device", "cpu", "--force"])
    return tokens_of("out.npz")


def evaluate(run: str) -> Any:
    return printed("evaluate", run, "--device", "cpu")


def info(run: str) -> Any:
    return printed("info", run, "--json")


def decode(tokens: str, *words: str) -> dict[str, str]:
    main(["decode", "run", tokens, "-o", "decoded", "--device", "cpu", *words])
    return {path.name: digest(path) for path in sorted(Path("decoded").rglob("*.png"))}


def resume(run: str) -> str:
    """The weights after the rest of the run, as `topovq train --resume` leaves them but for the report."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with one_line_errors("topovq"):
        trained(run, resume=True)
    return digest(Path(run) / "model.safetensors")


def draw() -> dict[str, str]:
    """The images that the prior draws."""
    main(["sample", "prior", "-n", "4", "-o", "drawn", "--run", "run", "--device", "cpu", "--force"])
    return {path.name: digest(path) for path in sorted(Path("drawn").rglob("*.png"))}


def resume_prior() -> str:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with one_line_errors("topovq"):
        prior("unfinished-prior", resume=True)
    return digest(Path("unfinished-prior/model.safetensors"))


def use_map() -> bytes:
    loaded = SelfOrganizingMap.load("map.safetensors")
    return loaded.predict(vectors()).tobytes() + loaded.transform(vectors()).tobytes()


def use_quantizer() -> bytes:
    quantized, tokens, _ = KohonenVQ.from_pretrained("quantizer")(torch.from_numpy(vectors()))
    return quantized.numpy().tobytes() + tokens.numpy().tobytes()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# Images: a damaged one is what its bytes decode to, or skipped by name; the others are as ever.


def encode_images() -> tuple[dict[str, bytes], dict[str, bytes | None]]:
    """The tokens of every image, from `topovq encode` and from each file by itself."""
    model = load_pretrained("run")
    alone = {path.name: _pixels(path) for path in sorted(Path("images").iterdir())}
    whole = {name: pixels for name, pixels in alone.items() if pixels is not None}
    tokens = model.encode(torch.from_numpy(np.stack(list(whole.values()))).permute(0, 3, 1, 2))
    assert isinstance(tokens, torch.Tensor)
    expected = {name: row.numpy().astype(np.uint16).tobytes() for name, row in zip(whole, tokens)}
    return encode("run", "images"), {name: expected.get(name) for name in alone}


def _pixels(path: Path) -> np.ndarray | None:
    """The pixels of one file; None where it has none, also where what was in memory before shines through."""
    dark, bright = np.zeros((SIZE, SIZE, 3), np.uint8), np.full((SIZE, SIZE, 3), 255, np.uint8)
    if not path.is_file():
        return None
    try:
        for out in (dark, bright):
            decode_image(io.BytesIO(path.read_bytes()) if path.stat().st_size < 2**30 else str(path), SIZE, "crop", out)
    except Exception:
        return None
    return dark if np.array_equal(dark, bright) else None


def images_right(attack: Attack, got: Any, sound: Any, text: str) -> bool:
    encoded, alone = got
    damaged = Path(attack.file).name
    for name in sound[0]:
        if name != damaged and encoded.get(name) != sound[0][name]:
            return False
    if damaged not in encoded:
        return damaged in text or attack.how in ("a gone", "a folder")
    return encoded[damaged] == alone[damaged]


# Records: a run that was killed leaves one that ends early, or none yet.


def record_right(attack: Attack, got: Any, sound: Any, text: str) -> bool:
    if not isinstance(got, dict):
        return False
    figures = ("config", "validation", "best_loss")
    lines = [json.loads(line) for line in attack.data.splitlines()]
    told = [{"config": {}, "validation": None, "best_loss": None}]
    for end in range(1, len(lines) + 1):
        seen = [_plain(line) for line in lines[:end] if line["event"] == "validation"]
        best = min((line["loss"] for line in seen), default=None)
        told.append({"config": _plain(lines[0]), "validation": seen[-1] if seen else None, "best_loss": best})
    rest = {name: value for name, value in sound.items() if name not in figures}
    return got in [{**rest, **each} for each in told]


def _plain(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "crc32"}


# Tars: a member whose bytes are all there has its tokens; one that is missing is spoken of.


def tar_right(attack: Attack, got: Any, sound: Any, text: str) -> bool:
    with tarfile.open(fileobj=io.BytesIO(attack.data)) as tar:
        members = {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]
    mutated = Path(attack.file)
    now = mutated.read_bytes() if mutated.stat().st_size < 2**30 else b""
    for name, tokens in sound.items():
        if name not in got and name not in text and mutated.name not in text:
            return False
        if name in got and got[name] != tokens and members[name] in now:
            return False
    return True


# Files of before there were manifests: what cannot be told from a sound one is taken, with a note.


def noted(attack: Attack, got: Any, sound: Any, text: str) -> bool:
    return not attack.hostile and "manifest.json" in text


def all_targets(sound: Path) -> list[Target]:
    """Every target, with the files that there are."""
    checkpoint = "checkpoints/step-00000004"

    def there(*names: str) -> tuple[str, ...]:
        return tuple(name for name in names if (sound / name).is_file())

    def saved(run: str) -> tuple[str, ...]:
        return there(f"{run}/model.safetensors", f"{run}/manifest.json")

    json_inside, header_inside = {"a value": mutate.json_value}, {"a header's value": mutate.safetensors_header}
    state = [f"{run}/{checkpoint}" for run in ("unfinished", "unfinished-before")]
    return [
        Target("model", saved("run"), (lambda: encode("run", "images"), lambda: evaluate("run")), hostile="weights"),
        Target(
            "config",
            ("run/config.json",),
            (lambda: encode("run", "images"), lambda: evaluate("run"), lambda: info("run")),
            json_inside,
            "config",
        ),
        Target("checkpoint", (f"{state[0]}/state.pt", *saved(state[0])), (lambda: resume("unfinished"),), {}, "state"),
        Target("prior", (*saved("prior"), "prior/config.json"), (draw,), hostile="weights"),
        Target(
            "prior's checkpoint",
            (
                f"unfinished-prior/{checkpoint}/state.pt",
                *saved(f"unfinished-prior/{checkpoint}"),
                "unfinished-prior/tokens.safetensors",
            ),
            (resume_prior,),
        ),
        Target(
            "record",
            ("unfinished/record.jsonl",),
            (lambda: resume("unfinished"), lambda: info("unfinished")),
            {"a line": mutate.json_line},
            judge=record_right,
        ),
        Target("Parquet tokens", ("tokens.parquet",), (lambda: decode("tokens.parquet"),), hostile="parquet"),
        Target(
            "npz tokens",
            ("tokens.npz",),
            (lambda: decode("tokens.npz"),),
            {"an array's header": mutate.npy_header, "a bomb": mutate.zip_bomb},
            "npz",
        ),
        Target("coded tokens", ("tokens.tvq",), (lambda: decode("tokens.tvq", "--prior", "prior"),)),
        Target(
            "images",
            tuple(f"images/{path.name}" for path in sorted((sound / "images").iterdir())),
            (encode_images,),
            hostile="image",
            judge=images_right,
        ),
        Target(
            "tar",
            ("shards/val.tar",),
            (lambda: encode("run", "shards/val.tar"),),
            hostile="tar",
            judge=tar_right,
        ),
        Target(
            "tar index",
            tuple(str(path.relative_to(sound)) for path in (sound / "cache" / "shards").iterdir()),
            (lambda: encode("run", "shards/val.tar"),),
        ),
        Target("map", ("map.safetensors",), (use_map,), header_inside),
        Target(
            "quantizer",
            there("quantizer/model.safetensors", "quantizer/config.json", "quantizer/manifest.json"),
            (use_quantizer,),
        ),
        Target(
            "older model",
            there("run-before/model.safetensors"),
            (lambda: encode("run-before", "images"),),
            header_inside,
            "weights",
            noted,
        ),
        Target(
            "older config",
            ("run-before/config.json",),
            (lambda: encode("run-before", "images"), lambda: info("run-before")),
            json_inside,
            "config",
            noted,
        ),
        Target(
            "older checkpoint",
            (f"{state[1]}/state.pt", f"{state[1]}/model.safetensors"),
            (lambda: resume("unfinished-before"),),
            {},
            "state",
            noted,
        ),
    ]


def enter(folder: Path) -> None:
    """Be in the case's folder, with its cache."""
    os.chdir(folder)
    os.environ["TOPOVQ_CACHE"] = str(folder / "cache")
