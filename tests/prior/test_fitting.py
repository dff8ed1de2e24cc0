"""Training a prior: stopping, resuming, ranks, token files, labels, and what is refused."""

from __future__ import annotations

import inspect
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from small_runs import make_run
from tiny_prior import tiny_prior

from topovq.cli import main
from topovq.prior import Prior
from topovq.prior import fitting as fitting_module
from topovq.prior.fitting import Fit, fit
from topovq.prior.settings import LAST_WIDTH, PriorConfig
from topovq.storage import model_id
from topovq.tokenizer.tokenfile import open_writer
from topovq.tokenizer.tokens import encode
from topovq.tokenizer.training import Interrupted, read_record

TINY = Path(__file__).parent / "tiny_prior.py"


def figures(folder: Path) -> dict[int, Any]:
    lines = [line for line in read_record(folder / "record.jsonl") if line["event"] == "validation"]
    return {line["step"]: (line["loss"], line["train_loss"]) for line in lines}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def whole(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted training, with labels that are hidden at random and targets that are smoothed at random."""
    out = tmp_path_factory.mktemp("whole") / "prior"
    fit(tiny_prior(run, out, labels=True, smoothing=1.0), quiet=True)
    return out


def test_a_prior_that_is_stopped_goes_on_as_if_it_had_not_been(run, whole, tmp_path, monkeypatch) -> None:
    out, step = tmp_path / "prior", Fit._step

    def press(self: Fit) -> None:
        step(self)
        if self.step == 6:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Fit, "_step", press)
        with pytest.raises(Interrupted, match=r"stopped at step 6 of 12.*--resume continues") as stopped:
            fit(tiny_prior(run, out, labels=True, smoothing=1.0), quiet=True)
    assert stopped.value.exit_code == 130
    with pytest.raises(FileExistsError, match="--resume"):
        fit(tiny_prior(run, out, labels=True, smoothing=1.0), quiet=True)
    with pytest.raises(ValueError, match=r"started with smoothing=1.0 but is resumed with smoothing=2.0"):
        fit(tiny_prior(run, out, labels=True, smoothing=2.0, resume=True), quiet=True)
    fit(tiny_prior(run, out, labels=True, smoothing=1.0, resume=True), quiet=True)
    assert figures(out) == figures(whole)
    assert all(torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(out).items())
    before = (out / "record.jsonl").read_bytes()
    monkeypatch.setattr(fitting_module, "make_corpus", None)  # one that is finished is not repeated
    assert fit(tiny_prior(run, out, labels=True, smoothing=1.0, resume=True)).best_loss == min(
        loss for loss, _ in figures(whole).values()
    )
    assert (out / "record.jsonl").read_bytes() == before


def test_two_processes_do_what_one_does(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(TINY)]
    done = subprocess.run([*command, str(run), str(tmp_path / "two")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    fit(tiny_prior(run, tmp_path / "one"), quiet=True)
    for name, ours in weights(tmp_path / "two").items():
        torch.testing.assert_close(ours, weights(tmp_path / "one")[name], rtol=1e-3, atol=1e-4)
    assert read_record(tmp_path / "two" / "record.jsonl")[0]["world_size"] == 2


def test_what_a_prior_is_and_where_its_tokenizer_lies(run: Path, whole: Path) -> None:
    prior = Prior.from_pretrained(whole)
    assert prior.tokenizer == model_id(run)
    assert prior.run == str(run)
    assert prior.class_names == ["blue", "green", "red", "white"]
    first = read_record(whole / "record.jsonl")[0]
    assert (first["train_images"], first["validation_images"], first["classes"]) == (80, 16, 4)


def test_the_best_validation_is_kept(run: Path, tmp_path: Path, monkeypatch) -> None:
    losses = iter([2.0, 1.0, 3.0])
    monkeypatch.setattr(Fit, "validated", lambda self: {"loss": next(losses), "bits_per_token": 0, "bits_per_image": 0})
    kept = []
    monkeypatch.setattr(fitting_module, "write_files", lambda folder, files: kept.append(files["model.safetensors"]))
    result = fit(tiny_prior(run, tmp_path / "prior"), quiet=True)
    assert (result.best_loss, len(kept)) == (1.0, 2)
    at_8 = (tmp_path / "prior" / "checkpoints" / "step-00000008" / "model.safetensors").read_bytes()
    assert kept[1] == at_8


def test_validation_is_the_mean_over_all_tokens(run: Path, tmp_path: Path) -> None:
    result = fit(tiny_prior(run, tmp_path / "prior", steps=4), quiet=True)
    prior = Prior.from_pretrained(tmp_path / "prior")
    tokens = safetensors.torch.load_file(tmp_path / "prior" / "tokens.safetensors")["validation"].long()
    with torch.no_grad():
        expected = -prior.log_probs(tokens).mean().item()
    assert result.validation["loss"] == pytest.approx(expected, rel=1e-5)
    assert result.validation["bits_per_token"] == pytest.approx(expected / math.log(2), rel=1e-5)
    assert result.validation["bits_per_image"] == pytest.approx(prior.length * expected / math.log(2), rel=1e-5)


def test_a_token_file_gives_the_same_prior_as_the_run(run: Path, whole: Path, tmp_path: Path) -> None:
    pictures = Path(read_record(run / "record.jsonl")[0]["data"])
    encode(run, pictures, tmp_path / "tokens.parquet", device="cpu", workers=0)
    out = tmp_path / "prior"
    fit(tiny_prior(tmp_path / "tokens.parquet", out, run=run, labels=True, smoothing=1.0), quiet=True)
    assert figures(out) == figures(whole)


def write_file(path: Path, names: list[str], tokens: torch.Tensor, model: str | None = None) -> Path:
    with open_writer(path, [tuple(tokens.shape[1:])], 1 << 17, model) as writer:
        writer.write(names, [tokens])
    return path


def test_tokens_and_labels_that_do_not_fit_are_refused(run: Path, tmp_path: Path) -> None:
    names = [f"{'cat' if i % 2 else 'dog'}/{i}.png" for i in range(40)]
    good = torch.randint(12, (40, 4, 4))

    def refused(match: str, names: list[str] = names, tokens: torch.Tensor = good, **changes: Any) -> None:
        model = changes.pop("model", None)
        path = write_file(tmp_path / "tokens.parquet", names, tokens, model)
        with pytest.raises(ValueError, match=match):
            fit(tiny_prior(path, tmp_path / "prior", **{"run": run, "labels": True, **changes}), quiet=True)

    refused(r"whose tokens does .* hold\? Give the run that encoded them: --run RUN", run=None)
    refused(r"written by another tokenizer \(abababababab\)", model="ab" * 32)
    refused(
        r"holds tokens from 0 to 12; the tokenizer's codes are 0 to 11",
        tokens=good.clone().index_fill_(0, torch.tensor(3), 0).index_fill_(0, torch.tensor(4), 12),
    )
    refused(
        r"shapes \[\(8, 8\)\] an image; the tokenizer's are \[\(4, 4\)\]",
        tokens=torch.zeros(40, 8, 8, dtype=torch.long),
    )
    refused(r"the image '0.png' has no label", names=[f"{i}.png" for i in range(40)])
    refused(r"lie in 1 folder \(cat\): expected 2 to 1,024 classes", names=[f"cat/{i}.png" for i in range(40)])
    refused(r"has 2 images of the name 'dog/2.png'; the names", names=[*names[:-1], "dog/2.png"])
    sides = [f"train/{name}" for name in names[:30]] + [f"val/bird/{i}.png" for i in range(10)]
    refused(r"no training image has the label 'bird'", names=sides)
    with pytest.raises(ValueError, match=r"is a run already; --run"):
        fit(tiny_prior(run, tmp_path / "prior", run=run), quiet=True)
    for name in ("coded.tvq", "text.txt", "pictures"):
        (tmp_path / name).mkdir() if name == "pictures" else (tmp_path / name).write_text("text")
        told = "coded by a prior" if name == "coded.tvq" else "is no token file, which ends in .parquet or .npz"
        for given in (run, None) if name != "pictures" else (run,):
            with pytest.raises(ValueError, match=f"{name}' is .*{told[-20:]}"):
                fit(tiny_prior(tmp_path / name, tmp_path / "prior", run=given), quiet=True)
    assert not (tmp_path / "prior").exists()


def press(*arguments: object, **options: object) -> None:
    raise KeyboardInterrupt


def test_a_refused_training_leaves_nothing(run: Path, tmp_path: Path, monkeypatch) -> None:
    bad = write_file(tmp_path / "bad.parquet", ["0.png", "1.png"], torch.full((2, 4, 4), 99))
    for out in (tmp_path / "new" / "prior", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=r"holds tokens from 99 to 99"):
            fit(tiny_prior(bad, out, run=run), quiet=True)
    assert not (tmp_path / "new").exists()
    assert not list((tmp_path / "empty").iterdir())  # an empty folder that was there stays
    with pytest.raises(ValueError, match=r"dim=18 must be a multiple of 4 \* heads, which is 8"):
        fit(tiny_prior(run, tmp_path / "new", dim=18), quiet=True)
    with pytest.raises(ValueError, match=r"seed=-1 must be a whole number from 0"):
        fit(tiny_prior(run, tmp_path / "new", seed=-1), quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr(fitting_module, "make_corpus", press)
        with pytest.raises(Interrupted, match="before the first step; the same command begins again") as stopped:
            fit(tiny_prior(run, tmp_path / "new"), quiet=True)
    assert stopped.value.exit_code == 130
    monkeypatch.setattr("topovq.tokenizer.atlas.charts", lambda model: [])
    with pytest.raises(ValueError, match="have no places on a map"):
        fit(tiny_prior(run, tmp_path / "new"), quiet=True)
    assert not (tmp_path / "new").exists()


def test_a_map_of_four_axes_needs_another_head(tmp_path: Path) -> None:
    options = {"grid": [2, 2, 1, 3]}
    run = make_run(tmp_path / "run", quantizer_options=options, image_size=16, steps=1, validate_every=1)
    match = r"head='map' takes maps of up to 3 axes, but this tokenizer's is \[2, 2, 1, 3\]: --head flat works"
    with pytest.raises(ValueError, match=match):
        fit(tiny_prior(run, tmp_path / "prior"), quiet=True)
    assert not (tmp_path / "prior").exists()
    fit(tiny_prior(run, tmp_path / "prior", head="flat", images=32, steps=1, validate_every=1), quiet=True)


def test_folders_of_others_are_refused(run: Path, whole: Path, tmp_path: Path) -> None:
    """Nothing is written to a folder that is not a prior's."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for name in ("a.png", "b.png"):
        (pictures / name).write_bytes(b"mine")
    match = r"is no training of a prior: it holds 'a.png' and 1 more; choose a new folder"
    for resume in (False, True):
        with pytest.raises(FileExistsError, match=match):
            fit(tiny_prior(run, pictures, resume=resume), quiet=True)
    assert sorted(path.name for path in pictures.iterdir()) == ["a.png", "b.png"]
    with pytest.raises(FileExistsError, match=r"a.png is a file; --out names a folder"):
        fit(tiny_prior(run, pictures / "a.png"), quiet=True)
    Prior.from_pretrained(whole).save_pretrained(tmp_path / "saved")
    with pytest.raises(FileExistsError, match=r"is no training of a prior: it holds 'README.md' and 3 more"):
        fit(tiny_prior(run, tmp_path / "saved", resume=True), quiet=True)
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"holds no prior, but 'vqvae'; choose another --out"):
            fit(tiny_prior(run, run, resume=resume), quiet=True)


def test_a_training_that_was_cut_off_before_its_record_starts_again(run: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "prior"
    out.mkdir()
    for name in ("tokens.safetensors", ".lock"):
        shutil.copy(whole / name, out / name)
    fit(tiny_prior(run, out, labels=True, smoothing=1.0), quiet=True)
    assert figures(out) == figures(whole)


def test_a_training_says_what_it_trains_on_and_how_long_it_will_take(run: Path, tmp_path: Path, capsys) -> None:
    fit(tiny_prior(run, tmp_path / "prior", preset="auto"))
    said = capsys.readouterr().out.splitlines()
    threads = torch.get_num_threads()
    assert said[0] == "On a CPU: a small model; --preset full trains the full one."
    assert said[2].endswith(f"12 steps on the CPU, {threads} thread" + "s" * (threads != 1))
    assert re.fullmatch(r"about \d+ s for 12 steps \([\d.e-]+ s a step\)", said[3])


def test_the_command_and_the_settings_say_the_same_of_what_is_not_given(run: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["prior", "--help"])
    said = " ".join(re.sub(r"[│|]", " ", capsys.readouterr().out).split())
    source = " ".join(inspect.getsource(PriorConfig).split())
    for told in (
        "If it is not given, the command takes auto, and PriorConfig full.",
        "If it is not given, the command does where the machine has CUDA, and PriorConfig where",
        "of maps of up to three axes",
    ):
        assert told in said
        assert told in source
    fit(tiny_prior(run, tmp_path, steps=1, validate_every=1), quiet=True)
    config = tiny_prior(run, tmp_path, steps=2, dim=None, validate_every=1, preset="small", resume=True)
    assert config.resolve("cpu").dim == 16  # as generate.md says


def test_settings() -> None:
    config = PriorConfig("run", steps=100, learning_rate=1.0, smoothing=4.0).resolve("cpu")
    assert (config.rate(0), config.rate(4)) == (0.2, 1.0)  # five steps of rising
    assert config.rate(5) == 1.0
    assert config.rate(100) == pytest.approx(0.1)
    assert config.widths is not None
    assert [config.widths(torch.tensor(t)).item() for t in (0, 50)] == pytest.approx([4.0, LAST_WIDTH])
    assert PriorConfig("run", preset="auto").resolve("cuda").dim == 384
    small = PriorConfig("run", preset="auto").resolve("cpu")
    assert (small.dim, small.layers, small.heads, small.batch_size, small.steps) == (96, 3, 3, 16, 1_000)
    for field, value, match in (
        ("steps", 0, "steps=0 must be a whole number"),
        ("smoothing", 0.1, "smoothing=0.1 must be 0, or at least 0.3"),
        ("head", "round", "unknown head 'round'"),
        ("learning_rate", math.nan, "learning_rate=nan"),
        ("seed", -1, r"seed=-1 must be a whole number from 0 to 2\*\*63 - 1"),
        ("seed", 10**23, f"seed={10**23} must be"),
        ("seed", 0.5, "seed=0.5 must be"),
    ):
        with pytest.raises(ValueError, match=match):
            PriorConfig("run", **{field: value}).resolve("cpu")
