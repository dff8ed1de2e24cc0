"""What every replaced quantizer is held to: the same learning of the encoder, and the way back without topovq."""

import torch
from torch import Tensor, nn
from warm import python

from topovq.convert import export_quantizers

WITHOUT_TOPOVQ = """
import sys
import torch
sys.modules["topovq"] = None  # any import of it fails
sys.path[:0] = {paths!r}
{prepare}
model, x, tokens = torch.load({file!r}, weights_only=False)
assert torch.equal({tokens_of}, tokens)
"""


def assert_exported(model: nn.Module, keys: list[str]) -> None:
    """Export `model` in place: its state dict has these names again, and nothing in it is topovq's."""
    export_quantizers(model)
    assert list(model.state_dict()) == keys
    for module in model.modules():
        for thing in (module, *vars(module).values()):
            assert not type(thing).__module__.startswith("topovq"), thing
    assert all(value.is_contiguous() for value in model.state_dict().values())  # as safetensors wants them


def assert_runs_without_topovq(
    model: nn.Module, x: Tensor, tokens: Tensor, tokens_of: str, paths: list[str], tmp_path, prepare: str = ""
) -> None:
    """In a process that cannot import topovq, `tokens_of` ("model(x)[1]", say) gives the tokens."""
    file = str(tmp_path / "model.pt")
    torch.save((model, x, tokens), file)
    script = WITHOUT_TOPOVQ.format(paths=paths, file=file, tokens_of=tokens_of, prepare=prepare)
    done = python("-c", script)
    assert done.returncode == 0, done.stderr[-3000:]
