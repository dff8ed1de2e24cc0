"""New images from a prior and completed ones, from Python and by the commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import make_run
from tiny_prior import tiny_prior

import topovq
from topovq.cli import main
from topovq.prior import Prior
from topovq.prior.contact import enlarged, sheet
from topovq.prior.fitting import fit
from topovq.prior.generate import _copies, complete, draw, kept_steps, label_number, open_prior, sample
from topovq.prior.nearest import find_nearest
from topovq.prior.settings import unfinished
from topovq.tokenizer.tokenfile import model_of, read_tokens
from topovq.tokenizer.tokens import decode, encode
from topovq.tokenizer.training import read_record


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


def test_samples_are_of_their_class(run: Path, labeled: Path, tmp_path: Path) -> None:
    """Images, tokens that decode to the same images, and a sheet with a column for each class."""
    shown = sample(labeled, 8, tmp_path / "new", guidance=1.5, seed=3, device="cpu").sheet
    images = sorted(path.relative_to(tmp_path / "new" / "images") for path in shown.parent.rglob("images/*/*.png"))
    first = {"blue": 0, "green": 1, "red": 2, "white": 3}
    assert list(map(str, images)) == [f"{name}/0000{i + 4 * turn}.png" for name, i in first.items() for turn in (0, 1)]
    mean = {name: pixels(tmp_path / "new" / "images" / name).mean((0, 1)) for name in map(str, images)}
    model, data = topovq.load(run), Path(read_record(run / "record.jsonl")[0]["data"])
    decoded = {name: model.decode(model.encode(data / "val" / name / "0.png")) for name in first}
    for name, color in mean.items():  # the class whose images, once decoded, are nearest in color is its own
        away = {c: abs(color - image[0].double().mean((1, 2)).numpy()).sum() for c, image in decoded.items()}
        assert min(away, key=away.get) == name.split("/")[0], (name, away)
    assert pixels(shown).shape == (2 * 66 + 2, 4 * 66 + 2, 3)  # images of 16 pixels, enlarged to 64
    tokens = tmp_path / "new" / "tokens.parquet"
    assert model_of(tokens) == open_prior(labeled).prior.tokenizer
    decode(run, tokens, tmp_path / "decoded", device="cpu")
    for name in mean:
        assert (pixels(tmp_path / "decoded" / name) == pixels(tmp_path / "new" / "images" / name)).all()


def test_seeds_and_batches(labeled: Path) -> None:
    pair = open_prior(labeled, device="cpu")
    assert torch.equal(draw(pair, 6, seed=1), draw(pair, 6, seed=1))
    assert torch.equal(draw(pair, 6, seed=1), draw(pair, 6, seed=1, batch_size=4))
    assert not torch.equal(draw(pair, 6, seed=1), draw(pair, 6, seed=2))


def test_what_cannot_be_drawn_is_refused(labeled: Path, tmp_path: Path) -> None:
    pair = open_prior(labeled)
    assert label_number(pair.prior, 1) == label_number(pair.prior, "1") == 1
    with pytest.raises(ValueError, match="number=0 must be at least 1"):
        draw(pair, 0)
    with pytest.raises(ValueError, match="2 labels do not fit 3 images"):
        draw(pair, 3, labels_N=[0, 1])
    assert len(draw(pair, 2, labels_N=[0, 1])) == 2
    with pytest.raises(ValueError, match="known tokens of shape"):
        draw(pair, 1, known_T=torch.full((3,), -1))


def test_a_completed_image_keeps_its_upper_half(run: Path, labeled: Path, tmp_path: Path) -> None:
    data = Path(read_record(run / "record.jsonl")[0]["data"])
    picture = pixels(complete(labeled, data / "val" / "red" / "0.png", tmp_path / "all.png", number=3, device="cpu"))
    assert picture.shape == (68, 5 * 66 + 2, 3)
    original, kept, *drawn = (picture[2:66:4, 2 + 66 * i : 66 + 66 * i : 4] for i in range(5))
    assert (kept[:8] == original[:8]).all()
    assert (kept[8:] == 255).all()
    for each in drawn:  # the tokens of the upper half are the same; the decoder looks around
        assert abs(each[:4] - original[:4]).mean() < 12
        assert each[..., 0].mean() > each[..., 2].mean()  # and the rest follows them: it is red


@pytest.mark.parametrize(
    "kind",
    [{"model": "vqvae2"}, {"quantizer": "residual", "quantizer_options": {"num_quantizers": 2}}],
    ids=["levels", "stages"],
)
def test_levels_and_stages_from_training_to_pictures(kind: dict, run: Path, tmp_path: Path) -> None:
    data = read_record(run / "record.jsonl")[0]["data"]
    deep = make_run(tmp_path / "run", data=data, image_size=16, workers=0, **kind)
    result = fit(tiny_prior(deep, tmp_path / "prior", steps=4), quiet=True)
    bits = [result.validation["bits_0"], result.validation["bits_1"]]
    prior = open_prior(tmp_path / "prior").prior
    share = [len(prior.steps(slot)) / prior.length for slot in (0, 1)]
    assert result.validation["bits_per_token"] == pytest.approx(share[0] * bits[0] + share[1] * bits[1])
    sample(tmp_path / "prior", 2, tmp_path / "new", device="cpu")
    _, levels = next(read_tokens(tmp_path / "new" / "tokens.parquet", 2))
    assert [tuple(level.shape[1:]) for level in levels] == prior.shapes
    complete(tmp_path / "prior", tmp_path / "new" / "images" / "00000.png", tmp_path / "all.png", device="cpu")


def test_which_tokens_are_kept_of_two_levels() -> None:
    grid = topovq.Grid(4).to_dict()
    prior = Prior([[2, 2], [4, 1]], [grid, grid], dim=8, layers=1, heads=1)
    assert kept_steps(prior, 0.5).tolist() == [True] * 2 + [False] * 2 + [True] * 2 + [False] * 2
    assert not kept_steps(prior, 0.0).any()
    with pytest.raises(ValueError, match=r"keep=1.0 must be at least 0 and below 1"):
        kept_steps(prior, 1.0)


def test_a_sheet_of_three_images_by_hand() -> None:
    images = torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1)
    w = 255
    rows = [[w, w, 0, w, w, 1, w, w], [w, w, 2, w, w, w, w, w]]
    assert sheet(images)[0, 2].tolist() == rows[0]
    assert sheet(images)[0, 5].tolist() == rows[1]
    assert sheet(images).shape == (1, 8, 8)


def test_small_images_are_enlarged_by_a_whole_factor() -> None:
    images = torch.arange(12, dtype=torch.uint8).view(1, 1, 3, 4)
    assert enlarged(images).shape == (1, 1, 48, 64)
    assert torch.equal(enlarged(images)[:, :, 5::16, 15::16], images)
    assert enlarged(torch.zeros(1, 3, 65, 65)).shape == (1, 3, 65, 65)


def end_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and what was said."""
    code = 0
    try:
        main([*map(str, arguments), "--device", "cpu"])
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return code, said.out + said.err


def test_the_commands(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--steps", 6, "--batch-size", 8, "--dim", 16, "--heads", 2, "--layers", 1]
    out, new = tmp_path / "prior", tmp_path / "new"
    code, said = end_of(capsys, "prior", run, "--out", out, "--labels", *sizes)
    assert code == 0, said
    assert "tokens of 80 training and 16 validation images of 4 classes, 16 an image" in said
    assert "bits a token" in said
    assert f"topovq sample {out} -o samples" in said.replace("\n", "")
    code, said = end_of(capsys, "sample", out, "-n", 5, "--label", "red", "--top-p", 0.9, "-o", new)
    assert (code, "5 images in" in said) == (0, True), said
    assert len(list(new.rglob("images/red/*.png"))) == 5
    names, (tokens,) = next(read_tokens(new / "tokens.parquet", 100))
    assert (names[0], tokens.shape) == ("red/00000.png", (5, 4, 4))
    code, said = end_of(capsys, "complete", out, new / "images" / "red" / "00000.png", "-o", tmp_path / "all.png")
    assert (code, (tmp_path / "all.png").is_file()) == (0, True), said
    assert topovq.load(out).classes == 4
    main(["runs", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[1].split()[:5] == ["prior", "tokenizer", "prior", "12", "6"]

    def refused(words: str, *arguments: object) -> None:
        code, said = end_of(capsys, *arguments)
        assert code == 2
        assert words in " ".join(said.split()), said
        assert said.count("\n") == 1  # one sentence, no traceback

    to = ("-o", tmp_path / "other")
    refused("is there already; --force", "sample", out, "-o", new)
    refused(
        "unknown label 'rde' (did you mean 'red'?); valid: blue, green, red, white",
        "sample",
        out,
        "--label",
        "rde",
        *to,
    )
    refused("label 4 is out of range: the prior's 4 classes are 0 to 3", "sample", out, "--label", "4", *to)
    refused("temperature=-1.0 must be a finite number of at least 0", "sample", out, "--temperature", "-1", *to)
    refused("top_p=2.0 must be above 0 and at most 1", "sample", out, "--top-p", "2", *to)
    for bad in ("nan", "-1", "inf"):
        refused(f"guidance={float(bad)!r} must be a finite number of at least 0", "sample", out, "--guidance", bad, *to)
    refused("top_p=nan must be above 0 and at most 1", "sample", out, "--top-p", "nan", *to)
    said = end_of(capsys, "sample", out, "-n", 0, *to)[1]
    assert said == "topovq: number=0 must be at least 1\n"
    refused("new/sheet.png is a file; -o names a folder for the samples", "sample", out, "-o", new / "sheet.png")
    refused("is a file; -o names", "sample", out, "-o", new / "sheet.png" / "inside")
    refused("there is no folder", "sample", out, *to, "--nearest", tmp_path / "no" / "images")
    refused("'c9.txt' must end in .png", "complete", out, new / "sheet.png", "-o", "c9.txt")
    for image, words in (
        (new / "tokens.parquet", "tokens.parquet is not an image of a known format"),
        (new, "new is a folder; give one image"),
        (tmp_path / "gone.png", "gone.png is not there; give the path of an image"),
    ):
        refused(words, "complete", out, image, "-o", tmp_path / "c.png")
    (tmp_path / "half.png").write_bytes((new / "sheet.png").read_bytes()[:300])
    refused("half.png cannot be read as an image:", "complete", out, tmp_path / "half.png", "-o", tmp_path / "c.png")
    assert not (tmp_path / "other").exists()
    refused("it holds 'all.png' and 3 more", "sample", tmp_path, *to)
    refused("all.png is a file; give the folder of a prior", "sample", tmp_path / "all.png", *to)
    refused(f"`topovq prior RUN --out {to[1]}` would train one", "complete", to[1], new / "sheet.png")
    refused("holds no prior, but 'vqvae'", "sample", run, *to)
    refused("already holds a prior; add --resume", "prior", run, "--out", out)
    refused("is a prior, not a tokenizer: `topovq sample`", "evaluate", out)
    moved = json.loads((out / "config.json").read_text()) | {"run": str(tmp_path / "gone")}
    shutil.copytree(out, tmp_path / "moved")
    (tmp_path / "moved" / "manifest.json").unlink()
    (tmp_path / "moved" / "config.json").write_text(json.dumps(moved))
    refused("is not at", "sample", tmp_path / "moved", *to)


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_force_replaces_what_a_sample_wrote_and_nothing_else(labeled: Path, tmp_path: Path) -> None:
    out, fresh = tmp_path / "new", tmp_path / "fresh"
    sample(labeled, 9, out, device="cpu")
    (out / "notes.txt").write_text("mine")
    (out / "images" / ".hidden").write_text("of the file manager")
    sample(labeled, 2, out, seed=1, label="red", device="cpu", force=True)
    sample(labeled, 2, fresh, seed=1, label="red", device="cpu")
    assert files_in(out) == sorted([*files_in(fresh), "images/.hidden", "notes.txt"])
    assert not (out / "images" / "blue").exists()
    assert (out / "images" / "red" / "00001.png").read_bytes() == (fresh / "images/red/00001.png").read_bytes()
    told = json.loads((out / "samples.json").read_text())
    assert (told["seed"], told["label"], told["number"], told["prior"]) == (1, "red", 2, str(labeled))

    before = {name: (out / name).read_bytes() for name in files_in(out)}
    (out / "images" / "red" / "mine.png").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"mine.png is there, and .*samples.json names no such sample"):
        sample(labeled, 2, out, device="cpu", force=True)
    (out / "images" / "red" / "mine.png").unlink()
    (out / "nearest.png").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"nearest.png is there, and"):
        sample(labeled, 2, out, device="cpu", force=True, nearest="photos")
    (out / "nearest.png").unlink()
    assert {name: (out / name).read_bytes() for name in files_in(out)} == before


def test_force_deletes_nothing_where_no_sample_was_written(run: Path, labeled: Path, tmp_path: Path) -> None:
    """A data set with names like those of samples, and its tokens beside it."""
    (tmp_path / "images").mkdir()
    for i in range(3):
        Image.new("RGB", (16, 16)).save(tmp_path / "images" / f"{i:05}.png")
    encode(run, tmp_path / "images", tmp_path / "tokens.parquet", device="cpu", workers=0)
    before = {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)}
    for force in (False, True):
        with pytest.raises(FileExistsError, match=r"tokens.parquet is there, and there is no .* choose another folder"):
            sample(labeled, 2, tmp_path, device="cpu", force=force)
    assert {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)} == before
    (tmp_path / "tokens.parquet").unlink()
    for names in (["../outside.png"], ["/outside.png"], [3], "x", None):
        (tmp_path / "samples.json").write_text(json.dumps({"files": names}))
        with pytest.raises((ValueError, FileExistsError), match=r"choose another folder"):
            sample(labeled, 2, tmp_path, device="cpu", force=True)
    assert len(list((tmp_path / "images").iterdir())) == 3


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5])
def test_a_seed_that_is_none_is_refused_before_the_prior_is_read(seed: float, tmp_path: Path) -> None:
    told = rf"seed={seed!r} must be a whole number from 0 to 2\*\*63 - 1"
    with pytest.raises(ValueError, match=told):
        sample(tmp_path / "prior", 2, tmp_path / "new", seed=seed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=told):
        complete(tmp_path / "prior", tmp_path / "a.png", tmp_path / "b.png", seed=seed)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_classes_that_lead_out_of_the_folder_are_refused(run: Path, tmp_path: Path) -> None:
    names = ["../../outside", "inside"]
    prior = Prior.of(topovq.load(run), dim=16, layers=1, heads=2, run=str(run), classes=2, class_names=names)
    prior.save_pretrained(tmp_path / "prior")
    with pytest.raises(ValueError, match="would lie outside of the output folder"):
        sample(tmp_path / "prior", 2, tmp_path / "a" / "b", device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["prior"]


def test_the_nearest_image_of_a_copy_is_the_image() -> None:
    images = torch.randint(256, (20, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    samples = torch.stack([images[17], images[3] // 2, torch.zeros_like(images[0])])
    found = find_nearest(samples, images.split(6), 3)
    assert found.images.shape == (3, 3, 3, 8, 8)
    assert torch.equal(found.images[0, 0], images[17])
    assert found.distances[0, 0] == 0
    apart = (samples[:, None].double() - images.double()).square().mean((2, 3, 4)).sqrt()
    torch.testing.assert_close(found.distances, apart.sort(1).values[:, :3].float())
    assert torch.equal(found.images[2], images[apart[2].argsort()[:3]])
    assert torch.equal(found.beside(samples)[4:8], torch.cat([samples[1:2], found.images[1]]))
    assert find_nearest(samples, [images[:2]], 3).images.shape[1] == 2
    with pytest.raises(ValueError, match=r"images of \(3, 4, 4\) are not of the samples' size, \(3, 8, 8\)"):
        find_nearest(samples, [images[:, :, :4, :4]])
    with pytest.raises(ValueError, match="no image to compare"):
        find_nearest(samples, [])


def test_samples_beside_their_nearest_training_images(run: Path, labeled: Path, tmp_path: Path, capsys) -> None:
    """A sample that lies among the training images is found there, 0 away."""
    first, data = tmp_path / "first", tmp_path / "data"
    sample(labeled, 20, first, device="cpu")
    pictures = Path(read_record(run / "record.jsonl")[0]["data"])
    shutil.copytree(pictures / "train", data / "train")
    shutil.copytree(pictures / "val", data / "val")
    shutil.copy(first / "images" / "green" / "00001.png", data / "train" / "green" / "copy.png")
    code, said = end_of(capsys, "sample", labeled, "-n", 20, "-o", tmp_path / "new", "--nearest", data)
    assert code == 0, said
    assert "the least distance of these 16 is 0.0 of 255" in " ".join(said.split())
    picture = pixels(tmp_path / "new" / "nearest.png")
    assert picture.shape == (16 * 66 + 2, 4 * 66 + 2, 3)
    row = picture[66 + 2 : 66 + 66]
    assert (row[::4, 2:66:4] == pixels(first / "images" / "green" / "00001.png")).all()
    assert (row[:, 68:132] == row[:, 2:66]).all()
    assert "nearest.png" in json.loads((tmp_path / "new" / "samples.json").read_text())["files"]
    # Crops that are drawn without end: those that the prior would have learned from.
    found = sample(labeled, 2, tmp_path / "crops", device="cpu", nearest="photos").nearest
    assert found is not None
    assert found.images.shape == (2, 3, 3, 16, 16)


def test_a_sample_with_the_tokens_of_a_training_image_is_counted(run: Path, labeled: Path, tmp_path: Path) -> None:
    """What was learned by heart comes back as the tokenizer decodes it, which is not 0 away."""
    pair = open_prior(labeled, device="cpu")
    image = torch.randint(256, (1, 3, 16, 16), dtype=torch.uint8)
    tokens = pair.prior.to_sequence(pair.model.encode(image))
    found = find_nearest(pair.decode(tokens), [image])
    assert found.distances.item() > 0
    assert _copies(pair, tokens, found) == 1
    assert _copies(pair, (tokens + 1) % 12, found) == 0


def test_a_prior_that_is_not_finished_says_so(labeled: Path, tmp_path: Path, capsys) -> None:
    prior = tmp_path / "prior"
    shutil.copytree(labeled, prior)
    lines = (prior / "record.jsonl").read_text().splitlines(keepends=True)
    (prior / "record.jsonl").write_text("".join(lines[:2]))
    shutil.rmtree(sorted((prior / "checkpoints").iterdir())[-1])
    told = "is not finished: 75 of 150 steps are done"
    code, said = end_of(capsys, "sample", prior, "-n", 1, "-o", tmp_path / "new")
    assert (code, told in " ".join(said.split())) == (0, True), said
    image = next((tmp_path / "new").rglob("00000.png"))
    code, said = end_of(capsys, "complete", prior, image, "-o", tmp_path / "all.png")
    assert (code, told in " ".join(said.split())) == (0, True), said
    assert unfinished(labeled) is None
    for name in ("config.json", "manifest.json", "model.safetensors"):
        (prior / name).unlink()
    (prior / "record.jsonl").write_text(lines[0])
    told = f"topovq: the prior in {prior} has no validation yet: 75 of 150 steps are done; the same"
    code, said = end_of(capsys, "sample", prior, "-n", 1, "-o", tmp_path / "other")
    assert (code, said.startswith(told), said.count("\n")) == (2, True, 1), said
    (prior / "record.jsonl").write_text("damaged")
    assert unfinished(prior) is None


def test_another_tokenizer_and_missing_classes_are_refused(run: Path, labeled: Path, tmp_path: Path, capsys) -> None:
    torch.manual_seed(1)
    other = topovq.load(run)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    other.save_pretrained(tmp_path / "other")
    code, said = end_of(capsys, "sample", labeled, "--run", tmp_path / "other", "-o", tmp_path / "new")
    assert code == 2
    assert "belongs to another tokenizer" in said
    assert not (tmp_path / "new").exists()
    prior = Prior.of(topovq.load(run), dim=16, layers=1, heads=2, run=str(run))
    prior.save_pretrained(tmp_path / "plain")
    code, said = end_of(capsys, "sample", tmp_path / "plain", "--label", "red", "-o", tmp_path / "new")
    assert code == 2
    assert "this prior knows no classes: it was trained without --labels" in " ".join(said.split())
    code, said = end_of(capsys, "sample", tmp_path / "plain", "--guidance", 2, "-o", tmp_path / "new")
    assert code == 2
    assert "guidance=2.0 needs a class, which it follows more closely: this prior knows none" in " ".join(said.split())
    image = next(Path(read_record(run / "record.jsonl")[0]["data"]).rglob("0.png"))
    code, said = end_of(capsys, "complete", labeled, image, "--guidance", 2, "-o", tmp_path / "new.png")
    assert code == 2
    assert "guidance=2.0 needs a class, which it follows more closely: say which by --label" in " ".join(said.split())
    assert not (tmp_path / "new.png").exists()


def test_ctrl_c_is_answered(labeled: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    def press(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("topovq.prior.generate.draw", press)
    assert end_of(capsys, "sample", labeled, "-o", tmp_path / "new") == (130, "topovq: stopped by Ctrl-C\n")
    assert not list(tmp_path.iterdir())


def test_what_info_tells_of_a_prior(run: Path, labeled: Path, tmp_path: Path, capsys) -> None:
    main(["info", str(labeled)])
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.replace("of run", "of_run").splitlines())
    lines = [line for line in read_record(labeled / "record.jsonl") if line["event"] == "validation"]
    assert said["state"] == "step 150 of 150, finished"
    assert said["of_run"].startswith(f"{run}, tokenizer ")
    assert said["classes"] == "4: blue, green, red, white"
    assert said["validation"] == f"best {min(line['bits_per_token'] for line in lines):.3f} bits a token"
    main(["info", str(labeled), "--json"])
    assert json.loads(capsys.readouterr().out)["validation"]["step"] == 150
    stopped = tmp_path / "stopped"
    (stopped / "checkpoints").mkdir(parents=True)
    text = (labeled / "record.jsonl").read_text().splitlines(keepends=True)
    (stopped / "record.jsonl").write_text(text[0])
    main(["info", str(stopped)])
    out = capsys.readouterr().out
    assert "step 0 of 150, not finished" in out
    assert "none yet" in out
    Prior.from_pretrained(labeled).save_pretrained(tmp_path / "saved")
    main(["info", str(tmp_path / "saved")])
    assert "4: blue" in capsys.readouterr().out
