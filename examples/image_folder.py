"""
Images of your own, in a folder for each class inside the folders `train` and `test`. Without a path it first writes
such folders from scikit-learn's digits.

    python examples/image_folder.py path/to/images
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import mkdtemp

from helpers import learn, some_digits

from peft_luca import TaskStream


def write_folders(folder: Path) -> Path:
    """folder/train/<class>/<number>.png, and every fourth image in folder/test."""
    for i, row in enumerate(some_digits(0, 1, 2, 3)):
        place = folder / ("train" if i % 4 else "test") / str(row["label"])
        place.mkdir(parents=True, exist_ok=True)
        row["image"].save(place / f"{i}.png")
    return folder


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else write_folders(Path(mkdtemp()))
    stream = TaskStream.from_dataset(folder, increment=2)
    print(stream)
    trainer = learn(stream)
    trainer.model.set_router("gaussian")
    print(f"accuracy {trainer.evaluate()['eval_last_accuracy']:.3f} over {', '.join(stream.classes)}")


if __name__ == "__main__":
    main()
