"""
Write an image folder of letters that the bundled ViT never saw: Hebrew and Georgian, which `make_backbone.py` keeps
out of its training, drawn and distorted as there, from matplotlib's own fonts and whatever /usr/share/fonts has.

    python examples/benchmarks/letters.py letters
    python examples/benchmarks/strengths.py --dataset letters \\
        --output examples/benchmarks/results/strengths_letters.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image


sys.path.insert(0, str(Path(__file__).parent.parent / "assets"))
from make_backbone import HELD_OUT_ALPHABETS, augment, render


TRAIN, TEST = 300, 2  # images of a letter; `strengths.py` reads no test image, a stream needs some


def main(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    glyphs = render(HELD_OUT_ALPHABETS, 0)
    for k in glyphs.labels.unique().tolist():
        images = glyphs.images[glyphs.labels == k]
        drawn = torch.randint(len(images), (TRAIN + TEST,), generator=generator)
        pixels = augment(images[drawn], generator)
        low, high = pixels.amin((1, 2, 3), keepdim=True), pixels.amax((1, 2, 3), keepdim=True)
        grey = (255 * (pixels - low) / (high - low).clamp(min=1e-6)).round().byte()[:, 0]
        for i, image in enumerate(grey):
            place = folder / ("train" if i < TRAIN else "test") / f"letter-{k:02}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.numpy()).save(place / f"{i:02}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
