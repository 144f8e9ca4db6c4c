"""
Twenty steps on a seeded tiny model, pinned: loss and ℓ1 at each, and what the expert answers in the end.

`python tests/training/test_trajectories.py` writes the files anew, after a change that is meant to move them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ANIMALS, logits, tiny_vit
from peft import get_peft_model

from peft_luca import LucaConfig


FOLDER = Path(__file__).parent / "trajectories"
STEPS = 20
# Far below what any real change does, far above what another BLAS does: see test_the_tolerance_catches_a_real_change.
TOLERANCE = 1e-4

# Without whitening, whose rounding to half precision differs from one BLAS to another: tests/tuner/test_reference.py.
RUNS: dict[str, dict[str, Any]] = {
    "default": {"whitening": False},
    "released": {"reference": False, "positive_scale": False, "scale": 1.0, "init_rows": "random"},
    "norm_before_residual": {"norm_position": "before_residual", "whitening": False},
    "calibrator_adapter": {"arrangement": "calibrator_adapter", "whitening": False},
    "parallel": {"arrangement": "parallel", "whitening": False},
}


def run(config: dict[str, Any], lr: float = 0.05, penalty: float = 5e-4) -> dict[str, Any]:
    torch.manual_seed(1993)
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(24, 3, 8, 8, generator=generator)
    labels = torch.arange(24) % 3
    model = get_peft_model(tiny_vit(), LucaConfig(classes=ANIMALS, reduction=4, **config))
    if config.get("reference", True):
        model.compute_reference()
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    losses, l1 = [], []
    for step in range(STEPS):
        batch = torch.arange(step * 8, step * 8 + 8) % 24
        loss = model(images[batch], labels=labels[batch]).loss
        norm = model.l1_penalty()
        optimizer.zero_grad()
        (loss + penalty * norm).backward()
        optimizer.step()
        losses.append(loss.item())
        l1.append(norm.item())
    return {"loss": losses, "l1": l1, "logits": logits(model.eval(), images[:4]).tolist()}


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest relative difference."""
    pairs = [(torch.tensor(one[key]), torch.tensor(other[key])) for key in ("loss", "l1", "logits")]
    return max(float(((a - b).abs() / b.abs().clamp(min=0.1)).max()) for a, b in pairs)


@pytest.mark.parametrize("name", RUNS)
def test_trajectory(name: str) -> None:
    pinned = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert pinned["config"] == RUNS[name]
    measured = run(RUNS[name])
    assert measured["loss"][-1] < measured["loss"][0]
    assert distance(measured, pinned) < TOLERANCE


CHANGES = [{"lr": 0.0501}, {"penalty": 4e-4}, {"config": {"scale": 10.01, "whitening": False}}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_the_tolerance_catches_a_real_change(change: dict[str, Any]) -> None:
    pinned = json.loads((FOLDER / "default.json").read_text(encoding="utf-8"))
    assert distance(run(**{"config": {"whitening": False}, **change}), pinned) > 10 * TOLERANCE


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, config in RUNS.items():
        content = {"config": config, "torch": torch.__version__, **run(config)}
        (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
