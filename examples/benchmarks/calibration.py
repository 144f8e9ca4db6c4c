"""
Where the rule and the constants of the `gaussian` router come from: leave-one-out over training images, in closed
form. No test image is read. `measure` writes the figures of one data set, `choose` takes the best over several, and
`letters` writes an image folder of letters that the bundled ViT never saw.

    python examples/benchmarks/calibration.py letters letters
    python examples/benchmarks/calibration.py measure --dataset letters --output strengths_letters.json
    python examples/benchmarks/calibration.py choose strengths_*.json --output strengths_choice.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

import torch
import torch.nn.functional as F
from harness import HERE, Bench, StreamArguments, be_quiet, parse, write_results
from PIL import Image
from torch import Tensor

from peft_luca.routing.discriminants import sphere_strength
from peft_luca.routing.evidence import left_out
from peft_luca.routing.statistics import ClassStatistics


# How far a class is shrunk toward the pooled covariance, by families of rules: name → constants c. Of n images, which
# are n-1 degrees of freedom: c itself, or 1 / (1 + c·(n-1)^p) with this power p.
RULES: dict[str, tuple[float, ...]] = {
    "constant": (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0),
    "fourth root of images": (0.04, 0.06, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25),
    "root of images": (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1),
    "images": (0.000625, 0.00125, 0.0025, 0.005, 0.01),
}
POWERS = {"fourth root of images": 0.25, "root of images": 0.5, "images": 1.0}
TEMPERATURES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20)


@dataclass
class MeasureArguments(StreamArguments):
    """What to measure."""

    output: str = field(default="strengths.json", metadata={"help": "Where the figures go."})
    images_per_class: list[int] = field(
        default_factory=lambda: [10, 20, 40, 80], metadata={"help": "At most so many of each class; then all."}
    )
    volumes: list[float] = field(default_factory=lambda: [0.0, 0.5, 1.0], metadata={"help": "Values of β."})


def shrinkage(rule: str, constant: float, freedom: Tensor) -> Tensor:
    """α of classes of so many degrees of freedom (images less one), (K,)."""
    if rule == "constant":
        return torch.full_like(freedom, constant)
    return 1 / (1 + constant * freedom ** POWERS[rule])


def measure(args: MeasureArguments) -> None:
    bench = Bench(args)
    train, classes = bench.parts["train"], list(bench.classes)
    unit, labels = bench.unit(train.features), train.labels
    most = int(labels.bincount().max())
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, Any]] = []
    for images in [n for n in args.images_per_class if n < most] + [most]:
        kept = torch.cat([order[labels[order] == k][:images] for k in range(len(classes))])
        x, y = unit[kept], labels[kept]
        counts, pooled = y.bincount().double(), ClassStatistics.collect(x, y, classes, rank=None).within
        for rule, constant in [(rule, constant) for rule, constants in RULES.items() for constant in constants]:
            alpha = partial(shrinkage, rule, constant)
            gamma = sphere_strength(counts, alpha(counts - 1), *pooled)
            distances, volumes = left_out(x, y, alpha, gamma)
            for beta in args.volumes:
                scores = -0.5 * (distances + beta * volumes)
                losses = {t: float(F.cross_entropy(scores / t, y)) for t in TEMPERATURES}
                best = min(losses, key=losses.__getitem__)
                row = {"images": images, "rule": rule, "constant": constant, "volume": beta, "sphere": round(gamma, 4)}
                row |= {"accuracy": round(float((scores.argmax(1) == y).double().mean()), 4)}
                rows.append(row | {"log-loss": round(losses[best], 4), "best temperature": best})
            print(rows[-1], flush=True)
        write_results(args.output, images=len(unit), classes=len(classes), width=bench.width, rows=rows)


def choose(sets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Rank every (rule, constant, volume) of results files with the same grid, the best first. Every data set has the
    same weight, and within it every number of images a class. The highest mean accuracy wins; where four decimals are
    equal, the lower log-loss. Temperature: the geometric mean of (best temperature)/√d with all images.
    """
    grids = [{key_of(row) for row in found["rows"]} for found in sets]
    if any(grid != grids[0] for grid in grids):
        raise ValueError("the files have different grids. Measure all of them with the same options.")
    ranked = []
    for key in sorted(grids[0]):
        rows = [[row for row in found["rows"] if key_of(row) == key] for found in sets]
        roots = [math.sqrt(found["width"]) for found in sets]
        best = [max(own, key=lambda row: row["images"])["best temperature"] for own in rows]
        row = dict(zip(("rule", "constant", "volume"), key, strict=True))
        row |= {name: round(mean(mean(r[name] for r in own) for own in rows), 4) for name in ("accuracy", "log-loss")}
        ratio = geometric_mean(temperature / root for temperature, root in zip(best, roots, strict=True))
        ranked.append(row | {"temperature over the root of the width": round(ratio, 4)})
    return sorted(ranked, key=lambda row: (-row["accuracy"], row["log-loss"]))


def key_of(row: dict[str, Any]) -> tuple[str, float, float]:
    return row["rule"], float(row["constant"]), row["volume"]


def may_be_chosen(row: dict[str, Any]) -> bool:
    """Whether the pooled covariance keeps half of the weight at 1,000 images a class, which no data set here has."""
    return float(shrinkage(row["rule"], row["constant"], torch.tensor([999.0]))) >= 0.5


def write_letters(folder: Path, train: int, test: int) -> None:
    """Hebrew and Georgian, which `make_backbone.py` keeps out of its training, drawn and distorted as there."""
    sys.path.insert(0, str(HERE.parent / "assets"))
    from make_backbone import HELD_OUT_ALPHABETS, augment, render

    generator = torch.Generator().manual_seed(0)
    glyphs = render(HELD_OUT_ALPHABETS, 0)
    # `augment` treats the first images of a batch otherwise than the last.
    places = torch.randperm(train + test, generator=torch.Generator().manual_seed(1)).tolist()
    splits = ["train" if place < train else "test" for place in places]
    for k in glyphs.labels.unique().tolist():
        images = glyphs.images[glyphs.labels == k]
        pixels = augment(images[torch.randint(len(images), (len(splits),), generator=generator)], generator)
        low, high = pixels.amin((1, 2, 3), keepdim=True), pixels.amax((1, 2, 3), keepdim=True)
        grey = (255 * (pixels - low) / (high - low).clamp(min=1e-6)).round().byte()[:, 0]
        for i, (split, image) in enumerate(zip(splits, grey, strict=True)):
            place = folder / split / f"letter-{k:02}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.numpy()).save(place / f"{i:02}.png")


def parse_arguments(given: list[str]) -> Any:
    if given[:1] == ["measure"]:
        return parse(MeasureArguments, given[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("measure", help="see `measure --help`")
    chooser = commands.add_parser("choose")
    chooser.add_argument("files", nargs="+", type=Path)
    chooser.add_argument("--output", default="strengths_choice.json")
    letters = commands.add_parser("letters")
    letters.add_argument("folder", type=Path)
    letters.add_argument("--train", type=int, default=300, help="images of a letter to train on")
    letters.add_argument(
        "--test", type=int, default=2, help="and to test; `measure` reads none, but a stream needs some"
    )
    return parser.parse_args(given)


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    be_quiet()
    if isinstance(args, MeasureArguments):
        measure(args)
    elif args.command == "letters":
        write_letters(args.folder, args.train, args.test)
    else:
        ranked = choose([json.loads(path.read_text(encoding="utf-8")) for path in args.files])
        write_results(args.output, chosen=next(row for row in ranked if may_be_chosen(row)), ranked=ranked)


if __name__ == "__main__":
    main()
