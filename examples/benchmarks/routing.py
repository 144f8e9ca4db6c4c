"""
Every router on the same experts, beside closed-form and joint baselines on the same features, over several class
orders. No router is chosen or tuned by a test image.

    python examples/benchmarks/routing.py examples/benchmarks/configs/emoji_14x4.json \\
        --output examples/benchmarks/results/routing_emoji_14.json
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from harness import Bench, Part, StreamArguments, be_quiet, mean_and_deviation, parse, write_results
from methods import Lda, LucaGaussian, RanPac, SimpleCil, fit_probe
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from torch import Tensor

from peft_luca.routing.discriminants import RegularizedDiscriminant
from peft_luca.routing.statistics import ClassStatistics


ROUTERS = "entropy", "energy", "nearest", "lda", "gaussian", "auto", "ridge"
RELEASED_BATCH = 48
RANPAC_SEEDS = 3


@dataclass
class RoutingArguments(StreamArguments):
    """What to measure."""

    random_features: int = field(default=2000, metadata={"help": "Random features of `ridge`."})
    baselines: bool = field(default=True, metadata={"help": "Measure the baselines too."})
    output: str = field(default="routing.json", metadata={"help": "Where the figures go."})


def accuracy(scores: Tensor, labels: Tensor) -> float:
    return float((scores.argmax(1) == labels).double().mean())


def calibration_error(confidence: Tensor, right: Tensor, bins: int = 10) -> float:
    """Expected calibration error: mean distance of confidence and accuracy over bins of equal width."""
    bin_of = (confidence * bins).long().clamp(max=bins - 1)
    gaps = [abs(float((confidence[bin_of == b] - right[bin_of == b].float()).sum())) for b in range(bins)]
    return sum(gaps) / len(right)


def measure_routers(seed: int, bench: Bench, random_features: int) -> dict[str, dict[str, float]]:
    """Learn a stream, and measure every router after every task."""
    stream = bench.stream(seed)
    ids, tasks = stream.classes, list(stream)
    learner = LucaGaussian(bench, stream, ids, seed)
    stages: dict[str, list[float]] = {router: [] for router in ROUTERS}
    figures: dict[str, dict[str, float]] = {router: {} for router in ROUTERS}
    for stage, task in enumerate(tasks, start=1):
        learner.fit(task, bench.part(task, "train", ids))
        model, classes = learner.model, tuple(learner.model.classes)
        test, half = bench.select("test", classes, classes), stage == (len(tasks) + 1) // 2
        owner = torch.tensor([t for t, own in enumerate(model.experts.values()) for _ in own])
        for router in ROUTERS:
            if router == "ridge" and not half and stage < len(tasks):
                continue  # an eigendecomposition of its Gram matrix at every stage takes minutes
            if router == "ridge":  # the others are measured with the statistics that an expert has by default
                kept = dict(model.statistics)
                for name, own in model.experts.items():
                    part = bench.select("train", own, own)
                    x = bench.unit(part.features)
                    found = ClassStatistics.collect(x, part.labels, own, random_features=random_features)
                    with_random = replace(kept[name], gram=found.gram, random_sums=found.random_sums)
                    model.base_model.layer.set_statistics(name, with_random)
            output, found = learner.route(test, router), figures[router]
            stages[router].append(accuracy(output.logits, test.labels))
            if stage == len(tasks):
                found["routing_accuracy"] = float((output.expert == owner[test.labels]).double().mean())
                right = output.logits.argmax(1) == test.labels
                found["calibration_error"] = calibration_error(output.confidence, right)
                found["known_images_refused"] = float(output.unknown.double().mean())
            if half and stage < len(tasks):
                rest = tuple(name for name in ids if name not in classes)
                strange = learner.route(bench.select("test", rest, rest), router)
                known = torch.cat([torch.ones(len(test)), torch.zeros(len(strange.expert))])
                found["unknown_auroc"] = float(roc_auc_score(known, torch.cat([output.known, strange.known])))
            if router == "ridge":
                for name, statistics in kept.items():
                    model.base_model.layer.set_statistics(name, statistics)
        model.set_router("entropy")
    known = [(learner.predict_known(part, t), part) for t, task in enumerate(tasks)
             if (part := bench.part(task, "test", ids)) is not None]  # fmt: skip
    right = torch.cat([predicted == part.labels for predicted, part in known])
    figures["entropy"]["task_known_accuracy"] = float(right.double().mean())
    shuffled = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
    for order, rows in (("sorted", test.labels.argsort(stable=True)), ("shuffled", shuffled)):
        batches = [Part(test.features[r], test.labels[r], test.images) for r in rows.split(RELEASED_BATCH)]
        logits = torch.cat([learner.route(part, "entropy", routing_scope="batch").logits for part in batches])
        figures["entropy"][f"batch_scope_{order}"] = accuracy(logits, test.labels[rows])
    learner.close()
    for router, found in figures.items():
        found["last_accuracy"] = stages[router][-1]
        if router != "ridge":
            found["average_accuracy"] = sum(stages[router]) / len(tasks)
    return figures


def regularised_discriminant(x: Tensor, y: Tensor, test: Tensor) -> Tensor:
    """Friedman's, with the volume term of the density; strengths by cross-validation on training images."""

    def fit(x: Tensor, y: Tensor, shrinkage: float, sphere: float) -> RegularizedDiscriminant:
        statistics = ClassStatistics.collect(x, y, [str(k) for k in range(int(y.max()) + 1)], rank=None)
        return RegularizedDiscriminant(statistics, shrinkage, sphere, volume=1.0)

    total = {(a, g): 0.0 for a in (0.5, 0.7, 0.85, 0.95) for g in (0.02, 0.05, 0.1, 0.2)}
    for train, held in StratifiedKFold(3, shuffle=True, random_state=0).split(x, y):
        for strengths in total:
            total[strengths] += accuracy(fit(x[train], y[train], *strengths).scores(x[held]), y[held])
    return fit(x, y, *max(total, key=total.__getitem__)).scores(test)


def measure_baselines(bench: Bench, seeds: list[int]) -> dict[str, Any]:
    """Closed forms and a joint probe, which do not depend on the class order; on unit features and on raw [CLS]."""
    train, test = bench.parts["train"], bench.parts["test"]
    y, found = train.labels, {}
    unit = bench.unit(train.features), bench.unit(test.features)
    raw = train.features.double(), test.features.double()
    for kind, (x, z) in (("unit features", unit), ("raw [CLS]", raw)):
        found[f"SimpleCIL, {kind}"] = [accuracy(SimpleCil.solve(x, y, 0)(z), test.labels)]
        found[f"LDA, {kind}"] = [accuracy(Lda.solve(x, y, 0)(z), test.labels)]
        draws = [accuracy(RanPac.solve(x, y, seed)(z), test.labels) for seed in seeds[:RANPAC_SEEDS]]
        found[f"RanPAC 10,000, {kind}"] = draws
    scores = regularised_discriminant(*unit[:1], y, unit[1])
    found["regularised discriminant, unit features"] = [accuracy(scores, test.labels)]
    centre, spread = raw[0].mean(0), raw[0].std(0)
    standardized = (raw[0] - centre) / spread, (raw[1] - centre) / spread
    scaled = unit[0] / unit[0].std(0).mean(), unit[1] / unit[0].std(0).mean()
    for kind, (x, z) in (("unit features", scaled), ("standardised by all tasks", standardized)):
        scores = torch.from_numpy(fit_probe(x, y).predict_log_proba(z.numpy()))
        found[f"joint linear probe, {kind}"] = [accuracy(scores, test.labels)]
    return {name: mean_and_deviation(values) for name, values in found.items()}


def parse_arguments(given: list[str]) -> RoutingArguments:
    args = parse(RoutingArguments, given)
    if args.domain_column is not None:
        raise SystemExit("routers are compared on tasks of classes of their own. Leave out --domain_column.")
    return args


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    be_quiet()
    bench = Bench(args)
    baselines = measure_baselines(bench, args.seeds) if args.baselines else {}
    setting = {
        "model": Path(args.model).name,
        "dataset": Path(args.dataset).resolve().name,
        "increment": args.increment,
        "init_classes": args.init_classes,
        "random_features": args.random_features,
    }
    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        rows.append({"class_order_seed": seed, "routers": measure_routers(seed, bench, args.random_features)})
        print(rows[-1], flush=True)
        routers = [row["routers"] for row in rows]
        summary = {
            router: {name: mean_and_deviation([found[router][name] for found in routers]) for name in figures}
            for router, figures in routers[0].items()
        }
        setting["class_order_seeds"] = [row["class_order_seed"] for row in rows]
        write_results(args.output, setting=setting, summary=summary, baselines_last_accuracy=baselines, rows=rows)


if __name__ == "__main__":
    main()
