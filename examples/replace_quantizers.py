"""A model that you have, with its quantizer replaced in one line, trained on, and handed back as it was.

python examples/replace_quantizers.py    needs vector-quantize-pytorch
"""

import torch
from torch import Tensor, nn
from vector_quantize_pytorch import VectorQuantize

from topovq import export_quantizers, replace_quantizers


class Model(nn.Module):
    """Somebody's tokenizer of time series, which knows nothing of topovq."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 16), nn.Linear(16, 8)
        self.vq = VectorQuantize(16, 256, kmeans_init=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        quantized, tokens, loss = self.vq(self.encoder(x))
        return self.decoder(quantized), tokens, loss


def train(model: Model, steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        x = torch.randn(16, 64, 8).cumsum(1) / 8
        y, _, loss = model(x)
        optimizer.zero_grad()
        (nn.functional.mse_loss(y, x) + loss.sum()).backward()
        optimizer.step()


torch.manual_seed(0)
model, x = Model(), torch.randn(4, 64, 8).cumsum(1) / 8
train(model, 50)
before = model.eval()(x)[1]

print("replaced:", replace_quantizers(model, neighborhood="gaussian"))  # a narrow one: the codes are trained already
print("the same tokens:", torch.equal(model(x)[1], before))
train(model.train(), 50)
print(f"codes in use: {model.vq.usage:.0%}")

tokens = model.eval()(x)[1]
print("handed back:", export_quantizers(model))
print("of the original class:", type(model.vq) is VectorQuantize)
print("the same tokens:", torch.equal(model(x)[1], tokens))
