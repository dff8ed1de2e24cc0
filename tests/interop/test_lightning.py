"""Lightning's Trainer: precisions, accumulation, validation, checkpoints and resuming."""

from contextlib import nullcontext

import pytest
import torch
from autoencoder import Autoencoder, data, statistics

pl = pytest.importorskip("pytorch_lightning", reason="pip install pytorch-lightning")

BATCHES = 8


class Lit(pl.LightningModule):
    def __init__(self, accumulates: int = 1, eps: float = 1e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = Autoencoder()
        self.accumulates, self.eps = accumulates, eps

    def training_step(self, batch, number):
        whole = (number + 1) % self.accumulates == 0
        with nullcontext() if whole else self.model.vq.accumulate():
            return self.model(batch)

    def validation_step(self, batch, number):
        self.model(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=self.eps)


def fit(lit, folder, epochs=1, resume=None, **options):
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    batches = torch.utils.data.DataLoader(data(BATCHES), batch_size=None)
    trainer.fit(lit, batches, batches, ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("precision", ["32-true", "16-true", "bf16-true", "bf16-mixed"])
def test_every_step_learns_in_every_precision(tmp_path, precision):
    torch.manual_seed(0)
    lit = Lit()
    before = lit.model.vq.codebook.clone()
    fit(lit, tmp_path, precision=precision)
    vq = lit.model.vq
    assert vq.step == BATCHES  # validation, before training too, counts none
    assert vq.skipped == 0
    assert (vq.codebook - before).abs().amax(1).min() > 0
    assert {value.dtype for value in statistics(vq).values()} == {torch.float32}


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_a_model_made_in_half_precision_keeps_float32_statistics(tmp_path, precision):
    with pl.Trainer(precision=precision, accelerator="cpu", logger=False, enable_checkpointing=False).init_module():
        lit = Lit()
    fit(lit, tmp_path, precision=precision)
    assert lit.model.encoder.weight.dtype == lit.dtype != torch.float32
    assert lit.model.vq.step == BATCHES
    assert {value.dtype for value in statistics(lit.model.vq).values()} == {torch.float32}


def test_weights_that_adam_breaks_in_float16_leave_the_codes_whole(tmp_path):
    """Adam's usual eps of 1e-8 is 0 in float16, and so are small squared gradients: it divides by 0 at its first step.

    With 16-true every vector is infinite or NaN from then on. The codebook counts them and stays as it is.
    """
    torch.manual_seed(0)
    lit = Lit(eps=1e-8)
    fit(lit, tmp_path, precision="16-true")
    assert not lit.model.encoder.weight.isfinite().all()
    assert lit.model.vq.step == 1
    assert lit.model.vq.skipped == 32 * (BATCHES - 1)
    assert lit.model.vq.codebook.isfinite().all()


def test_accumulation_updates_once_per_optimizer_step(tmp_path):
    lit = Lit(accumulates=4)
    trainer = fit(lit, tmp_path, accumulate_grad_batches=4)
    assert lit.model.vq.step == trainer.global_step == BATCHES // 4


def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path):
    torch.manual_seed(0)
    whole = Lit()
    first = Lit()
    first.load_state_dict(whole.state_dict())
    fit(whole, tmp_path, epochs=2)
    fit(first, tmp_path, epochs=1).save_checkpoint(tmp_path / "half.ckpt")
    saved = Lit.load_from_checkpoint(tmp_path / "half.ckpt")
    x = data(1, seed=1)[0]
    assert torch.equal(saved.model.tokens(x), first.model.tokens(x))
    second = Lit()
    fit(second, tmp_path, epochs=2, resume=tmp_path / "half.ckpt")
    assert second.model.vq.step == 2 * BATCHES
    for name, value in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name
