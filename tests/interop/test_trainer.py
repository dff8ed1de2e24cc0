"""transformers' Trainer: steps, evaluation in between, checkpoints and resuming."""

import pytest
import torch
from autoencoder import Autoencoder, data, statistics

transformers = pytest.importorskip("transformers", reason="pip install transformers accelerate")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it: pip install accelerate")

ROWS = 32


class Model(Autoencoder):
    def forward(self, x):
        return {"loss": super().forward(x)}


def train(folder, steps, resume=None, **options):
    torch.manual_seed(0)
    model = Model()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no", **options},
    )
    rows = [{"x": row} for row in data(8).flatten(0, 1)]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:ROWS])
    trainer.train(resume_from_checkpoint=resume)
    return model


@pytest.mark.parametrize("half", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_every_step_learns_and_evaluation_moves_nothing(tmp_path, half):
    torch.manual_seed(0)
    before = Model().vq.codebook
    model = train(tmp_path, 8, eval_strategy="steps", eval_steps=3, **half)
    assert model.vq.step == 8
    assert model.vq.skipped == 0
    assert (model.vq.codebook - before).abs().amax(1).min() > 0
    assert {value.dtype for value in statistics(model.vq).values()} == {torch.float32}


def test_the_codes_move_at_each_forward_of_an_accumulated_step(tmp_path):
    assert train(tmp_path, 2, gradient_accumulation_steps=3).vq.step == 6


def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path):
    whole = train(tmp_path, 6, save_strategy="steps", save_steps=3)
    resumed = train(tmp_path, 6, resume=str(tmp_path / "checkpoint-3"))
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    x = data(1, seed=1)[0]
    assert torch.equal(resumed.tokens(x), whole.tokens(x))
