"""From images to token files and back."""

from __future__ import annotations

import hashlib
import os
import tarfile
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image

from topovq.tokenizer import tokens
from topovq.tokenizer.models import VQVAE, VQVAE2, Tokenizer
from topovq.tokenizer.tokenfile import model_of, open_writer, read_tokens, shard_path, token_files
from topovq.tokenizer.tokens import decode, encode, image_name

SMALL = {"image_size": 16, "hidden": 16, "residual_hidden": 8, "codebook_size": 16, "code_dim": 8}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven images of 16x16 in a tree, a file that is no image, and one that is broken."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "sub").mkdir()
    generator = np.random.default_rng(0)
    for i in range(7):
        pixels = generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / ("sub" if i % 2 else ".") / f"picture {i}.png")
    (folder / "notes.txt").write_text("no image")
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and nothing else")
    return folder


@pytest.fixture(scope="module", params=[VQVAE, VQVAE2], ids=["vqvae", "vqvae2"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    torch.manual_seed(0)
    model = request.param(**SMALL).eval()
    folder = tmp_path_factory.mktemp("run")
    model.save_pretrained(folder)
    return folder, model


def pixels_of(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
@pytest.mark.parametrize("workers", [0, 2])
def test_images_come_back_from_their_tokens(
    run: tuple[Path, Tokenizer], pictures: Path, tmp_path: Path, suffix: str, workers: int
) -> None:
    folder, model = run
    out = tmp_path / f"tokens{suffix}"
    done = encode(folder, pictures, out, batch_size=3, device="cpu", workers=workers)
    assert (done.images, list(done.skipped)) == (7, ["broken.png"])
    names = [name for batch, _ in read_tokens(out, 2) for name in batch]
    assert names == sorted(["picture 0.png", "picture 2.png", "picture 4.png", "picture 6.png"]) + sorted(
        ["sub/picture 1.png", "sub/picture 3.png", "sub/picture 5.png"]
    )
    assert decode(folder, out, tmp_path / "decoded", batch_size=4, device="cpu") == 7
    for name in names:
        original = pixels_of(pictures / name)[None]
        assert torch.equal(pixels_of(tmp_path / "decoded" / name), model.decode(model.encode(original))[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decoded", out.name]


def test_other_programs_can_read_the_files(run: tuple[Path, Tokenizer], pictures: Path, tmp_path: Path) -> None:
    folder, model = run
    columns = ["tokens"] if len(model.quantizers) == 1 else ["tokens_0", "tokens_1"]
    for suffix in (".parquet", ".npz"):
        encode(folder, pictures, tmp_path / f"t{suffix}", device="cpu", workers=0)
    table = parquet.read_table(tmp_path / "t.parquet")
    arrays = np.load(tmp_path / "t.npz")
    assert table.column_names == ["image", *columns] == list(arrays)
    assert table["image"].to_pylist() == arrays["image"].tolist()
    for column, shape in zip(columns, model.token_shapes):
        assert arrays[column].shape == (7, *shape)
        assert arrays[column].dtype == np.uint16
        assert table[column].to_pylist() == arrays[column].reshape(7, -1).tolist()


def test_images_in_tar_shards_and_single_images(
    run: tuple[Path, Tokenizer], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPOVQ_CACHE", str(tmp_path / "cache"))
    folder, _ = run
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i in (0, 2, 4):
            tar.add(pictures / f"picture {i}.png", arcname=f"{i}.png")
    assert encode(folder, tmp_path / "a.tar", tmp_path / "tar.npz", device="cpu", workers=0).images == 3
    assert encode(folder, pictures / "picture 0.png", tmp_path / "one.npz", device="cpu", workers=0).images == 1
    from_tar, alone = np.load(tmp_path / "tar.npz"), np.load(tmp_path / "one.npz")
    column = from_tar.files[-1]
    assert np.array_equal(from_tar[column][0], alone[column][0])


def test_each_process_writes_a_shard_and_decode_finds_them_all(
    run: tuple[Path, Tokenizer], pictures: Path, tmp_path: Path
) -> None:
    folder, model = run
    images = torch.stack([pixels_of(path) for path in sorted(pictures.glob("picture*"))])
    tokens = model.encode(images)
    levels = tokens if isinstance(tokens, tuple) else (tokens,)
    for rank in (0, 1):
        with open_writer(shard_path(tmp_path / "t.parquet", rank, 2), model.token_shapes, 16) as writer:
            writer.write([f"{rank}a", f"{rank}b"], [level[2 * rank : 2 * rank + 2] for level in levels])
    assert [path.name for path in token_files(tmp_path / "t.parquet")] == [
        "t-00000-of-00002.parquet",
        "t-00001-of-00002.parquet",
    ]
    assert decode(folder, tmp_path / "t.parquet", tmp_path / "out", device="cpu") == 4
    assert torch.equal(pixels_of(tmp_path / "out" / "1b.png"), model.decode(tokens)[3])


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_a_write_that_fails_leaves_nothing(suffix: str, tmp_path: Path) -> None:
    def fail() -> None:
        with open_writer(tmp_path / f"t{suffix}", [(2, 2)], 16) as writer:
            writer.write(["a"], [torch.zeros(1, 2, 2, dtype=torch.int64)])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_large_codebooks_keep_their_numbers(tmp_path: Path) -> None:
    tokens = torch.tensor([[[0, 99_999]]])
    for suffix in (".parquet", ".npz"):
        with open_writer(tmp_path / f"t{suffix}", [(1, 2)], 100_000) as writer:
            writer.write(["größe/ä.png"], [tokens])
        ((names, (read,)),) = read_tokens(tmp_path / f"t{suffix}", 8)
        assert names == ["größe/ä.png"]
        assert torch.equal(read, tokens)


def test_images_are_written_at_once_and_a_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the disk, so that one after the other takes several times as long."""
    images = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1)
    tokens.write_pngs(tmp_path, [f"{n}.png" for n in range(6)], images)
    assert [np.asarray(Image.open(tmp_path / f"{n}.png")).item() for n in range(6)] == list(range(6))
    others = threading.Barrier(6, timeout=10)
    monkeypatch.setattr(tokens, "write_png", lambda path, image: others.wait())
    tokens.write_pngs(tmp_path, [f"{n}.png" for n in range(6)], images)  # each waits for all the others
    monkeypatch.undo()
    with pytest.raises(OSError, match="File exists"):
        tokens.write_pngs(tmp_path / "0.png", ["1.png"], images[:1])
    with pytest.raises(ValueError, match="there are 6 images for 1 names"):
        tokens.write_pngs(tmp_path, ["1.png"], images)


def test_names_stay_inside_the_output_folder() -> None:
    assert str(image_name("a/b.png")) == "a/b.png"
    assert str(image_name("a/b.jpg")) == "a/b.jpg.png"
    for name in ("../b.png", "/b.png", "a/../../b.png", "", "a\0.png"):
        with pytest.raises(ValueError, match="outside of the output folder"):
            image_name(name)


def test_what_cannot_be_read_is_said(run: tuple[Path, Tokenizer], pictures: Path, tmp_path: Path) -> None:
    folder, model = run
    with pytest.raises(ValueError, match=r"tokens\.csv' must end in \.parquet or \.npz"):
        encode(folder, pictures, tmp_path / "tokens.csv")
    with pytest.raises(ValueError, match="missing"):
        encode(folder, tmp_path / "missing", tmp_path / "t.npz")
    with pytest.raises(ValueError, match=r"no image of .* can be read \(1 tried\); the first is broken\.png"):
        encode(folder, pictures / "broken.png", tmp_path / "t.npz", device="cpu", workers=0)
    (tmp_path / "theirs").mkdir()
    for there in ("new", "theirs"):
        with pytest.raises(ValueError, match="no image of"):
            encode(folder, pictures / "broken.png", tmp_path / there / "deep" / "t.npz", device="cpu", workers=0)
    assert [path.name for path in tmp_path.rglob("*")] == ["theirs"]
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        encode(folder, pictures, tmp_path / "t.npz", batch_size=0)
    with pytest.raises(ValueError, match="workers=-1 must be at least 0"):
        encode(folder, pictures, tmp_path / "t.npz", workers=-1)
    with pytest.raises(ValueError, match="batch_size=-2 must be at least 1"):
        decode(folder, tmp_path / "t.npz", tmp_path / "out", batch_size=-2)
    with pytest.raises(FileNotFoundError, match="there is no token file"):
        decode(folder, tmp_path / "t.npz", tmp_path / "out", device="cpu")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match=r"not a token file: it holds x\.npy"):
        decode(folder, tmp_path / "other.npz", tmp_path / "out", device="cpu")
    with open_writer(tmp_path / "big.npz", model.token_shapes, 16) as writer:
        writer.write(["a"], [torch.full((1, *shape), 16) for shape in model.token_shapes])
    with pytest.raises(ValueError, match="tokens from 16 to 16; the model's codes are 0 to 15"):
        decode(folder, tmp_path / "big.npz", tmp_path / "out", device="cpu")


def test_tokens_of_another_model_are_refused(run: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    folder, model = run
    with open_writer(tmp_path / "other.npz", [(8, 8, 4)], 16) as writer:
        writer.write(["a"], [torch.zeros(1, 8, 8, 4)])
    ours = " and ".join("x".join(map(str, shape)) for shape in model.token_shapes)
    with pytest.raises(ValueError, match=f"holds tokens of 8x8x4 an image, but those of the model are {ours}"):
        decode(folder, tmp_path / "other.npz", tmp_path / "out", device="cpu")


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_tokens_know_their_model(run: tuple[Path, Tokenizer], pictures: Path, tmp_path: Path, suffix: str) -> None:
    folder, model = run
    tokens, out = tmp_path / f"t{suffix}", tmp_path / "out"
    encode(folder, pictures, tokens, device="cpu", workers=0)
    assert model_of(tokens) == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    torch.manual_seed(1)
    type(model)(**SMALL).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"was written by another model \(\w{12}\) than the one in .*other .*--force"):
        decode(tmp_path / "other", tokens, out, device="cpu")
    assert not out.exists()
    assert decode(tmp_path / "other", tokens, out, device="cpu", force=True) == 7
    model.save_pretrained(tmp_path / "copy")  # the same weights: the same model
    assert decode(tmp_path / "copy", tokens, tmp_path / "again", device="cpu") == 7
    with open_writer(tmp_path / f"old{suffix}", model.token_shapes, 16) as writer:  # as before there were ids
        writer.write(["a"], [torch.zeros(1, *shape, dtype=torch.int64) for shape in model.token_shapes])
    assert model_of(tmp_path / f"old{suffix}") is None
    assert decode(folder, tmp_path / f"old{suffix}", tmp_path / "old", device="cpu") == 1


def test_nothing_is_overwritten_and_everything_is_checked_first(
    run: tuple[Path, Tokenizer], pictures: Path, tmp_path: Path
) -> None:
    folder, model = run
    tokens, out = tmp_path / "t.npz", tmp_path / "out"
    encode(folder, pictures, tokens, device="cpu", workers=0)
    before = tokens.stat().st_mtime_ns
    with pytest.raises(FileExistsError, match=r"t\.npz is there already; --force \(force=True\) overwrites it"):
        encode(folder, pictures, tokens, device="cpu", workers=0)
    assert tokens.stat().st_mtime_ns == before
    encode(folder, pictures, tokens, device="cpu", workers=0, force=True)
    (out / "sub").mkdir(parents=True)
    (out / "sub" / "picture 5.png").write_text("mine")
    with pytest.raises(FileExistsError, match=r"picture 5\.png is there already"):
        decode(folder, tokens, out, device="cpu")
    assert [path.name for path in out.rglob("*.png")] == ["picture 5.png"]
    assert decode(folder, tokens, out, device="cpu", force=True) == 7
    with open_writer(tmp_path / "bad.npz", model.token_shapes, 16) as writer:
        for code in (0, 16):
            writer.write([f"{code}"], [torch.full((1, *shape), code) for shape in model.token_shapes])
    with pytest.raises(ValueError, match="the model's codes are 0 to 15"):
        decode(folder, tmp_path / "bad.npz", tmp_path / "none", batch_size=1, device="cpu")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_a_damaged_token_file_is_named(
    run: tuple[Path, Tokenizer], pictures: Path, tmp_path: Path, suffix: str
) -> None:
    whole, cut = tmp_path / f"whole{suffix}", tmp_path / f"cut{suffix}"
    encode(run[0], pictures, whole, device="cpu", workers=0)
    cut.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(ValueError, match=rf"cut\{suffix} is damaged or no (Parquet|npz) file"):
        decode(run[0], cut, tmp_path / "out", device="cpu")


def test_many_images_need_no_more_memory_than_a_few_batches(tmp_path: Path, run_with_gauge) -> None:
    VQVAE(**{**SMALL, "image_size": 128}).save_pretrained(tmp_path / "run")
    (tmp_path / "many").mkdir()
    Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(tmp_path / "one.png")
    for i in range(1500):
        os.link(tmp_path / "one.png", tmp_path / "many" / f"{i}.png")
    # As pixels the images are 74 MB, as a batch 0.8 MB.
    run_with_gauge(f"""
        from topovq.tokenizer.tokens import encode
        folder = {str(tmp_path)!r}
        options = dict(batch_size=16, device="cpu", workers=0)
        encode(folder + "/run", folder + "/one.png", folder + "/warm.npz", **options)
        start_gauge()
        assert encode(folder + "/run", folder + "/many", folder + "/many.npz", **options).images == 1500
        assert growth() < 25, growth()
    """)


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_a_name_that_is_not_utf8_is_kept_readable(run: tuple[Path, Tokenizer], tmp_path: Path, suffix: str) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    try:
        Image.new("RGB", (16, 16)).save(tmp_path / name)
    except OSError:
        pytest.skip("this file system takes names in UTF-8 alone")
    encode(run[0], tmp_path, tmp_path / f"tokens{suffix}", device="cpu", workers=0)
    ((names, _),) = read_tokens(tmp_path / f"tokens{suffix}", 8)
    assert names == ["caf\\xe9.png"]
