"""
A frozen vision transformer learns classes task by task: one LuCA expert per task, nothing stored, nothing forgotten.

Without arguments: scikit-learn's handwritten digits in 5 tasks of 2, on a small ViT that was pretrained on letters and
lies beside this file. No network is needed.

    accelerate launch examples/cil.py

With arguments: any image classifier and any dataset, from the Hub or from disk. All arguments of
ContinualTrainingArguments are taken too.

    accelerate launch examples/cil.py --model google/vit-base-patch16-224-in21k --dataset cifar100 \
        --label_column fine_label --increment 10

Running it again in the same --output_dir resumes where it stopped. The arguments may also come from a JSON file:

    accelerate launch examples/cil.py arguments.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL.Image import fromarray
from sklearn.datasets import load_digits
from transformers import AutoImageProcessor, AutoModelForImageClassification, HfArgumentParser, PreTrainedModel
from transformers.utils import logging

from peft_luca import ContinualTrainer, ContinualTrainingArguments, LucaConfig, TaskStream
from peft_luca.training.metrics import summarize


DIGITS = "digits"
DTYPES = ("float32", "float16", "bfloat16", "float64")
BUNDLED_BACKBONE = Path(__file__).parent / "assets" / "letters-vit"


@dataclass
class ExampleArguments:
    """What to learn, and on which backbone."""

    model: str = field(default=str(BUNDLED_BACKBONE), metadata={"help": "An image classifier: Hub id or folder."})
    dataset: str = field(default=DIGITS, metadata={"help": "Hub id, folder of images or of data files, or 'digits'."})
    image_column: str | None = field(default=None, metadata={"help": "Column of the images; found if there is one."})
    label_column: str = field(default="label", metadata={"help": "Column of the labels."})
    domain_column: str | None = field(
        default=None, metadata={"help": "Learn one domain after another, by this column, and not class after class."}
    )
    increment: int = field(default=2, metadata={"help": "Classes per task."})
    init_classes: int | None = field(default=None, metadata={"help": "Classes of the first task, if another number."})
    class_order_seed: int = field(default=1993, metadata={"help": "Seed of the class order."})
    test_size: float | None = field(default=None, metadata={"help": "Share held out, if there is no test split."})
    dtype: str = field(default="float32", metadata={"help": "Type of the backbone's weights.", "choices": DTYPES})
    luca_config: str = field(default="{}", metadata={"help": "Fields of LucaConfig, as JSON."})


def digits() -> Dataset:
    """Scikit-learn's 1,797 handwritten digits of 8 x 8 pixels."""
    data = load_digits()
    images = [fromarray((image * (255 / 16)).astype("uint8")) for image in data.images]
    features = Features({"image": Image(), "label": ClassLabel(names=[str(name) for name in data.target_names])})
    return Dataset.from_dict({"image": images, "label": data.target.tolist()}, features=features)


def make_stream(args: ExampleArguments) -> TaskStream:
    dataset = digits() if args.dataset == DIGITS else args.dataset
    columns = {"image_column": args.image_column, "label_column": args.label_column}
    if args.domain_column:
        return TaskStream.from_domains(dataset, domain_column=args.domain_column, **columns)
    return TaskStream.from_dataset(
        dataset,
        increment=args.increment,
        init_classes=args.init_classes,
        seed=args.class_order_seed,
        test_size=0.25 if args.dataset == DIGITS and args.test_size is None else args.test_size,
        **columns,
    )


def class_means(trainer: ContinualTrainer) -> dict:
    """SimpleCIL on the same features: the nearest class mean of the raw [CLS] vectors, by cosine."""
    tasks = [task for task in trainer.stream if task.test is not None]
    total, count = 0.0, 0.0
    matrix = torch.full((len(tasks), len(tasks)), torch.nan)
    for stage, task in enumerate(tasks):
        train = trainer.features(task, "train")
        one_hot = torch.nn.functional.one_hot(train.labels, len(trainer.stream.classes)).float()
        total, count = total + one_hot.T @ train.features.float(), count + one_hot.sum(0)
        means = torch.nn.functional.normalize(total / count.clamp(min=1)[:, None], dim=1)
        for i, seen in enumerate(tasks[: stage + 1]):
            test = trainer.features(seen, "test")
            cosines = (test.features.float() @ means.T).masked_fill(count == 0, -torch.inf)
            matrix[stage, i] = (cosines.argmax(1) == test.labels).float().mean()
    return summarize(matrix.numpy(), [len(task.test) for task in tasks])


def table(results: dict, baseline: dict) -> str:
    """What a person wants to see at the end."""
    lines = ["", "after task   classes   accuracy   class means"]
    classes: set[str] = set()
    stages = zip(results["tasks"], results["stage_accuracies"], baseline["stage_accuracies"], strict=True)
    for i, (task, routed, means) in enumerate(stages, start=1):
        classes |= set(task["classes"])
        lines.append(f"{i:10d} {len(classes):9d} {routed:10.3f} {means:13.3f}")
    lines += [
        "",
        f"                                 {'LuCA':>8} {'class means':>13}",
        f"average incremental accuracy Ā   {results['average_accuracy']:8.3f} {baseline['average_accuracy']:13.3f}",
        f"last accuracy A_B                {results['last_accuracy']:8.3f} {baseline['last_accuracy']:13.3f}",
        f"forgetting                       {results['forgetting']:8.3f} {baseline['forgetting']:13.3f}",
        f"accuracy with the task known     {results['task_known_accuracy']:8.3f}",
        f"forgetting with the task known   {results['task_known_forgetting']:8.3f}",
        f"right expert chosen              {results['routing_accuracy']:8.3f}",
    ]
    return "\n".join(lines)


def load_backbone(name: str, dtype: str) -> PreTrainedModel:
    """An image classifier, whose head the experts take the place of: that it is new is nothing to be told of."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, found = AutoModelForImageClassification.from_pretrained(
            name, dtype=getattr(torch, dtype), output_loading_info=True
        )
    finally:
        logging.set_verbosity(verbosity)
    lacking = sorted(key for key in found["missing_keys"] if not key.startswith("classifier."))
    if lacking:
        print(f"warning: {name} has no weights for {', '.join(lacking[:5])}, which are random now", file=sys.stderr)
    return model


def parse_arguments() -> tuple[ExampleArguments, ContinualTrainingArguments, LucaConfig]:
    """From the command line, or from a JSON file that it names."""
    usage = "cil.py [ARGUMENTS.json] [--ARGUMENT VALUE ...]   (cil.py --help lists them)"
    parser = HfArgumentParser((ExampleArguments, ContinualTrainingArguments), usage=usage)
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        try:
            example, args = parser.parse_dict(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
        except OSError as error:
            parser.error(f"{sys.argv[1]} cannot be read: {error.strerror}")
        except (ValueError, TypeError, AttributeError) as error:
            parser.error(f"{sys.argv[1]} does not hold arguments as one JSON object: {error}")
    else:
        try:
            example, args = parser.parse_args_into_dataclasses()
        except ValueError as error:
            parser.error(str(error))
    if example.dtype not in DTYPES:  # a file is not checked by the parser
        parser.error(f"dtype must be one of {', '.join(DTYPES)}, got {example.dtype!r}")
    try:
        config = LucaConfig(**json.loads(example.luca_config))
    except (ValueError, TypeError) as error:
        parser.error(
            f"--luca_config must hold fields of LucaConfig as one JSON object, got {example.luca_config}: {error}"
        )
    if Path(args.output_dir).name == "trainer_output":  # what Trainer takes when none is given
        args.output_dir = str(Path("out") / Path(example.dataset).name)
    return example, args, config


def main() -> None:
    example, args, config = parse_arguments()
    try:
        stream = make_stream(example)
        trainer = ContinualTrainer(
            model=load_backbone(example.model, example.dtype),
            args=args,
            stream=stream,
            luca_config=config,
            processing_class=AutoImageProcessor.from_pretrained(example.model),
        )
    except (ValueError, OSError) as error:  # what was asked for cannot be done: that is all there is to say
        sys.exit(f"cil.py: {error}")
    if trainer.is_world_process_zero():
        print(stream)
    trainer.train()
    trainer.save_model()
    baseline = class_means(trainer)
    if trainer.is_world_process_zero():
        print(table(trainer.results(), baseline))
        print(f"\nThe experts and results.json are in {args.output_dir}.")


if __name__ == "__main__":
    main()
