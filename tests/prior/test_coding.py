"""Token files coded by a prior: without loss, as small as its probabilities say, and by this prior alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import make_run

from topovq import Grid
from topovq.cli import main
from topovq.prior import Prior
from topovq.prior.coding import PriorCoder
from topovq.storage import model_id
from topovq.tokenizer.token_coded import decode_symbols, encode_symbols
from topovq.tokenizer.training.runs import load_run


@pytest.mark.parametrize("head", ["map", "flat", [4, 8]], ids=str)
def test_symbols_take_the_bits_of_the_prior(head: str | list[int]) -> None:
    torch.manual_seed(0)
    grids = [Grid((5, 6)).to_dict(), Grid((5, 6), size=26).to_dict(), Grid((5, 6)).to_dict()]
    prior = Prior([[2, 2], [4, 4, 2]], grids, head=head, dim=16, layers=2, heads=2)
    for parameter in prior.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens_BT = prior.sample(40, generator=torch.Generator().manual_seed(1))
    expected = -float(prior.log_probs(tokens_BT).detach().sum()) / math.log(2)
    coder = PriorCoder(prior, "a" * 64, torch.device("cpu"))
    symbols_nS = coder.symbols(prior.to_levels(tokens_BT))
    words = encode_symbols(coder, symbols_nS)
    assert np.array_equal(decode_symbols(coder, words, *symbols_nS.shape), symbols_nS)
    assert all(map(torch.equal, coder.levels(symbols_nS), prior.to_levels(tokens_BT)))
    assert 0.99 * expected < 32 * len(words) < 1.01 * expected + 64


def test_compressed_tokens_decode_to_the_same_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, pictures, out = make_run(tmp_path / "run"), tmp_path / "pictures", tmp_path / "tokens.tvq"
    pictures.mkdir()
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (70, 32, 32, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(pictures / f"{number}.png")
    for name in ("prior", "other"):
        made = Prior.of(load_run(run), dim=16, layers=1, heads=2, tokenizer=model_id(run), run=str(run))
        made.save_pretrained(tmp_path / name)
    made = Prior.of(load_run(run), dim=16, layers=1, heads=2, tokenizer="ab" * 32, run=str(run))
    made.save_pretrained(tmp_path / "foreign")
    foreign = str(tmp_path / "foreign")
    prior = str(tmp_path / "prior")
    main(["encode", str(run), str(pictures), "-o", str(out), "--compress", prior, "--workers", "0"])
    assert "bytes an image, names included" in capsys.readouterr().out
    main(["encode", str(run), str(pictures), "-o", str(tmp_path / "plain.npz"), "--workers", "0"])
    main(["decode", str(run), str(out), "-o", str(tmp_path / "a"), "--prior", prior])
    main(["decode", str(run), str(tmp_path / "plain.npz"), "-o", str(tmp_path / "b")])
    assert len(list((tmp_path / "a").iterdir())) == 70
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    for words, said in {
        ("decode", str(run), str(out), "-o", str(tmp_path / "c"), "--prior", str(tmp_path / "other")): "another prior",
        ("decode", str(run), str(out), "-o", str(tmp_path / "c"), "--prior", str(run)): "holds no prior",
        ("decode", str(run), str(out), "-o", str(tmp_path / "c")): "coded by a prior: name that one",
        ("encode", str(run), str(pictures), "-o", str(tmp_path / "d.npz"), "--compress", prior): "must end in .tvq",
        ("decode", str(run), str(tmp_path / "plain.npz"), "-o", str(tmp_path / "c"), "--prior", prior): (
            "is not coded by a prior, as a .tvq file is: leave out --prior"
        ),
        ("decode", str(run), str(out), "-o", str(tmp_path / "c"), "--prior", foreign): "give the run of that prior",
        ("encode", str(run), str(pictures), "-o", str(tmp_path / "d.tvq"), "--compress", foreign): f"a prior of {run}",
        ("encode", "gone", str(pictures), "-o", str(tmp_path / "d.tvq"), "--compress", prior): "no run at gone",
        ("prior", str(out), "--run", str(run)): "encode the images again without --compress, to a .parquet",
    }.items():
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(words)
        err = capsys.readouterr().err
        assert said in err
        assert "--run RUN" not in err
    assert not (tmp_path / "c").exists()
    assert not list(tmp_path.glob("d.*"))
