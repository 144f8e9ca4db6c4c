"""Exactly sparse experts: the proximal step for the ℓ1 penalty, and how much experts overlap."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..tuner.layer import LucaLayer
from .metrics import Floats


@torch.no_grad()
def soft_threshold(optimizer: Optimizer, parameters: list[nn.Parameter], weight: float) -> None:
    """
    The proximal step of λ·Σ|θ|, to be taken after the optimizer's own on the rest of the loss: every parameter moves
    toward zero by λ times its step size, and stays there if that carries it past (Parikh & Boyd 2014, §6.5.2).

    The step size is what the optimizer gives a constant gradient: lr / (1 - momentum) with SGD, and lr / (√v̂ + ε) with
    Adam, for each number its own.

    Args:
        optimizer (`torch.optim.Optimizer`): Has just stepped.
        parameters (`list[nn.Parameter]`): Those that are to be sparse.
        weight (`float`): λ.
    """
    chosen = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in chosen:
                continue
            state, step = optimizer.state[parameter], torch.as_tensor(group["lr"] / (1 - group.get("momentum", 0.0)))
            if "exp_avg_sq" in state:
                corrected = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
                step = group["lr"] / (corrected.sqrt() + group["eps"])
            shrunk = (parameter.abs() - weight * step.to(parameter)).clamp(min=0)
            parameter.copy_(parameter.sign() * shrunk)


@torch.no_grad()
def overlap_report(layer: LucaLayer, tolerance: float = 0.0) -> dict[str, Any]:
    """
    How sparse experts are, and how much they overlap.

    Args:
        layer ([`LucaLayer`]): The layer, `model.base_model.layer`.
        tolerance (`float`, *optional*, defaults to `0.0`): Numbers up to this count as zero.

    Returns:
        `dict`: `sparsity` (expert → share of zeros among its LuCA parameters); and means over all pairs of experts,
        `None` where there is no pair: `overlap` (numbers that neither has at zero, among those that one has not),
        `cosine` (of the weight matrices) and `subspace_cosine` (root mean square of the cosines of the principal
        angles between the row spaces of the first weights of their branches: √(r/d) for random ones, 1 for the same).
    """
    experts = list(layer.configs)
    parameters = [layer.luca_parameters(name) for name in experts]
    sparsity, overlap = pairwise_overlap(layer, tolerance)
    # Gains of the LayerNorm are near 1 in every expert and would drown the rest.
    matrices = [torch.cat([p.flatten() for p in found.values() if p.ndim == 2]).double() for found in parameters]
    downs = [{k: p for k, p in found.items() if "down" in k and p.ndim == 2} for found in parameters]
    bases = [{key: _row_space(p.double()) for key, p in found.items()} for found in downs]
    pairs = [(i, j) for j in range(len(experts)) for i in range(j) if not np.isnan(overlap[i, j])]

    def mean(values: list[Tensor]) -> float | None:
        return float(torch.stack(values).mean()) if values else None

    return {
        "sparsity": dict(zip(experts, sparsity.tolist(), strict=True)),
        "overlap": mean([torch.tensor(overlap[i, j]) for i, j in pairs]),
        "cosine": mean([torch.cosine_similarity(matrices[i], matrices[j], dim=0) for i, j in pairs]),
        "subspace_cosine": mean(
            [
                (bases[i][key] @ bases[j][key].T).square().sum().div(max(1, len(bases[i][key]))).sqrt()
                for i, j in pairs
                for key in bases[i].keys() & bases[j].keys()
            ]
        ),
    }


@torch.no_grad()
def pairwise_overlap(layer: LucaLayer, tolerance: float = 0.0) -> tuple[Floats, Floats]:
    """
    Share of zeros among each expert's LuCA parameters, (experts,), and for every two experts the numbers that neither
    has at zero, among those that one has not, (experts, experts): NaN where two are of different shapes.
    """
    flat = [torch.cat([p.flatten() for p in layer.luca_parameters(name).values()]) for name in layer.configs]
    alive = [vector.abs() > tolerance for vector in flat]
    overlap = np.full((len(alive), len(alive)), np.nan)
    for i, one in enumerate(alive):
        for j, other in enumerate(alive[: i + 1]):
            if one.shape == other.shape:
                either = max(1, int((one | other).sum()))
                overlap[i, j] = overlap[j, i] = int((one & other).sum()) / either
    return np.array([1 - float(mask.double().mean()) for mask in alive]), overlap


def _row_space(weight: Tensor) -> Tensor:
    """Orthonormal rows that span the rows of a matrix."""
    _, values, rows = torch.linalg.svd(weight, full_matrices=False)
    return rows[values > 1e-6 * values.max().clamp(min=1e-30)]
