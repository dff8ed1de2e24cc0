"""Saving and loading with safetensors and a config.json, through the field's own mixin; never pickle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from topovq.grid import Grid
from topovq.neighborhood import Schedule

try:
    from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
except ImportError:  # the core works without it; saving says what it needs

    class PyTorchModelHubMixin:  # type: ignore[no-redef]
        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__()

        def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
            raise ImportError("saving needs huggingface_hub: pip install huggingface_hub")

        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            raise ImportError("loading needs huggingface_hub: pip install huggingface_hub")


WEIGHTS = "model.safetensors"
TAGS = ["vector-quantization", "self-organizing-map"]
# How arguments that JSON does not know are written. Constructors take the dictionaries back as they are.
CODERS = {Grid: (Grid.to_dict, Grid.from_dict), Schedule: (Schedule.to_dict, Schedule.from_dict)}


class HubModule(PyTorchModelHubMixin):
    """A module with `save_pretrained(folder)` and `from_pretrained(folder)`: its arguments and its weights."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(library_name="topovq", tags=list(TAGS), coders=CODERS, **kwargs)

    def _save_pretrained(self, save_directory: Path) -> None:
        """The weights, whole or not at all."""
        assert isinstance(self, nn.Module)
        partial = save_directory / (WEIGHTS + ".partial")
        safetensors.torch.save_model(self, str(partial))
        with open(partial, "rb") as written:
            os.fsync(written.fileno())
        os.replace(partial, save_directory / WEIGHTS)

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, map_location: str = "cpu", strict: bool = True, **arguments: Any
    ) -> HubModule:
        hub = {
            name: arguments.pop(name, None)
            for name in ("revision", "cache_dir", "force_download", "local_files_only", "token")
        }
        if os.path.isdir(model_id):
            weights = os.path.join(model_id, WEIGHTS)
            if not os.path.isfile(weights):
                raise FileNotFoundError(f"there is no {WEIGHTS} in {model_id!r}: was it saved by save_pretrained?")
        else:
            weights = hf_hub_download(repo_id=model_id, filename=WEIGHTS, **hub)
        model = cls(**arguments)
        assert isinstance(model, nn.Module)
        safetensors.torch.load_model(model, weights, strict=strict, device=map_location)
        model.eval()
        return model
