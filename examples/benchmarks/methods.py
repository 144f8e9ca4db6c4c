"""The methods that are compared, each a class: `run.py` measures them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import BATCH, Method, Part, make_trainer
from peft import LoraConfig, get_peft_model
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from torch import Tensor, nn

from peft_luca import LucaConfig, RoutingOutput
from peft_luca.tuner.head import find_head


RANPAC_WIDTH = 10_000


# ---- LuCA --------------------------------------------------------------------------------------------------------


class Luca(Method):
    """One LuCA expert per task, by this package's recipe; the expert of lowest entropy answers, as in the paper."""

    router = "entropy"
    training: dict[str, Any] = {}  # noqa: RUF012
    config: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, *run: Any) -> None:
        super().__init__(*run)
        bench, self.folder = self.bench, tempfile.TemporaryDirectory()
        settings = {"seed": self.seed, "router": self.router, "statistics": self.router != "entropy", **self.training}
        config = {**({} if bench.reference[0] is not None else {"reference": False}), **self.config}
        self.trainer = make_trainer(
            bench.model, bench.processor, self.stream, self.folder.name, bench.given(self.stream), config, **settings
        )

    @property
    def model(self) -> Any:
        """The model with its experts."""
        return self.trainer.model

    def fit(self, task: Any, train: Part) -> None:
        self.trainer.train_task(task)

    @torch.no_grad()
    def route(self, part: Part, router: str | None = None, **options: Any) -> RoutingOutput:
        """The router's output, on the CPU; by the router in use unless another is named, which is in use then."""
        if router is not None:
            self.model.set_router(router, **options)
        found = self.model.route_features(part.features.to(self.bench.device))
        return RoutingOutput(*(value if value is None else value.cpu() for value in found))

    @torch.no_grad()
    def expert_logits(self, part: Part, name: str) -> Tensor:
        """An expert's logits over its own classes, (images, K), on the CPU."""
        logits: Tensor = self.model.expert_logits(part.features.to(self.bench.device), name)
        return logits.cpu()

    def predict(self, test: Part) -> tuple[Tensor, Tensor | None]:
        routed = self.route(test)
        places = torch.tensor([self.ids.index(name) for name in self.model.classes])
        return places[routed.logits.argmax(1)], None if self.joint else routed.expert

    def predict_known(self, test: Part, t: int) -> Tensor:
        own = torch.tensor([self.ids.index(name) for name in self.stream[t].classes])
        return own[self.expert_logits(test, self.stream[t].name).argmax(1)]

    def parameters(self) -> int:
        return sum(p.numel() for name, p in self.model.named_parameters() if "luca_" in name)

    def bytes(self) -> int:
        return sum(file.stat().st_size for file in Path(self.folder.name).rglob("*.safetensors"))

    def close(self) -> None:
        self.bench.model = self.model.unload()
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


# ---- closed forms ------------------------------------------------------------------------------------------------


class ClosedForm(Method):
    """
    A classifier that is computed anew after each task from all images seen. It keeps their features; `bytes` counts
    the sums that would do.
    """

    def __init__(self, *run: Any) -> None:
        super().__init__(*run)
        self.x, self.y = torch.empty(0, self.bench.width).double(), torch.empty(0).long()

    def fit(self, task: Any, train: Part) -> None:
        self.x = torch.cat([self.x, self.bench.unit(train.features)])
        self.y = torch.cat([self.y, train.labels])
        self.scores = self.solve(self.x, self.y, self.seed)

    @staticmethod
    def solve(x: Tensor, y: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
        """The function that scores the classes seen: (images, d) → (images, classes)."""
        raise NotImplementedError

    def predict(self, test: Part) -> tuple[Tensor, Tensor | None]:
        return self.scores(self.bench.unit(test.features)).argmax(1), None

    def parameters(self) -> int:
        return len(self.ids) * self.bench.width


class SimpleCil(ClosedForm):
    """The nearest class mean, by cosine."""

    @staticmethod
    def solve(x: Tensor, y: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
        means = F.normalize(torch.stack([x[y == k].mean(0) for k in range(int(y.max()) + 1)]), dim=1)
        return lambda z: F.normalize(z, dim=1) @ means.T


class Lda(ClosedForm):
    """Linear discriminants of class means and one shrunk covariance, all classes equally likely."""

    @staticmethod
    def solve(x: Tensor, y: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
        classes = int(y.max()) + 1
        if classes == 1:
            return lambda z: torch.zeros(len(z), 1)
        lda = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto", priors=np.full(classes, 1 / classes))
        lda.fit(x.numpy(), y.numpy())
        return lambda z: torch.from_numpy(lda.predict_log_proba(z.numpy()))

    def bytes(self) -> int:
        return 4 * (self.parameters() + self.bench.width**2)


class RanPac(ClosedForm):
    """Ridge regression on 10,000 random ReLU features, of the strength of best leave-one-out accuracy in training."""

    @staticmethod
    def solve(x: Tensor, y: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
        generator = torch.Generator().manual_seed(seed)
        directions = torch.randn(x.shape[1], RANPAC_WIDTH, generator=generator).double()
        h, targets = torch.relu(x @ directions).float(), torch.eye(int(y.max()) + 1).double()[y]
        values, basis = torch.linalg.eigh((h @ h.T).double())
        values, turned = values.clamp(min=0), basis.T @ targets
        best: tuple[float, Any] = (-1.0, None)
        for strength in float(values.mean()) * 10.0 ** np.arange(-4, 3.1, 0.5):
            dual = basis @ (turned / (values + strength)[:, None])
            diagonal = (basis.square() / (values + strength)).sum(dim=1)
            left_out = float(((targets - dual / diagonal[:, None]).argmax(1) == y).double().mean())
            if left_out > best[0]:
                best = (left_out, dual)
        weights = h.T.double() @ best[1]
        return lambda z: torch.relu(z @ directions) @ weights

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


def most_certain(logits: list[Tensor], classes: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Of classifiers over classes of their own, (images, K) each: the answer of the one of lowest entropy, and it."""
    entropies = [torch.special.entr(part.softmax(1)).sum(1) for part in logits]
    chosen = torch.stack(entropies, dim=1).argmin(dim=1)
    labels = torch.stack([own[part.argmax(1)] for own, part in zip(classes, logits, strict=True)], dim=1)
    return labels.gather(1, chosen[:, None])[:, 0], chosen


class Probes(Method):
    """A linear probe per task; the one of lowest entropy over its own classes answers."""

    def __init__(self, *run: Any) -> None:
        super().__init__(*run)
        self.probes: list[LogisticRegression] = []
        self.classes: list[Tensor] = []

    def inputs(self, part: Part) -> Tensor:
        return self.bench.unit(part.features) * self.bench.width**0.5  # numbers of about 1

    def fit(self, task: Any, train: Part) -> None:
        own, labels = train.labels.unique(return_inverse=True)
        if len(own) < 2:
            raise SystemExit(f"the task {task.name!r} has one class. A probe needs two: take --increment 2 or more.")
        self.classes.append(own)
        self.probes.append(fit_probe(self.inputs(train), labels))

    def logits(self, test: Part, t: int) -> Tensor:
        return torch.from_numpy(self.probes[t].predict_log_proba(self.inputs(test).numpy()))

    def predict(self, test: Part) -> tuple[Tensor, Tensor | None]:
        labels, chosen = most_certain([self.logits(test, t) for t in range(len(self.probes))], self.classes)
        return labels, None if self.joint else chosen

    def predict_known(self, test: Part, t: int) -> Tensor:
        return self.classes[t][self.logits(test, t).argmax(1)]

    def parameters(self) -> int:
        return sum(len(own) for own in self.classes) * (self.bench.width + 1)


class JointProbe(Probes):
    """One linear probe on all classes at once."""

    joint = True


class SequentialHead(Probes):
    """One linear head, trained on one task after another, with nothing against forgetting."""

    epochs, batch, rate = 20, 48, 1e-3

    def __init__(self, *run: Any) -> None:
        super().__init__(*run)
        torch.manual_seed(self.seed)
        self.head = nn.Linear(self.bench.width, len(self.ids))
        self.seen = torch.full((len(self.ids),), -torch.inf)  # a class that has not come yet cannot be answered

    def fit(self, task: Any, train: Part) -> None:
        self.seen[train.labels.unique()] = 0.0
        inputs, optimizer = self.inputs(train).float(), torch.optim.AdamW(self.head.parameters(), lr=self.rate)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(train)).split(self.batch):
                loss = F.cross_entropy(self.head(inputs[rows]) + self.seen, train.labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @torch.no_grad()
    def predict(self, test: Part) -> tuple[Tensor, Tensor | None]:
        return (self.head(self.inputs(test).float()) + self.seen).argmax(1), None

    def parameters(self) -> int:
        return len(self.ids) * (self.bench.width + 1)


# ---- LoRA, which moves the backbone, so that no [CLS] can be kept ---------------------------------------------------


class Lora(Method):
    """
    LoRA on query and value, with the values of PEFT's guide to image classification (rank 16, α 16, dropout 0.1,
    learning rate 5e-3): an adapter and a linear head per task; the head of lowest entropy over its classes answers.
    """

    runs_backbone = True
    epochs, batch, rate, rank = 3, 32, 5e-3, 16

    def __init__(self, *run: Any) -> None:
        super().__init__(*run)
        torch.manual_seed(self.seed)
        backbone = self.bench.model
        head = find_head(backbone, LucaConfig())
        self.head_name, self.width = head.name, head.input_width
        self.base_head = backbone.get_submodule(head.name)
        backbone.set_submodule(head.name, nn.Identity())
        names = {name.split(".")[-1] for name, _ in backbone.named_modules()}
        targets = [name for name in ("q_proj", "v_proj", "query", "value") if name in names]
        self.config = LoraConfig(r=self.rank, lora_alpha=16, lora_dropout=0.1, target_modules=targets)
        self.peft: Any = None
        self.heads: list[nn.Linear] = []
        self.classes: list[Tensor] = []  # label ids of each head

    def add_task(self, task: Any, own: Tensor) -> None:
        """A new adapter and a new head."""
        if self.peft is None:
            self.peft = get_peft_model(self.bench.model, self.config, adapter_name=task.name)
        else:
            self.peft.add_adapter(task.name, self.config)
            self.peft.set_adapter(task.name)
        self.heads.append(nn.Linear(self.width, len(own)).to(self.bench.device))
        self.classes.append(own)

    def fit(self, task: Any, train: Part) -> None:
        self.add_task(task, train.labels.unique())
        head, own = self.heads[-1], self.classes[-1]
        place = torch.full((len(self.ids),), -1)
        place[own] = torch.arange(len(own))
        weights = [p for p in self.peft.parameters() if p.requires_grad] + list(head.parameters())
        optimizer = torch.optim.AdamW(weights, lr=self.rate)
        steps = self.epochs * -(-len(train) // self.batch)
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        self.peft.train()
        for _ in range(self.epochs):
            for rows in torch.randperm(len(train)).split(self.batch):
                logits = self.of_head(head(self.peft(self.bench.pixels(train, rows)).logits), own)
                loss = F.cross_entropy(logits, place[train.labels[rows]].to(self.bench.device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                decay.step()
        self.peft.eval()

    def of_head(self, logits: Tensor, own: Tensor) -> Tensor:
        return logits

    @torch.no_grad()
    def logits(self, test: Part, t: int) -> Tensor:
        if len(self.heads) > 1:
            self.peft.set_adapter(self.stream[t].name)
        rows = torch.arange(len(test)).split(BATCH)
        found = torch.cat([self.heads[t](self.peft(self.bench.pixels(test, r)).logits).cpu() for r in rows])
        return self.of_head(found, self.classes[t])

    def predict(self, test: Part) -> tuple[Tensor, Tensor | None]:
        return most_certain([self.logits(test, t) for t in range(len(self.heads))], self.classes)

    def predict_known(self, test: Part, t: int) -> Tensor:
        return self.classes[t][self.logits(test, t).argmax(1)]

    def parameters(self) -> int:
        adapters = sum(p.numel() for name, p in self.peft.named_parameters() if "lora_" in name)
        return adapters + sum(p.numel() for head in self.heads for p in head.parameters())

    def close(self) -> None:
        self.bench.model = self.peft.unload()
        self.bench.model.set_submodule(self.head_name, self.base_head)


class SequentialLora(Lora):
    """One adapter and one head for all tasks, trained on one task after another: what forgetting looks like."""

    def add_task(self, task: Any, own: Tensor) -> None:
        if self.peft is None:
            super().add_task(task, torch.arange(len(self.ids)))
            self.classes[0] = own
        self.classes[0] = torch.cat([self.classes[0], own]).unique()

    def of_head(self, logits: Tensor, own: Tensor) -> Tensor:
        return logits[:, own.to(logits.device)]

    def predict(self, test: Part) -> tuple[Tensor, Tensor | None]:
        return self.predict_known(test, 0), None


METHODS: dict[str, type[Method]] = {
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
