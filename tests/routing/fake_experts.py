"""What the tests of routing share: features of a few classes, and experts made of tensors, without any model."""

import torch
from torch.nn.functional import normalize

from peft_luca.routing.evidence import with_evidence
from peft_luca.routing.label_space import LabelSpace
from peft_luca.routing.statistics import ClassStatistics, unit_features


NAMES = ("ant", "bee", "cat", "dog", "eel")
D = 12
ANIMALS, SKIES, TREES = ["cat", "dog", "owl"], ["sun", "moon"], ["oak", "cat"]  # trees share a class with animals
THREE = {"animals": ANIMALS, "skies": SKIES, "trees": TREES}


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


def drawn(name, *shape):
    """Normal numbers that depend on a name alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(name.encode())))


def images_of(*classes, count=12):
    """[CLS] of some classes, `count` of each."""
    return torch.cat([3 * drawn(name, D) + drawn(f"images of {name}", count, D) for name in classes])


class FakeExperts:
    """
    The experts that a router sees. What an expert computes depends on its name and classes alone.

    Args:
        classes: Expert → its classes.
        sigma: Scale of all scores. From about 1e4 on, all entropies are exactly 0 in float32.
        random_features: Number of random features in the statistics; `None` for experts without statistics.
        references: Expert → the reference that it standardizes by; none by default.
    """

    def __init__(self, classes, sigma=10.0, random_features=40, references=None):
        self.sigma, self.references, self.statistics = sigma, references or {}, {}
        self.modules = {name: torch.eye(D) + drawn(name, D, D) / 8 for name in classes}
        self.rows = {
            name: normalize(torch.stack([drawn(c, D) + drawn(f"{name} {c}", D) / 4 for c in own]), dim=1)
            for name, own in classes.items()
        }
        if random_features is not None:
            for name, own in classes.items():
                # Experts that share a class have different images of it.
                features = torch.cat([unit_features(images_of(c)[name == "trees" :: 2].double()) for c in own])
                labels = torch.arange(len(own)).repeat_interleave(6)
                collected = ClassStatistics.collect(features, labels, own, random_features=random_features)
                self.statistics[name] = with_evidence(collected, features, labels, keep_gram=True)
        self.set_experts(classes)

    def set_experts(self, classes):
        """Keeps these experts, in this order."""
        self.names = list(classes)
        self.by_name = torch.tensor(sorted(range(len(self.names)), key=self.names.__getitem__))
        self.label_space = LabelSpace(classes)
        self.statistics = {name: part for name, part in self.statistics.items() if name in classes}
        self._prepared = {}

    def adapted(self, features, name):
        return normalize(features @ self.modules[name], dim=1)

    def scores(self, features):
        rows = torch.cat([self.rows[name] for name in self.names])
        cosines = [(name, self.adapted(features, name) @ rows.T) for name in self.names]
        return torch.stack([self.sigma * self.label_space.combine_rows(c, name) for name, c in cosines], dim=1)

    def score_parts(self, features, size):
        yield from self.scores(features).split(size, dim=1)

    def mixed_logits(self, features, names):
        chosen = torch.tensor([self.names.index(name) for name in names])
        return self.scores(features)[torch.arange(len(features)), chosen]

    def expert_logits(self, features, name):
        return self.sigma * self.adapted(features, name) @ self.rows[name].T

    def scale(self, name):
        return torch.tensor(self.sigma)

    def unit_features(self, features):
        return unit_features(features)

    def reference(self, name):
        return self.references.get(name)

    def prepared(self, router):
        if router not in self._prepared:
            self._prepared[router] = router.prepare(self)
        return self._prepared[router]


def without(classes, *names):
    return {name: own for name, own in classes.items() if name not in names}


def turned(classes):
    return dict(reversed(classes.items()))
