"""What the tests of routing share: features of a few classes, and experts that are tensors without any model."""

import torch

from peft_luca.routing.statistics import unit_features


NAMES = ("ant", "bee", "cat", "dog", "eel")
D = 12


def images(seed=0, sizes=(30, 9, 14, 2, 1)):
    """Unit features of five classes of different size and shape, in float64, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    x = [
        torch.randn(n, D, generator=generator).double() @ torch.randn(D, D, generator=generator).double()
        + 3 * torch.randn(D, generator=generator).double()
        for n in sizes
    ]
    labels = torch.cat([torch.full((n,), k) for k, n in enumerate(sizes)])
    order = torch.randperm(len(labels), generator=generator)
    return unit_features(torch.cat(x))[order], labels[order]
