"""A training step under torch.compile's own backend beside the same step in eager mode."""

import torch


def tensors(parts) -> list[torch.Tensor]:
    return [each for part in parts for each in (tensors(part) if isinstance(part, tuple) else [part])]


def step(call, module, x):
    """What a training step returns, the gradients, and the state it leaves, by name."""
    torch.manual_seed(2)
    x, made = x.clone().requires_grad_(), {}
    for number, part in enumerate(tensors(call(x))):
        if torch.is_tensor(part):
            made[f"output {number}"] = part
    sum((part * part.detach().cos()).sum() for part in made.values() if part.requires_grad).backward()
    parameters = {f"gradient of {name}": value.grad for name, value in module.named_parameters()}
    return {**made, "gradient of x": x.grad, **parameters, **module.state_dict()}


def check_compiled(make, x):
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager, other = make(), make()
    other.load_state_dict(eager.state_dict())
    with torch._inductor.config.patch(fallback_random=True):
        compiled = step(torch.compile(other, fullgraph=True), other, x)
    for name, expected in step(eager, eager, x).items():
        torch.testing.assert_close(
            compiled[name], expected, atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )
