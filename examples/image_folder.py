"""
Images of your own, in folders of one class each, inside folders `train` and `test`. Without a path it writes such
folders first, from scikit-learn's digits.

    python examples/image_folder.py path/to/images
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from tempfile import mkdtemp

from helpers import learn, some_digits

from peft_luca import TaskStream


def write_folders(folder: Path) -> None:
    """folder/train/<class>/<number>.png, and every fourth image of a class in folder/test."""
    seen: Counter[int] = Counter()
    for row in some_digits(0, 1, 2, 3):
        label, split = row["label"], "train" if seen[row["label"]] % 4 else "test"
        (folder / split / str(label)).mkdir(parents=True, exist_ok=True)
        row["image"].save(folder / split / str(label) / f"{seen[label]}.png")
        seen[label] += 1


def main() -> None:
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
    else:
        folder = Path(mkdtemp())
        write_folders(folder)
    stream = TaskStream.from_dataset(folder, increment=2)
    print(stream)
    trainer = learn(stream)
    trainer.model.set_router("gaussian")
    print(f"accuracy {trainer.evaluate()['eval_last_accuracy']:.3f} over {', '.join(stream.classes)}")


if __name__ == "__main__":
    main()
