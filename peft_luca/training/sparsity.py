"""The proximal step of the ℓ1 penalty, which makes experts exactly sparse."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer


@torch.no_grad()
def soft_threshold(optimizer: Optimizer, parameters: list[nn.Parameter], weight: float) -> None:
    """
    The proximal step of λ·Σ|θ|, after the optimizer's own: each parameter moves toward zero by λ, the weight, times
    its step size, and stays there if that carries it past (Parikh & Boyd 2014, §6.5.2). The step size is what the
    optimizer gives a constant gradient: lr / (1 - momentum) with SGD, lr / (√v̂ + ε) with Adam.
    """
    chosen = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        for parameter in (parameter for parameter in group["params"] if id(parameter) in chosen):
            state, step = optimizer.state[parameter], torch.as_tensor(group["lr"] / (1 - group.get("momentum", 0.0)))
            if "exp_avg_sq" in state:
                corrected = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
                step = group["lr"] / (corrected.sqrt() + group["eps"])
            shrunk = (parameter.abs() - weight * step.to(parameter)).clamp(min=0)
            parameter.copy_(parameter.sign() * shrunk)
