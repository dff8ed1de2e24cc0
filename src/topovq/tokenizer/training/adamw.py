"""Clipping and AdamW on CUDA in two launches, for parameters that work in bf16 and are kept in float32.

torch's optimizer holds the state (and saves and loads it); this only does its arithmetic:
    g <- g * min(1, clip / (|g| + 1e-6)), |g| the norm over all gradients
    m <- b1 m + (1 - b1) g;    v <- b2 v + (1 - b2) g^2
    p <- (1 - lr wd) p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
A table of addresses, one row a parameter, travels to the device with each step. The addresses of a CUDA graph stay what
they were when it was captured: `send` its table once, before the first replay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

BLOCK = 1024  # entries a program handles
COLUMNS = 8  # of the table: entries, parameter, working copy (0: none), gradient, m, v, step, gradient is bf16


@triton.jit
def _gradient(row_ptr, place, inside):
    half = tl.load(row_ptr + 7)
    if half != 0:
        g = tl.load(tl.load(row_ptr + 3).to(tl.pointer_type(tl.bfloat16)) + place, inside, 0.0).to(tl.float32)
    else:
        g = tl.load(tl.load(row_ptr + 3).to(tl.pointer_type(tl.float32)) + place, inside, 0.0)
    return g


@triton.jit
def _norm_kernel(table_ptr, blocks_ptr, squares_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """The squared norm of each block of gradients; the first block of a parameter counts its step."""
    program = tl.program_id(0)
    row_ptr = table_ptr + tl.load(blocks_ptr + 2 * program) * COLUMNS
    first = tl.load(blocks_ptr + 2 * program + 1)
    place = first + tl.arange(0, BLOCK)
    g = _gradient(row_ptr, place, place < tl.load(row_ptr))
    tl.store(squares_ptr + program, tl.sum(g * g, 0))
    if first == 0:
        step_ptr = tl.load(row_ptr + 6).to(tl.pointer_type(tl.float32))
        tl.store(step_ptr, tl.load(step_ptr) + 1)


@triton.jit
def _step_kernel(
    table_ptr, blocks_ptr, squares_ptr, sums_ptr, loss_ptr, reconstruction_ptr,
    blocks, clip, rate, beta1, rest1, log_beta1, beta2, rest2, log_beta2, eps, keep,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, blocks, BLOCK):
        squares += tl.load(squares_ptr + start + part, start + part < blocks, 0.0)
    ratio = clip / (tl.sqrt(tl.sum(squares, 0)) + 1e-6)
    factor = tl.where(ratio > 1.0, 1.0, ratio)  # a norm that is no number stays one, as in torch
    row_ptr = table_ptr + tl.load(blocks_ptr + 2 * program) * COLUMNS
    place = tl.load(blocks_ptr + 2 * program + 1) + part
    inside = place < tl.load(row_ptr)
    g = _gradient(row_ptr, place, inside) * factor
    p_ptr = tl.load(row_ptr + 1).to(tl.pointer_type(tl.float32)) + place
    m_ptr = tl.load(row_ptr + 4).to(tl.pointer_type(tl.float32)) + place
    v_ptr = tl.load(row_ptr + 5).to(tl.pointer_type(tl.float32)) + place
    t = tl.load(tl.load(row_ptr + 6).to(tl.pointer_type(tl.float32))).to(tl.float64)
    correction1 = (1 - tl.exp(t * log_beta1)).to(tl.float32)
    correction2 = (1 - tl.exp(t * log_beta2)).to(tl.float32)
    m = beta1 * tl.load(m_ptr, inside, 0.0) + rest1 * g
    v = beta2 * tl.load(v_ptr, inside, 0.0) + rest2 * g * g
    p = keep * tl.load(p_ptr, inside, 0.0) - rate / correction1 * m / (tl.sqrt(v / correction2) + eps)
    tl.store(m_ptr, m, inside)
    tl.store(v_ptr, v, inside)
    tl.store(p_ptr, p, inside)
    work = tl.load(row_ptr + 2)
    if work != 0:
        tl.store(work.to(tl.pointer_type(tl.bfloat16)) + place, p.to(tl.bfloat16), inside)
    if program == 0:
        tl.store(sums_ptr, tl.load(sums_ptr) + tl.load(loss_ptr).to(tl.float32))
        tl.store(sums_ptr + 1, tl.load(sums_ptr + 1) + tl.load(reconstruction_ptr).to(tl.float32))
        tl.store(sums_ptr + 2, tl.load(sums_ptr + 2) + 1.0)


class ClippedAdamW:
    """Does the steps of `optimizer`; parameters[i] gets the gradient of working[i], which may be a bf16 copy of it."""

    def __init__(self, optimizer: torch.optim.AdamW, working: Sequence[Tensor], clip: float) -> None:
        (self.group,) = optimizer.param_groups
        self.parameters: list[nn.Parameter] = self.group["params"]
        self.working, self.clip = list(working), clip
        device = self.parameters[0].device
        for parameter in self.parameters:
            state = optimizer.state[parameter]
            if not state:  # as torch's optimizer starts it
                state["step"] = torch.zeros((), device=device)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        self.states = [optimizer.state[parameter] for parameter in self.parameters]
        blocks = [
            (row, start)
            for row, parameter in enumerate(self.parameters)
            for start in range(0, max(1, parameter.numel()), BLOCK)
        ]
        self.blocks_B2 = torch.tensor(blocks, dtype=torch.int64, device=device)
        self.squares_B = torch.zeros(len(blocks), device=device)
        shape = (len(self.parameters), COLUMNS)
        self.sent_PC = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.nowhere = torch.zeros((), device=device)
        self.table_PC = torch.zeros(shape, dtype=torch.int64, device=device)

    def step(self, sums_3: Tensor, loss: Tensor, reconstruction_loss: Tensor) -> None:
        """One step from the gradients that are there; adds (loss, reconstruction_loss, 1) to sums_3."""
        capturing = self.table_PC.is_cuda and torch.cuda.is_current_stream_capturing()
        if self.table_PC.is_cuda and not capturing:
            torch.cuda.current_stream().synchronize()  # the last table may be on its way yet
        for row, (parameter, working, state) in enumerate(zip(self.parameters, self.working, self.states)):
            gradient = working.grad
            if gradient is None:  # of no use to the loss: nothing to do in any of its blocks
                self.sent_PC[row] = torch.tensor([0] * 6 + [self.nowhere.data_ptr(), 0])
                continue
            alike = [parameter, working, gradient, state["exp_avg"], state["exp_avg_sq"]]
            if any(_order(tensor) != _order(parameter) for tensor in alike):
                raise RuntimeError(
                    f"parameter {row} of shape {tuple(parameter.shape)} and its gradient or state lie in memory in "
                    f"different orders: strides {[tensor.stride() for tensor in alike]}"
                )
            copy = 0 if working is parameter else working.data_ptr()
            addresses = [parameter.data_ptr(), copy, gradient.data_ptr()]
            addresses += [state[name].data_ptr() for name in ("exp_avg", "exp_avg_sq", "step")]
            self.sent_PC[row] = torch.tensor([parameter.numel(), *addresses, gradient.dtype == torch.bfloat16])
        if not capturing:
            self.send()
        group, programs = self.group, len(self.blocks_B2)
        beta1, beta2 = group["betas"]
        _norm_kernel[(programs,)](self.table_PC, self.blocks_B2, self.squares_B, COLUMNS=COLUMNS, BLOCK=BLOCK)
        _step_kernel[(programs,)](
            self.table_PC, self.blocks_B2, self.squares_B, sums_3, loss, reconstruction_loss,
            programs, self.clip, group["lr"], beta1, 1 - beta1, math.log(beta1), beta2, 1 - beta2, math.log(beta2),
            group["eps"], 1 - group["lr"] * group["weight_decay"], COLUMNS=COLUMNS, BLOCK=BLOCK,
        )  # fmt: skip

    def send(self) -> None:
        """The last table to the device."""
        self.table_PC.copy_(self.sent_PC, non_blocking=True)


def _order(tensor: Tensor) -> list[int]:
    """The strides of the axes along which there is more than one entry."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1]
