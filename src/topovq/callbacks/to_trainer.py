"""transformers' Trainer: a callback that logs figures and pictures of the model's quantizers."""

from __future__ import annotations

from typing import Any

from topovq.callbacks.readings import EVERY, MAPS_EVERY, check_every, figures, is_due, pictures

try:
    from transformers import TrainerCallback
except ImportError:
    raise ImportError(
        "TrainerHealth is a callback of transformers, which is not installed: pip install transformers"
    ) from None


class TrainerHealth(TrainerCallback):
    """`trainer.add_callback(TrainerHealth(trainer))`: `health()` and the maps of every quantizer, in the trainer's log.

    The trainer is given because its `log` reaches everything that `report_to` names, and `state.log_history`.

    every       steps from one reading of the figures to the next
    maps_every  the same for the pictures, which TensorBoard and W&B get; 0: none
    """

    def __init__(self, trainer: Any, every: int = EVERY, maps_every: int = MAPS_EVERY) -> None:
        check_every(every, maps_every)
        self.trainer, self.every, self.maps_every = trainer, every, maps_every

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        if is_due(state.global_step, self.every):
            self.trainer.log(figures(model))
        if is_due(state.global_step, self.maps_every) and state.is_world_process_zero:
            self._show(model, state.global_step, args.report_to)

    def _show(self, model: Any, step: int, report_to: list[str]) -> None:
        """The pictures, to what the trainer's own callbacks write to."""
        held = self.trainer.callback_handler.callbacks
        for writer in [each.tb_writer for each in held if getattr(each, "tb_writer", None) is not None]:
            for name, pixels in pictures(model).items():
                writer.add_image(name, pixels, step, dataformats="HWC")
        if "wandb" in report_to:
            import wandb

            shown = {name: wandb.Image(pixels) for name, pixels in pictures(model).items()}
            wandb.log({**shown, "train/global_step": step})
