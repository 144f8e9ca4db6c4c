"""The authors' released module, rebuilt from its description, and ours: the same bits in float64."""

import pytest
import torch
from helpers import make_model
from torch import nn


D, R = 32, 4
# Our name → the released module's part.
PARTS = {
    "adapter_down": lambda released: released.mlp[0],
    "adapter_up": lambda released: released.mlp[2],
    "adapter_norm": lambda released: released.norm,
    "calibrator_down": lambda released: released.gate[0],
    "calibrator_up": lambda released: released.gate[2],
}


class Released(nn.Module):
    """a = LN(z + W_up · GELU(W_down · z + b_down) + b_up) and a ⊙ sigmoid(V_up · ReLU(V_down · a)), in three."""

    def __init__(self, order):
        super().__init__()
        self.order = order
        self.mlp = nn.Sequential(nn.Linear(D, R), nn.GELU(), nn.Linear(R, D))
        self.norm = nn.LayerNorm(D)
        self.gate = nn.Sequential(nn.Linear(D, R, bias=False), nn.ReLU(), nn.Linear(R, D, bias=False), nn.Sigmoid())

    def forward(self, z):
        if self.order == "parallel":
            return z * self.gate(z) + self.norm(self.mlp(z))
        if self.order == "calibrator_adapter":
            z = z * self.gate(z)
        a = self.norm(z + self.mlp(z))
        return a * self.gate(a) if self.order == "adapter_calibrator" else a


@pytest.mark.parametrize("order", ["adapter_calibrator", "calibrator_adapter", "parallel"])
def test_the_released_module_and_ours_agree_to_the_last_bit_in_float64(order):
    model = make_model({"t": ["a", "b"]}, reduction=D // R, arrangement=order, reference=False, seed=3)
    layer = model.base_model.layer.double()
    theirs = Released(order).double()
    ours = {name: getattr(layer, f"luca_{name}")["t"] for name in PARTS}
    with torch.no_grad():
        for name, part in PARTS.items():
            part(theirs).load_state_dict(ours[name].state_dict())
    z = torch.randn(7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = theirs(z)
    assert expected.std() > 0.1
    assert torch.equal(layer.luca(z, "t"), expected)
