"""
The same classes in one domain after another: digits in white on black, then in black on white, then turned on their
side. Each domain gets an expert, and no image comes with its domain.

    python examples/domains.py
"""

from __future__ import annotations

from datasets import concatenate_datasets
from helpers import learn, some_digits
from PIL import Image, ImageOps

from peft_luca import TaskStream


DOMAINS = {
    "upright": lambda image: image,
    "negative": ImageOps.invert,
    "turned": lambda image: image.transpose(Image.Transpose.ROTATE_90),
}


def main() -> None:
    plain, parts = some_digits(0, 1, 7), []
    for name, change in DOMAINS.items():
        changed = plain.map(lambda row, change=change: {"image": change(row["image"])}, keep_in_memory=True)
        parts.append(changed.add_column("domain", [name] * len(changed)))
    images = concatenate_datasets(parts).train_test_split(0.25, seed=0)

    stream = TaskStream.from_domains(images, domain_column="domain", domain_order=list(DOMAINS))
    print(stream)
    results = learn(stream).results()
    print(f"accuracy over all domains {results['last_accuracy']:.3f}")
    print(f"with the domain known {results['task_known_accuracy']:.3f}")


if __name__ == "__main__":
    main()
