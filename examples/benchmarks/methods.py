"""
Methods that learn from [CLS], each in the fewest lines. A method is made of a `Bench`, the stream that it learns, the
classes in the order of their ids, and a seed. `learn(task, train)` is called for one task after another;
`answer(test)` gives label ids and, where there are experts, who answered; `answer_known(test, t)` is what the t-th
expert alone says.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bench import Bench, Part
from peers import Lora, SequentialLora
from routing import RANPAC_WIDTH, fit_ranpac
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from torch import Tensor, nn
from transformers import PrinterCallback

from peft_luca import ContinualTrainer, ContinualTrainingArguments, FeatureDataset, LucaConfig
from peft_luca.routing.router import entropy


# ---- LuCA --------------------------------------------------------------------------------------------------------


class FeatureTrainer(ContinualTrainer):
    """A trainer that is given the features."""

    bench: Bench

    def features(self, task: Any, split: str) -> FeatureDataset:
        part = self.bench.part(task, split, self.stream.classes)
        assert part is not None
        return FeatureDataset(part.features, part.labels)


class Luca:
    """One LuCA expert per task, by the own recipe; the most certain one answers, as in the paper."""

    joint, passes_itself = False, False
    router = "entropy"
    training: dict[str, Any] = {}  # noqa: RUF012
    config: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, bench: Bench, stream: Any, ids: tuple[str, ...], seed: int) -> None:
        self.bench, self.stream, self.ids = bench, stream, ids
        self.folder = tempfile.TemporaryDirectory()
        settings = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "seed": seed}
        settings |= {"router": self.router, "statistics": self.router != "entropy", **self.training}
        self.trainer = FeatureTrainer(
            bench.model,
            ContinualTrainingArguments(self.folder.name, **settings),
            stream,
            LucaConfig(**({} if bench.reference[0] is not None else {"reference": False}), **self.config),
            bench.processor,
        )
        self.trainer.bench = bench
        self.trainer.remove_callback(PrinterCallback)

    def learn(self, task: Any, train: Part) -> None:
        self.trainer.train_task(task)

    @torch.no_grad()
    def answer(self, test: Part) -> tuple[Tensor, Tensor | None]:
        routed = self.trainer.tuner.layer.route(test.features.to(self.bench.device))
        places = torch.tensor([self.ids.index(name) for name in self.trainer.tuner.classes])
        return places[routed.logits.argmax(1).cpu()], None if self.joint else routed.expert.cpu()

    @torch.no_grad()
    def answer_known(self, test: Part, t: int) -> Tensor:
        own = torch.tensor([self.ids.index(name) for name in self.stream[t].classes])
        z, layer = test.features.to(self.bench.device), self.trainer.tuner.layer
        return own[layer.expert_logits(z, self.stream[t].name).argmax(1).cpu()]

    def parameters(self) -> int:
        layer = self.trainer.tuner.layer
        modules = sum(p.numel() for name in layer.configs for p in layer.luca_parameters(name).values())
        return modules + sum(layer.luca_class_rows[name].numel() + 1 for name in layer.configs)

    def bytes(self) -> int:
        return sum(file.stat().st_size for file in Path(self.folder.name).rglob("*.safetensors"))

    def close(self) -> None:
        self.bench.model = self.trainer.tuner.unload()
        self.folder.cleanup()


class LucaGaussian(Luca):
    """The same experts with their statistics, and the router that these allow."""

    router = "gaussian"


class LucaPaper(Luca):
    """The paper's recipe, on [CLS] without augmentation."""

    training = {"recipe": "paper", "augmentation": False}  # noqa: RUF012


class JointLuca(Luca):
    """One expert for all classes at once."""

    joint = True


# ---- closed forms, which keep sums that grow with no task ---------------------------------------------------------


class ClosedForm:
    """
    What is computed anew, after each task, from all images seen. Features are kept here in place of the sums that
    would do, whose size `bytes` counts.
    """

    joint, passes_itself = False, False

    def __init__(self, bench: Bench, stream: Any, ids: tuple[str, ...], seed: int) -> None:
        self.bench, self.stream, self.ids, self.seed = bench, stream, ids, seed
        self.x, self.y = torch.empty(0, bench.width).double(), torch.empty(0).long()

    def learn(self, task: Any, train: Part) -> None:
        self.x = torch.cat([self.x, self.bench.unit(train.features)])
        self.y = torch.cat([self.y, train.labels])
        self.scores = self.fit(self.x, self.y)

    def fit(self, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        """What scores the classes seen: (images, d) → (images, classes)."""
        raise NotImplementedError

    def answer(self, test: Part) -> tuple[Tensor, Tensor | None]:
        return self.scores(self.bench.unit(test.features)).argmax(1), None

    def parameters(self) -> int:
        return len(self.ids) * self.bench.width

    def bytes(self) -> int:
        return 4 * self.parameters()

    def close(self) -> None:
        pass


class SimpleCil(ClosedForm):
    """The nearest class mean, by cosine."""

    def fit(self, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        means = F.normalize(torch.stack([x[y == k].mean(0) for k in range(int(y.max()) + 1)]), dim=1)
        return lambda z: z @ means.T


class Lda(ClosedForm):
    """Linear discriminants of class means and one shrunk covariance, every class as likely."""

    def fit(self, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        if y.max() == 0:
            return lambda z: torch.zeros(len(z), 1)  # one class so far
        uniform = np.full(int(y.max()) + 1, 1 / (int(y.max()) + 1))
        lda = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto", priors=uniform).fit(x.numpy(), y.numpy())
        return lambda z: torch.from_numpy(lda.predict_log_proba(z.numpy()))

    def bytes(self) -> int:
        return 4 * (self.parameters() + self.bench.width**2)


class RanPac(ClosedForm):
    """Ridge regression on 10,000 random ReLU features."""

    def fit(self, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        return fit_ranpac(x, y, self.seed)

    def parameters(self) -> int:
        return len(self.ids) * RANPAC_WIDTH

    def bytes(self) -> int:
        return 4 * (self.parameters() + RANPAC_WIDTH**2)


# ---- linear heads ------------------------------------------------------------------------------------------------


def fit_probe(x: Tensor, y: Tensor) -> LogisticRegression:
    """Logistic regression; its strength by cross-validation on the train images, where every class has enough."""
    if y.bincount().min() < 3:
        return LogisticRegression(C=0.03, max_iter=100).fit(x.numpy(), y.numpy())
    probe = LogisticRegressionCV(
        Cs=[3e-3, 0.03, 0.3], cv=3, max_iter=100, scoring="accuracy", l1_ratios=(0,), use_legacy_attributes=False
    )
    return probe.fit(x.numpy(), y.numpy())


class Probes:
    """A linear probe per task; the one that is most certain of its own classes answers."""

    joint, passes_itself = False, False

    def __init__(self, bench: Bench, stream: Any, ids: tuple[str, ...], seed: int) -> None:
        self.bench, self.stream, self.ids = bench, stream, ids
        self.probes: list[LogisticRegression] = []
        self.classes: list[Tensor] = []

    def inputs(self, part: Part) -> Tensor:
        return self.bench.unit(part.features) * self.bench.width**0.5  # numbers of about 1

    def learn(self, task: Any, train: Part) -> None:
        if len(task.classes) < 2:
            raise SystemExit(
                f"task {task.name!r} has one class, which a linear probe cannot tell from anything. Take an increment "
                "of at least 2 for this method."
            )
        own, labels = train.labels.unique(return_inverse=True)
        self.classes.append(own)
        self.probes.append(fit_probe(self.inputs(train), labels))

    def log_probabilities(self, test: Part, t: int) -> Tensor:
        return torch.from_numpy(self.probes[t].predict_log_proba(self.inputs(test).numpy()))

    def answer(self, test: Part) -> tuple[Tensor, Tensor | None]:
        found = [self.log_probabilities(test, t) for t in range(len(self.probes))]
        chosen = torch.stack([entropy(part[:, None])[:, 0] for part in found], dim=1).argmin(dim=1)
        labels = torch.stack([own[part.argmax(1)] for own, part in zip(self.classes, found, strict=True)], dim=1)
        return labels.gather(1, chosen[:, None])[:, 0], None if self.joint else chosen

    def answer_known(self, test: Part, t: int) -> Tensor:
        return self.classes[t][self.log_probabilities(test, t).argmax(1)]

    def parameters(self) -> int:
        return sum(len(own) for own in self.classes) * (self.bench.width + 1)

    def bytes(self) -> int:
        return 4 * self.parameters()

    def close(self) -> None:
        pass


class JointProbe(Probes):
    """One linear probe on all classes at once."""

    joint = True


class SequentialHead(Probes):
    """One linear head, trained on one task after another, with nothing against forgetting."""

    epochs, batch, rate = 20, 48, 1e-3

    def __init__(self, bench: Bench, stream: Any, ids: tuple[str, ...], seed: int) -> None:
        super().__init__(bench, stream, ids, seed)
        torch.manual_seed(seed)
        self.head = nn.Linear(bench.width, len(ids))
        self.seen = torch.full((len(ids),), -torch.inf)  # a class that has not come yet cannot be answered

    def learn(self, task: Any, train: Part) -> None:
        self.seen[train.labels.unique()] = 0.0
        inputs, optimizer = self.inputs(train).float(), torch.optim.AdamW(self.head.parameters(), lr=self.rate)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(train)).split(self.batch):
                loss = F.cross_entropy(self.head(inputs[rows]) + self.seen, train.labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @torch.no_grad()
    def answer(self, test: Part) -> tuple[Tensor, Tensor | None]:
        return (self.head(self.inputs(test).float()) + self.seen).argmax(1), None

    def parameters(self) -> int:
        return len(self.ids) * (self.bench.width + 1)


METHODS: dict[str, Any] = {
    "luca": Luca,
    "luca_gaussian": LucaGaussian,
    "luca_paper": LucaPaper,
    "simplecil": SimpleCil,
    "lda": Lda,
    "ranpac": RanPac,
    "probes": Probes,
    "sequential_head": SequentialHead,
    "lora": Lora,
    "sequential_lora": SequentialLora,
    "joint_probe": JointProbe,
    "joint_luca": JointLuca,
}
