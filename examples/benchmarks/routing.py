"""
Every router on the same experts, beside closed-form and joint baselines on the same features, over several class
orders. No router is chosen or tuned by a test image.

    python examples/benchmarks/routing.py examples/benchmarks/configs/emoji_14x4.json \\
        --output examples/benchmarks/results/routing_emoji_14.json

With `--mixture`, only what whitened experts add to `auto`, by one weight that left-out training images choose.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
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
# Of the experts' log-softmax beside the log-posterior of `auto`; the first one is `auto` alone.
MIXTURE_WEIGHTS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass
class RoutingArguments(StreamArguments):
    """What to measure."""

    random_features: int = field(default=2000, metadata={"help": "Random features of `ridge`."})
    baselines: bool = field(default=True, metadata={"help": "Measure the baselines too."})
    mixture: bool = field(default=False, metadata={"help": "Measure mixtures of `auto` and the experts instead."})
    folds: int = field(default=3, metadata={"help": "Folds of the training images that choose a mixture's weight."})
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


def learned(seed: int, bench: Bench) -> LucaGaussian:
    """A learner of all tasks of a stream."""
    stream = bench.stream(seed)
    learner = LucaGaussian(bench, stream, stream.classes, seed)
    for task in stream:
        learner.fit(task, bench.part(task, "train", stream.classes))
    return learner


def without_fold(bench: Bench, kept: Tensor, held: Tensor) -> Bench:
    """The bench whose training images are those kept, and whose test images are the training images held out."""
    made, train, domain = copy.copy(bench), bench.parts["train"], bench.domain["train"]
    rows = {"train": kept, "test": held}
    made.parts = {
        split: Part(train.features[r], train.labels[r], train.images.select(r.tolist())) for split, r in rows.items()
    }
    made.domain = {split: domain[r] for split, r in rows.items()}
    return made


def posteriors_within(learner: LucaGaussian, bench: Bench) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """
    Of each expert, over its own classes and for the test images of these: log-posterior of the Gaussians of its own
    statistics, its own log-softmax, and labels.
    """
    found = {}
    for name, own in learner.model.experts.items():
        test = bench.select("test", own, own)
        gaussian = RegularizedDiscriminant(learner.model.statistics[name])
        expert = learner.expert_logits(test, name).log_softmax(1)
        found[name] = gaussian.log_posterior(bench.unit(test.features).float()), expert, test.labels
    return found


def chosen_weights(seed: int, bench: Bench, folds: int) -> dict[str, float]:
    """
    The weight of each expert, and of all at once (`all`), of least log-loss on training images that experts and
    statistics did not see; 0 unless another is better by more than its standard error.
    """
    train, losses = bench.parts["train"], {}
    for kept, held in StratifiedKFold(folds, shuffle=True, random_state=0).split(train.features, train.labels):
        part = without_fold(bench, torch.from_numpy(kept), torch.from_numpy(held))
        learner = learned(seed, part)
        for name, (gaussian, expert, labels) in posteriors_within(learner, part).items():
            mixed = [F.cross_entropy(gaussian + w * expert, labels, reduction="none") for w in MIXTURE_WEIGHTS]
            losses.setdefault(name, []).append(torch.stack(mixed))
        learner.close()
        bench.model = part.model
    per_expert = {name: torch.cat(rows, dim=1) for name, rows in losses.items()}
    weights = {}
    for name, loss in {**per_expert, "all": torch.cat(list(per_expert.values()), dim=1)}.items():
        best = int(loss.sum(1).argmin())
        gain = loss[0] - loss[best]
        weights[name] = MIXTURE_WEIGHTS[best if gain.sum() > gain.square().sum().sqrt() else 0]
    return weights


def measure_mixture(seed: int, bench: Bench, folds: int) -> dict[str, float]:
    """
    Accuracy of `auto` mixed with the experts' log-softmax over their own classes: within the known task, across tasks
    (`routed`), and across tasks where the experts move only the shares within a task (`tasks by auto`).
    """
    weights = chosen_weights(seed, bench, folds)
    learner = learned(seed, bench)
    classes, experts = tuple(learner.model.classes), learner.model.experts
    test = bench.select("test", classes, classes)
    auto = learner.route(test, "auto").logits.log_softmax(1)
    own = {name: torch.tensor([classes.index(c) for c in names]) for name, names in experts.items()}
    votes = {name: learner.expert_logits(test, name).log_softmax(1) for name in experts}
    nearest = learner.route(test, "nearest")
    figures = {"nearest, routed": accuracy(nearest.logits, test.labels)}
    learner.close()

    def add(rule: str, weight_of: dict[str, float]) -> None:
        routed, by_auto, within = auto.clone(), auto.clone(), torch.zeros(len(test), dtype=torch.bool)
        for name, columns in own.items():
            mixed = auto[:, columns] + weight_of[name] * votes[name]
            routed[:, columns] = mixed
            by_auto[:, columns] = mixed.log_softmax(1) + auto[:, columns].logsumexp(1, keepdim=True)
            within |= columns[mixed.argmax(1)] == test.labels
        figures[f"{rule}, task known"] = float(within.double().mean())
        figures[f"{rule}, routed"] = accuracy(routed, test.labels)
        figures[f"{rule}, tasks by auto"] = accuracy(by_auto, test.labels)

    for weight in MIXTURE_WEIGHTS:
        add(f"weight {weight:g}", dict.fromkeys(own, weight))
    add("held-out weight of all", dict.fromkeys(own, weights["all"]))
    add("held-out weight of each", weights)
    only = torch.stack([own[name][votes[name].argmax(1)] == test.labels for name in own]).any(0)
    figures["experts alone, task known"] = float(only.double().mean())
    figures["chosen weight of all"] = weights["all"]
    figures["chosen weight of each, mean"] = sum(weights[name] for name in own) / len(own)
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


def write_mixture(args: RoutingArguments, bench: Bench) -> None:
    """Measure mixtures of every order; write the file after each. The best weight is chosen by the test images."""
    rows: list[dict[str, float]] = []
    for seed in args.seeds:
        rows.append(measure_mixture(seed, bench, args.folds))
        print(seed, rows[-1], flush=True)
        summary = {name: mean_and_deviation([row[name] for row in rows]) for name in rows[0]}
        best = {
            kind: max(MIXTURE_WEIGHTS, key=lambda w: summary[f"weight {w:g}, {kind}"]["mean"] or 0.0)
            for kind in ("task known", "routed", "tasks by auto")
        }
        setting = {"stream": args.name, "folds": args.folds, "class_order_seeds": args.seeds[: len(rows)]}
        write_results(args.output, setting=setting, best_weight_by_test_images=best, summary=summary, rows=rows)


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    be_quiet()
    bench = Bench(args)
    if args.mixture:
        return write_mixture(args, bench)
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
