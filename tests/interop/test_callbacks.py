"""Health and maps in other libraries' logs: what is read, and that it arrives where each library logs."""

import sys

import numpy as np
import pytest
import torch
from autoencoder import Autoencoder, data
from small_runs import make_run
from torch import nn

from topovq import KohonenVQ, ResidualVQ, callbacks
from topovq.callbacks import figures, pictures

FIGURES = {f"vq/{name}" for name in KohonenVQ(2, 4).health()._fields} - {"vq/advice"}
PICTURES = {"vq/codes", "vq/u_matrix", "vq/hits"}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def wandb(monkeypatch):
    """The package, which keeps to this machine."""
    module = pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield module
    module.finish()


def events(folder):
    """(scalars, images) that TensorBoard has: {name: steps}."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    scalars, images = {}, {}
    for path in folder.rglob("events.out*"):
        found = accumulator.EventAccumulator(str(path))
        found.Reload()
        scalars |= {name: [event.step for event in found.Scalars(name)] for name in found.Tags()["scalars"]}
        images |= {name: [event.step for event in found.Images(name)] for name in found.Tags()["images"]}
    return scalars, images


def test_figures_are_those_of_health():
    model = Autoencoder()
    for batch in data():
        model(batch)
    assert set(figures(model)) == FIGURES - {"vq/drift"}  # nothing to compare with, the first time
    model(data(1)[0])
    read = figures(model)
    health = model.vq.health()
    assert read["vq/usage"] == health.usage
    assert read["vq/drift"] > 0 == health.drift  # since the last reading
    assert all(type(value) is float for value in read.values())


def test_every_quantizer_is_found_once_under_its_own_name():
    inner = nn.ModuleDict({"first": KohonenVQ(4, 6), "second": ResidualVQ(4, 9, 2)})
    wrapped = nn.Module()
    wrapped.module = inner
    for model in (inner, wrapped):
        assert {name.partition("/")[0] for name in figures(model)} == {"first", "second"}
    assert set(pictures(inner)) == {
        *(f"first/{kind}" for kind in ("codes", "u_matrix", "hits")),
        *(f"second/{kind}_{number}" for kind in ("codes", "u_matrix", "hits") for number in (0, 1)),
    }
    assert {name.partition("/")[0] for name in figures(KohonenVQ(4, 6))} == {"quantizer"}
    with pytest.raises(ValueError, match="Linear holds no quantizer"):
        figures(nn.Linear(2, 2))


def test_pictures_are_pixels_of_the_map():
    for name, pixels in pictures(KohonenVQ(4, 12)).items():
        assert pixels.dtype == np.uint8, name
        assert pixels.shape == (64 * 3, 64 * 4, 3), name


def fit_lightning(steps, loggers, **options):
    """Six optimizer steps of two batches each."""
    import pytorch_lightning as pl

    from topovq.callbacks import LightningHealth

    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.vq = Autoencoder().vq
            self.encoder = nn.Linear(6, 8)

        def training_step(self, batch):
            return self.vq(self.encoder(batch)).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=2,
        callbacks=[LightningHealth(**options)],
        logger=loggers,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Lit(), torch.utils.data.DataLoader(data(2 * steps), batch_size=None))


def test_lightning_logs_them(tmp_path):
    loggers = pytest.importorskip("pytorch_lightning.loggers", reason="pip install pytorch-lightning")
    fit_lightning(6, [loggers.TensorBoardLogger(tmp_path), loggers.CSVLogger(tmp_path)], every=2, maps_every=3)
    scalars, images = events(tmp_path)
    assert scalars["vq/usage"] == [2, 4, 6]
    assert scalars["vq/drift"] == [4, 6]
    assert images == {name: [3, 6] for name in PICTURES}
    assert "vq/usage" in next(tmp_path.rglob("metrics.csv")).read_text()
    for wrong in ({"every": 0}, {"maps_every": -1}, {"every": 1.5}):
        with pytest.raises(ValueError, match="number of steps"):
            fit_lightning(1, False, **wrong)


def train_transformers(folder, report_to):
    """Four steps; returns the trainer."""
    import transformers

    from topovq.callbacks import TrainerHealth

    class Model(Autoencoder):
        def forward(self, x):
            return {"loss": super().forward(x)}

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=32,
        use_cpu=True,
        report_to=[report_to],
        disable_tqdm=True,
        save_strategy="no",
    )
    rows = [{"x": row} for row in data(4).flatten(0, 1)]
    trainer = transformers.Trainer(model=Model(), args=arguments, train_dataset=rows)
    trainer.add_callback(TrainerHealth(trainer, every=2, maps_every=4))
    trainer.train()
    return trainer


def test_transformers_logs_them(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="pip install transformers accelerate")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    trainer = train_transformers(tmp_path, "tensorboard")
    assert [line["step"] for line in trainer.state.log_history if "vq/usage" in line] == [2, 4]
    scalars, images = events(tmp_path)
    assert scalars["train/vq/usage"] == [2, 4]
    assert images == {name: [4] for name in PICTURES}


def test_accelerate_logs_them(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
    from topovq.callbacks import log_to_accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("runs")
    model = accelerator.prepare(Autoencoder())
    for step, batch in enumerate(data(), 1):
        model(batch)
        log_to_accelerate(accelerator, model, step, maps=step == 4)
    accelerator.end_training()
    scalars, images = events(tmp_path)
    assert scalars["vq/usage"] == [1, 2, 3, 4]
    assert set(scalars) == FIGURES
    assert images == {name: [4] for name in PICTURES}


def test_wandb_logs_them(tmp_path, wandb):
    from topovq.callbacks import log_to_wandb

    model = Autoencoder()
    with wandb.init(dir=str(tmp_path), project="topovq") as run:
        for step, batch in enumerate(data(3)):
            model(batch)
            log_to_wandb(run, model, step)
        logged = dict(run.summary)  # without the last step, which may still get more
    assert logged.keys() >= FIGURES | PICTURES
    assert 0 < logged["vq/usage"] <= 1
    assert len(list(tmp_path.rglob("vq/codes_*.png"))) == 3


def test_wandb_gets_them_through_the_others(tmp_path, wandb):
    loggers = pytest.importorskip("pytorch_lightning.loggers", reason="pip install pytorch-lightning")
    pytest.importorskip("transformers", reason="pip install transformers accelerate")
    fit_lightning(2, loggers.WandbLogger(save_dir=tmp_path, offline=True), every=1, maps_every=1)
    assert set(wandb.run.summary.keys()) >= PICTURES | {"vq/usage"}
    wandb.finish()
    with wandb.init(dir=str(tmp_path)) as run:
        train_transformers(tmp_path, "wandb")
        assert set(run.summary.keys()) >= PICTURES | {"train/vq/usage"}


@pytest.mark.usefixtures("wandb")
def test_a_run_shows_its_pictures_in_wandb(tmp_path):
    run = make_run(tmp_path / "run", wandb="topovq")
    assert len(list(run.rglob("validation/map_*.png"))) == 2  # one at each validation
    assert len(list(run.rglob("validation/reconstructions_*.png"))) == 2


@pytest.mark.parametrize(
    ("name", "blocked", "told"),
    [
        ("LightningHealth", ["pytorch_lightning", "lightning.pytorch"], "pip install lightning"),
        ("TrainerHealth", ["transformers"], "pip install transformers"),
    ],
)
def test_a_library_that_is_not_there_is_named(name, blocked, told, monkeypatch):
    for package in blocked:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"topovq.callbacks.{callbacks.HOMES[name]}", raising=False)
    with pytest.raises(ImportError, match=told):
        getattr(callbacks, name)


def test_wandb_that_is_not_there_is_named(monkeypatch):
    from topovq.callbacks import log_to_wandb

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"wandb is not installed; .*topovq\[log\]"):
        log_to_wandb(None, Autoencoder())
