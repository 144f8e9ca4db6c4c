"""
Every router on the same experts, beside closed-form and joint baselines on the same features, over several class
orders. No router is chosen or tuned by a test image.

    python examples/benchmarks/routing.py --model ../shared/models/dinov2-small --dataset ../shared/data/emoji \
        --increment 4 --init_classes 6 --output examples/benchmarks/results/routing_emoji_14.json
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from environment import write_results
from peft import get_peft_model
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from transformers import AutoImageProcessor, AutoModelForImageClassification, HfArgumentParser

from peft_luca import ContinualTrainer, ContinualTrainingArguments, FeatureDataset, ImageCollator, LucaConfig
from peft_luca.data.feature_cache import FeatureExtractor
from peft_luca.routing.discriminants import Gaussian
from peft_luca.routing.router import get_router
from peft_luca.routing.statistics import ClassStatistics


sys.path.insert(0, str(Path(__file__).parent.parent))
from cil import ExampleArguments, make_stream


ROUTERS = "entropy", "max_prob", "margin", "energy", "prototype", "gaussian", "ridge (2,000 random features)", "hybrid"
ORDERS = (1993, 0, 1, 2, 3)
RELEASED_BATCH = 48
RANPAC_WIDTH = 10_000
RANPAC_SEEDS = 3


@dataclass
class BenchmarkArguments(ExampleArguments):
    """What to measure."""

    class_order_seeds: list[int] = field(
        default_factory=lambda: [1993, 0, 1, 2, 3], metadata={"help": "Class orders."}
    )
    features: str | None = field(default=None, metadata={"help": "File that keeps [CLS] from one run to the next."})
    baselines: bool = field(default=True, metadata={"help": "Measure the baselines too."})
    output: str = field(default="routing.json", metadata={"help": "Where the figures go."})


class Features:
    """[CLS] of a dataset's images, once for all class orders."""

    def __init__(self, args: BenchmarkArguments, processor) -> None:
        self.by_class: dict[tuple[str, str], torch.Tensor] = {}
        if args.features and Path(args.features).is_file():
            with np.load(args.features) as file:
                self.by_class = {tuple(key.split("/", 1))[::-1]: torch.from_numpy(file[key]) for key in file}
            return
        stream = make_stream(args)
        model = get_peft_model(load(args), LucaConfig(classes=["a", "b"]))
        collator = ImageCollator(processor, stream.image_column)
        for task in stream:
            for split, dataset in (("train", task.train), ("test", task.test)):
                found = FeatureExtractor(model.pooled_features, collator, 32)(dataset)
                for name in task.classes:
                    self.by_class[name, split] = found.features[found.labels == stream.classes.index(name)]
        if args.features:
            np.savez(args.features, **{f"{split}/{name}": z.numpy() for (name, split), z in self.by_class.items()})

    def of(self, classes, split: str, ids) -> FeatureDataset:
        features = [self.by_class[name, split] for name in classes]
        labels = [torch.full((len(z),), ids.index(name)) for name, z in zip(classes, features, strict=True)]
        return FeatureDataset(torch.cat(features), torch.cat(labels))


class FeatureTrainer(ContinualTrainer):
    """A trainer that is given the features."""

    known: Features

    def features(self, task, split: str) -> FeatureDataset:
        return self.known.of(task.classes, split, self.stream.classes)


def load(args: BenchmarkArguments):
    return AutoModelForImageClassification.from_pretrained(args.model, dtype=torch.float32)


def learn(
    args: BenchmarkArguments,
    processor,
    features: Features,
    model,
    seed: int,
    kind: type[FeatureTrainer] = FeatureTrainer,
    config: dict | None = None,
    **settings,
) -> FeatureTrainer:
    """A stream of one class order, learnt by a kind of trainer with fields of LucaConfig and of its arguments."""
    args.class_order_seed = seed
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(
            model=model,
            args=ContinualTrainingArguments(
                folder, disable_tqdm=True, report_to=[], logging_strategy="no", **settings
            ),
            stream=make_stream(args),
            luca_config=LucaConfig(**config or {}),
            processing_class=processor,
        )
        trainer.known = features
        trainer.train()
    return trainer


def compare(args: BenchmarkArguments, variants: list[str], figures_of: Callable[..., dict[str, float]]) -> None:
    """Every variant over every class order, on the same features; `figures_of` learns and measures one."""
    warnings.filterwarnings("ignore", message="Adapter")
    torch.set_num_threads(1)
    processor = AutoImageProcessor.from_pretrained(args.model)
    features, model = Features(args, processor), load(args)
    summary: dict[str, dict] = {}
    for variant in variants:
        rows = [figures_of(variant, args, processor, features, model, seed) for seed in args.class_order_seeds]
        summary[variant] = {name: summarise([row[name] for row in rows]) for name in rows[0]}
        print(variant, summary[variant], flush=True)
        setting = {"increment": args.increment, "class_order_seeds": args.class_order_seeds}
        write_results(args.output, setting=setting, summary=summary)


def ask(layer, router: str, z: torch.Tensor, **options):
    layer.set_router(get_router(router.split()[0]), options)
    return layer.route(z)


@torch.no_grad()
def measure(trainer: FeatureTrainer, features: Features) -> dict[str, dict[str, float]]:
    """Every router at every stage, from the last backwards: an expert that is deleted was never there."""
    model, names = trainer.model, list(trainer.tuner.experts)
    layer, all_classes = trainer.tuner.layer, list(trainer.stream.classes)
    tasks = {task.name: task for task in trainer.stream}
    figures: dict[str, dict[str, list[float]]] = {router: {} for router in ROUTERS}

    def note(router: str, figure: str, value) -> None:
        figures[router].setdefault(figure, []).append(float(value))

    for stage in range(len(names), 0, -1):
        classes = list(trainer.tuner.classes)
        test = features.of(classes, "test", classes)
        owner = torch.tensor([t for t, own in enumerate(trainer.tuner.experts.values()) for _ in own])
        for router in ROUTERS:
            if router.startswith("ridge") and stage not in (len(names), (len(names) + 1) // 2):
                continue  # an eigendecomposition of its Gram matrix at every stage takes minutes
            output = ask(layer, router, test.features)
            right = output.logits.argmax(1) == test.labels
            note(router, "stages", right.float().mean())
            if stage == len(names):
                note(router, "routing_accuracy", (output.expert == owner[test.labels]).float().mean())
                note(router, "calibration_error", calibration_error(output.confidence, right))
            if stage == (len(names) + 1) // 2:
                rest = [name for name in all_classes if name not in classes]
                strange = ask(layer, router, features.of(rest, "test", rest).features)
                known = torch.cat([torch.ones(len(test)), torch.zeros(len(strange.expert))])
                note(router, "unknown_auroc", roc_auc_score(known, torch.cat([output.confidence, strange.confidence])))
        if stage == len(names):
            known, shuffled = [], torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
            for name in names:
                own = features.of(tasks[name].classes, "test", tasks[name].classes)
                known.append((layer.expert_logits(own.features, name).argmax(1) == own.labels).float())
            note("entropy", "task_known_accuracy", torch.cat(known).mean())
            for order, index in (("sorted", torch.arange(len(test))), ("shuffled", shuffled)):
                answers = [
                    ask(layer, "entropy", z, routing_scope="batch").logits.argmax(1)
                    for z in test.features[index].split(RELEASED_BATCH)
                ]
                right = torch.cat(answers) == test.labels[index]
                note("entropy", f"batch_scope_{order}", right.float().mean())
        if stage > 1:
            layer.set_router(None, {})
            model.delete_adapter(list(trainer.tuner.experts)[-1])
    return {
        router: {
            "last_accuracy": found["stages"][0],
            **({} if router.startswith("ridge") else {"average_accuracy": mean(found["stages"])}),
            **{name: values[0] for name, values in found.items() if name != "stages"},
        }
        for router, found in figures.items()
    }


def calibration_error(confidence: torch.Tensor, right: torch.Tensor, bins: int = 10) -> float:
    """Expected calibration error: mean distance of confidence and accuracy over bins of equal width."""
    bin_of = (confidence * bins).long().clamp(max=bins - 1)
    gaps = [abs(float((confidence[bin_of == b] - right[bin_of == b].float()).sum())) for b in range(bins)]
    return sum(gaps) / len(right)


# ---- baselines ---------------------------------------------------------------------------------------------------


def accuracy(scores: torch.Tensor, labels: torch.Tensor) -> float:
    return float((scores.argmax(1) == labels).double().mean())


def fit_ranpac(x, y, seed: int):
    """RanPAC: ridge on random ReLU features, of the strength of best leave-one-out accuracy on the training images."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(x.shape[1], RANPAC_WIDTH, generator=generator).double()
    h, targets = torch.relu(x @ directions).float(), torch.eye(int(y.max()) + 1).double()[y]
    values, basis = torch.linalg.eigh((h @ h.T).double())
    best = (-1.0, None)
    values, turned = values.clamp(min=0), basis.T @ targets
    for strength in float(values.mean()) * 10.0 ** np.arange(-4, 3.1, 0.5):
        dual = basis @ (turned / (values + strength)[:, None])
        diagonal = (basis.square() / (values + strength)).sum(dim=1)
        left_out = accuracy(targets - dual / diagonal[:, None], y)
        if left_out > best[0]:
            best = (left_out, dual)
    weights = h.T.double() @ best[1]
    return lambda test: torch.relu(test @ directions) @ weights


def regularised_discriminant(x, y, test) -> torch.Tensor:
    """Friedman's, with the volume term as the density has it; strengths by cross-validation on training images."""

    def collect(x, y):
        return ClassStatistics.collect(x, y, [str(k) for k in range(int(y.max()) + 1)], rank=None)

    grid = [(a, g) for a in (0.5, 0.7, 0.85, 0.95) for g in (0.02, 0.05, 0.1, 0.2)]
    total = dict.fromkeys(grid, 0.0)
    for train, held in StratifiedKFold(3, shuffle=True, random_state=0).split(x, y):
        part = collect(x[train], y[train])
        for strengths in grid:
            total[strengths] += accuracy(Gaussian(part, *strengths, volume=1.0).scores(x[held]), y[held])
    return Gaussian(collect(x, y), *max(grid, key=total.__getitem__), volume=1.0).scores(test)


def linear_probe(x, y, test) -> torch.Tensor:
    """Logistic regression on all training images at once; its strength by cross-validation on them."""
    probe = LogisticRegressionCV(
        Cs=[3e-3, 0.03, 0.3], cv=3, max_iter=100, scoring="accuracy", l1_ratios=(0,), use_legacy_attributes=False
    )
    return torch.from_numpy(probe.fit(x.numpy(), y.numpy()).decision_function(test.numpy()))


def measure_baselines(features: Features, layer, seeds: list[int]) -> dict[str, dict[str, float]]:
    """Closed forms and a joint probe; none depends on the class order. On unit features and on raw [CLS]."""
    classes = sorted({name for name, _ in features.by_class})
    train, test = (features.of(classes, split, classes) for split in ("train", "test"))
    first = next(iter(layer.configs))
    unit = [layer.unit_features(part.features.double(), first) for part in (train, test)]
    raw = [part.features.double() for part in (train, test)]
    y = train.labels
    found: dict[str, list[float]] = {}
    draws = seeds[:RANPAC_SEEDS]
    uniform = np.full(len(classes), 1 / len(classes))
    for kind, (x, z) in (("unit features", unit), ("raw [CLS]", raw)):
        means = torch.stack([x[y == k].mean(0) for k in range(len(classes))])
        cosines = torch.nn.functional.normalize(z, dim=1) @ torch.nn.functional.normalize(means, dim=1).T
        found[f"SimpleCIL, {kind}"] = [accuracy(cosines, test.labels)]
        lda = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto", priors=uniform)
        scores = lda.fit(x.numpy(), y.numpy()).decision_function(z.numpy())
        found[f"LDA, {kind}"] = [accuracy(torch.from_numpy(scores), test.labels)]
        found[f"RanPAC 10,000, {kind}"] = [accuracy(fit_ranpac(x, y, seed)(z), test.labels) for seed in draws]
    scores = regularised_discriminant(unit[0], y, unit[1])
    found["regularised discriminant, unit features"] = [accuracy(scores, test.labels)]
    for kind, (x, z) in (("unit features", unit), ("standardised by all tasks", raw)):
        centre, spread = (x.mean(0), x.std(0)) if kind != "unit features" else (0.0, x.std(0).mean())
        scores = linear_probe((x - centre) / spread, y, (z - centre) / spread)
        found[f"joint linear probe, {kind}"] = [accuracy(scores, test.labels)]
    return {name: summarise(values) for name, values in found.items()}


def summarise(values: list[float]) -> dict[str, float]:
    return {"mean": round(mean(values), 4), "deviation": round(stdev(values), 4) if len(values) > 1 else 0.0}


def main() -> None:
    (args,) = HfArgumentParser(BenchmarkArguments).parse_args_into_dataclasses()
    warnings.filterwarnings("ignore", message="routing_scope|Adapter|lbfgs")
    torch.set_num_threads(1)
    processor = AutoImageProcessor.from_pretrained(args.model)
    features = Features(args, processor)
    rows, baselines = [], {}
    for seed in args.class_order_seeds:
        trainer = learn(args, processor, features, load(args), seed, statistics_random_features=2000)
        if args.baselines and not baselines:
            baselines = measure_baselines(features, trainer.tuner.layer, args.class_order_seeds)
            print(baselines, flush=True)
        rows.append({"class_order_seed": seed, "routers": measure(trainer, features)})
        print(rows[-1], flush=True)
        write(args, rows, baselines)  # what is measured is kept, should the next order be interrupted


def write(args: BenchmarkArguments, rows: list[dict], baselines: dict) -> None:
    summary = {
        router: {
            figure: summarise([row["routers"][router][figure] for row in rows])
            for figure in rows[0]["routers"][router]
        }
        for router in ROUTERS
    }
    setting = {
        "model": Path(args.model).name,
        "dataset": Path(args.dataset).name,
        "increment": args.increment,
        "init_classes": args.init_classes,
        "class_order_seeds": [row["class_order_seed"] for row in rows],
    }
    write_results(args.output, setting=setting, summary=summary, baselines_last_accuracy=baselines, rows=rows)


if __name__ == "__main__":
    main()
