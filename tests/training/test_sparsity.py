"""The proximal step of the ℓ1 penalty."""

import pytest
import torch
from torch import nn

from peft_luca.training.sparsity import soft_threshold


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.1),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1.0),
        # The first step of Adam divides by the gradient's size, here 2.
        (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0), 0.05),
    ],
)
def test_moves_toward_zero_by_the_step_size_and_stops_there(make, step):
    sparse, other = (nn.Parameter(torch.tensor([1.5, -1.0, 0.1, -0.1])) for _ in range(2))
    optimizer = make([sparse, other])
    for parameter in (sparse, other):
        parameter.grad = torch.tensor([2.0, -2.0, 2.0, -2.0])
    optimizer.step()
    before = sparse.detach().clone()
    soft_threshold(optimizer, [sparse], 0.3)
    wanted = before.sign() * (before.abs() - 0.3 * step).clamp(min=0)
    torch.testing.assert_close(sparse.detach(), wanted)
    torch.testing.assert_close(other.detach(), before)


def test_repeated_steps_find_the_lasso():
    torch.manual_seed(0)
    x, truth = torch.randn(200, 10), torch.tensor([3.0, -2.0] + [0.0] * 8)
    theta = nn.Parameter(torch.randn(10))
    optimizer = torch.optim.SGD([theta], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        (0.5 * (x @ theta - x @ truth).square().mean()).backward()
        optimizer.step()
        soft_threshold(optimizer, [theta], 0.2)
    assert (theta[2:] == 0).all()
    assert (theta[:2] != 0).all()
    # Where it is not zero, the gradient of the rest balances λ.
    gradient = (x.T @ (x @ theta - x @ truth) / 200)[:2]
    torch.testing.assert_close(gradient, -0.2 * theta[:2].sign(), rtol=1e-3, atol=1e-3)
