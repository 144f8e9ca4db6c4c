"""
A frozen vision transformer learns classes task by task: one LuCA expert per task, nothing stored, nothing forgotten.

Without arguments: scikit-learn's handwritten digits in 5 tasks of 2, on a small ViT that was pretrained on letters and
lies beside this file. No network is needed.

    accelerate launch examples/cil.py

With arguments: any image classifier and any dataset, from the Hub or from disk, as `peft-luca train` takes them.

    accelerate launch examples/cil.py --model google/vit-base-patch16-224-in21k --dataset cifar100 \
        --label_column fine_label --increment 10

Running it again in the same --output_dir resumes where it stopped. The arguments may also come from a JSON file:

    accelerate launch examples/cil.py arguments.json
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL.Image import fromarray
from sklearn.datasets import load_digits

from peft_luca import ContinualTrainer
from peft_luca.cli import StreamArguments, parse_stream, train
from peft_luca.training.metrics import summarize


DIGITS = "digits"
BUNDLED_BACKBONE = Path(__file__).parent / "assets" / "letters-vit"


@dataclass
class ExampleArguments(StreamArguments):
    """What to learn, and on which backbone."""

    model: str = field(default=str(BUNDLED_BACKBONE), metadata={"help": "An image classifier: Hub id or folder."})
    dataset: str = field(default=DIGITS, metadata={"help": "Hub id, folder of images or of data files, or 'digits'."})


def digits() -> Dataset:
    """Scikit-learn's 1,797 handwritten digits of 8 x 8 pixels."""
    data = load_digits()
    images = [fromarray((image * (255 / 16)).astype("uint8")) for image in data.images]
    features = Features({"image": Image(), "label": ClassLabel(names=[str(name) for name in data.target_names])})
    return Dataset.from_dict({"image": images, "label": data.target.tolist()}, features=features)


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


def draw(results: dict, folder: str) -> None:
    """Writes the picture of accuracy over the tasks, where matplotlib is installed."""
    with suppress(ImportError):
        from peft_luca.visualization import accuracy_over_stream

        file = Path(folder) / "plots" / "accuracy_over_stream.png"
        file.parent.mkdir(exist_ok=True)
        accuracy_over_stream(results).savefig(file)
        print(f"\nA picture of it is {file}.")


def parse_arguments():
    """The arguments of the command line. Of the digits a quarter is held out."""
    example, args, config = parse_stream(ExampleArguments, sys.argv[1:], "cil.py")
    if example.dataset == DIGITS and example.test_size is None:
        example.test_size = 0.25
    return example, args, config


def main() -> None:
    example, args, config = parse_arguments()
    try:
        trainer = train(example, args, config, digits() if example.dataset == DIGITS else None)
    except (ValueError, OSError) as error:  # what was asked for cannot be done: that is all there is to say
        sys.exit(f"cil.py: {error}")
    except KeyboardInterrupt:  # the trainer has said what is finished
        sys.exit(130)
    baseline = class_means(trainer)
    if trainer.is_world_process_zero():
        print(table(trainer.results(), baseline))
        draw(trainer.results(), args.output_dir)
        print(f"The experts and results.json are in {args.output_dir}. Next:")
        print(f"  peft-luca show {args.output_dir}")
        print(f"  peft-luca predict {args.output_dir} photo.png --top_k 3")


if __name__ == "__main__":
    main()
