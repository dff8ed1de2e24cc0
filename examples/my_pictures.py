"""Tokens of your own pictures: a folder becomes a model, a file of tokens, and pictures again.

python examples/my_pictures.py [FOLDER]    without a folder of yours, some crops of photographs are taken

The same on the command line, with the settings for real training:
    topovq train FOLDER --out runs/mine
    topovq encode runs/mine FOLDER -o tokens.parquet
    topovq decode runs/mine tokens.parquet -o decoded/
"""

import sys
import tempfile
from pathlib import Path

import pyarrow.parquet
from PIL import Image

from topovq.tokenizer.data import open_source
from topovq.tokenizer.tokens import decode, encode
from topovq.tokenizer.training import TrainConfig, evaluate, train


def some_pictures(folder: Path, number: int = 80) -> Path:
    """Crops of the photographs that come with scikit-image and scikit-learn."""
    folder.mkdir()
    with open_source("photos") as photos:
        for i, crop in enumerate(next(photos.train(number, seed=0))):
            Image.fromarray(crop.permute(1, 2, 0).numpy()).save(folder / f"{i:02}.png")
    return folder


work = Path(tempfile.mkdtemp(prefix="my_pictures_"))
pictures = Path(sys.argv[1]) if len(sys.argv) > 1 else some_pictures(work / "pictures")
config = TrainConfig(
    data=str(pictures),
    out=work / "run",
    image_size=32,
    codebook_size=64,
    model_options={"hidden": 32},
    steps=300,  # seconds; for real training leave it out
    batch_size=16,
    validate_every=100,
    device="cpu",
)
run = train(config).folder
figures = evaluate(run)
print(f"{figures['usage']:.0%} of the codes in use, PSNR {figures['psnr']:.1f} dB")

done = encode(run, pictures, work / "tokens.parquet")
table = pyarrow.parquet.read_table(done.path)
print(f"{done.images} pictures, columns {', '.join(table.column_names)}, {len(table['tokens'][0])} tokens each")
print(f"{decode(run, done.path, work / 'decoded')} pictures decoded to {work / 'decoded'}")
