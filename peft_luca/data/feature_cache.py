"""Features ([CLS] vectors) are computed once per image, and cached in files."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from PIL import Image, ImageFile
from PIL import features as codecs
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from ..preprocessing import MissingSourceError, read_bytes, undecoded
from ..tuner.backbone import BackboneFacts
from .collator import ROW, ImageCollator
from .feature_file import STORAGE, PartialFeatures, read_features


CACHE_FORMAT = 5
PACKAGES = ("torch", "torchvision", "transformers", "numpy", "pillow", "datasets")  # versions


class FeatureDataset(Dataset[dict[str, Tensor]]):
    """
    Features ([CLS] vectors) of images, with labels. From a cache they are a read-only view of a memory-mapped file,
    and take no memory.

    Args:
        features (`torch.Tensor` of shape `(images, d)`): [CLS] vectors.
        labels (`torch.Tensor` of shape `(images,)`): Class ids.
        views (`Sequence[torch.Tensor]`, *optional*): Features of augmented views. Each epoch uses the next one.
    """

    def __init__(self, features: Tensor, labels: Tensor, views: Sequence[Tensor] = ()) -> None:
        self.features = features
        self.labels = labels
        self.views = list(views)
        self.skipped: list[int] = []  # rows of the dataset that are missing, because their image cannot be read

    @classmethod
    def from_file(cls, path: Path, labels: Tensor) -> FeatureDataset:
        """Reads a feature file. `labels` are those of all rows of the dataset, including the skipped ones."""
        features, rows = read_features(path)
        dataset = cls(features, labels if len(rows) == len(labels) else labels[rows])
        dataset.skipped = np.setdiff1d(np.arange(len(labels)), rows.numpy()).tolist()
        return dataset

    def set_epoch(self, epoch: int) -> None:
        """Selects the view of this epoch, if there are views."""
        if self.views:
            self.features = self.views[epoch % len(self.views)]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"features": self.features[index].float(), "labels": self.labels[index]}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        # Gathers a whole batch at once: collecting single rows would take longer than the training step.
        rows = torch.tensor(indices, dtype=torch.long)
        return {"features": self.features.index_select(0, rows).float(), "labels": self.labels.index_select(0, rows)}

    @staticmethod
    def collate(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The `collate_fn` of a loader. [`~FeatureDataset.__getitems__`] returns a batch already."""
        return batch


def default_cache_dir() -> Path:
    """Returns the default folder of feature files, in the cache of `datasets`."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "peft_luca"


def features_key(backbone: BackboneFacts, collator: ImageCollator, images: str, dtype: str = "float32") -> str:
    """
    Returns the name of a feature file: a digest of everything that its numbers depend on. `images` is the digest from
    [`digest_images`], `dtype` the storage type. The batch size is left out, because it changes only the rounding.
    """
    processor = collator.processing_class
    settings = processor.to_dict() if hasattr(processor, "to_dict") else None
    if not type(processor).__module__.startswith("transformers."):
        # A processor of the user's own: its code counts too.
        settings = [settings, datasets.fingerprint.Hasher.hash(processor)]
    Image.init()  # loads the readers of all file formats
    parts = {
        "format": CACHE_FORMAT,
        "packages": {name: next((d.version for d in distributions(name=name)), None) for name in PACKAGES},
        "backbone": [backbone.fingerprint, backbone.architecture],
        "processor": [f"{type(processor).__module__}.{type(processor).__qualname__}", settings],
        "reading": [collator.channels, collator.background, collator.white_level],
        # These decide which images can be read, and by which version of a decoder.
        "limits": [Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, sorted(Image.OPEN)],
        "decoders": {name: codecs.version(name) for name in codecs.get_supported()},
        "augmentation": [collator.augmentation, collator.view, collator.seed if collator.augmentation else None],
        "images": images,
        "dtype": dtype,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:40]


def digest_images(dataset: Any, image_column: str) -> str:
    """Returns a SHA-256 of the bytes of all images in order. Labels, file names and times do not count."""
    digest = hashlib.sha256()
    images = undecoded(dataset.select_columns([image_column]), image_column)
    for rows in images.with_format("arrow").iter(batch_size=64):
        for image in rows[image_column].to_pylist():
            try:
                content = read_bytes(image)
            except MissingSourceError:
                raise
            except (OSError, ValueError):  # the file is missing, or its path is not valid
                digest.update(b"-1 ")
            else:
                digest.update(f"{len(content)} ".encode() + content)
    return digest.hexdigest()


@dataclass
class FeatureExtractor:
    """
    Computes features of datasets, with one backbone pass per image, and continues at the last checkpoint. It waits for
    a file that another process computes. With several processes each computes every n-th batch.
    """

    pooled_features: Callable[[Tensor], Tensor]  # pixel values (batch, channels, height, width) -> (batch, d)
    collator: ImageCollator
    batch_size: int
    num_workers: int = 0
    dtype: str = "float32"  # storage type, a key of STORAGE
    on_bad_image: str = "raise"  # or "skip": leave out images that cannot be read
    writes: bool = True  # whether this process writes the file
    disable_tqdm: bool = False
    loader_options: Mapping[str, Any] = field(default_factory=dict)  # more arguments of the DataLoader

    def __call__(self, dataset: Any, path: Path | None = None, description: str = "Features") -> FeatureDataset:
        """
        Returns the features of a dataset of images and `labels`, on the CPU: from the file at `path` if it is
        finished, else computed and written to it. Without a path they are kept in memory.
        """
        if path is None:
            with tempfile.TemporaryDirectory() as folder:
                features = self(dataset, Path(folder) / "features.safetensors", description)
                features.features = features.features.clone()
                return features
        process, total = PartialState(), len(dataset)
        images = _ReadableImages(dataset, self.collator)
        needed = self.writes and not PartialFeatures.is_finished(path)
        with PartialFeatures.open(path, self.dtype) if needed else nullcontext() as partial:
            done = min(gather_object([total if partial is None else partial.rows]))
            done -= done % self.batch_size if done < total else 0
            if partial is not None:
                partial.truncate(done)
            hidden = self.disable_tqdm or not process.is_main_process
            with tqdm(desc=description, initial=done, total=total, unit="img", leave=False, disable=hidden) as bar:
                for rows, vectors, bad_rows in self._batches(images, range(done, total, self.batch_size)):
                    if partial is not None:
                        partial.append(rows, vectors, bad_rows)
                    bar.update(rows)
            if partial is not None:
                partial.finish()
        process.wait_for_everyone()
        labels = dataset.select_columns(["labels"]).with_format("arrow")[:]["labels"].to_numpy()
        features = FeatureDataset.from_file(path, torch.tensor(labels))
        for row in features.skipped[:1]:
            file = images.images[row][self.collator.image_column]["path"]
            self._report([(row, file, "an earlier run skipped it")])
        return features

    def _batches(self, images: _ReadableImages, starts: range) -> Iterator[tuple[int, Tensor | None, list[int]]]:
        """Yields the number of rows, features and bad rows of all batches, on every process."""
        rank, processes = PartialState().process_index, PartialState().num_processes
        batches: list[Any] = [range(start, min(start + self.batch_size, starts.stop)) for start in starts]
        options: dict[str, Any] = {"collate_fn": FeatureDataset.collate, "num_workers": self.num_workers}
        own = iter(DataLoader(images, batch_sampler=batches[rank::processes], **options, **self.loader_options))
        for i in range(0, len(batches), processes):
            vectors, bad_rows = None, []
            if i + rank < len(batches):
                pixels, bad = next(own)
                self._report(bad)
                bad_rows = [row for row, *_ in bad]
                if pixels is not None:
                    vectors = self.pooled_features(pixels).to("cpu", STORAGE[self.dtype]).contiguous()
                    if not vectors.isfinite().all():
                        found = f"[CLS] of an image in rows {batches[i + rank][0]} to {batches[i + rank][-1]}"
                        remedy = "Use features_dtype='float32', and a backbone in float32 if it has that already"
                        raise FloatingPointError(f"{found} is not finite, or too large for {self.dtype}. {remedy}.")
            parts = gather_object([(vectors, bad_rows)])
            for batch, part in zip(batches[i : i + processes], parts, strict=False):
                yield len(batch), *part

    def _report(self, bad: list[tuple[int, str | None, str]]) -> None:
        if bad and self.on_bad_image == "raise":
            row, file, reason = bad[0]
            image = f"the image in row {row} ({file or 'without a file name'})"
            raise ValueError(f"{image} cannot be read: {reason}. Repair or remove it, or use on_bad_image='skip'.")


class _ReadableImages(Dataset[Any]):
    """Row numbers -> pixel values of the images that can be read; row, file and reason of those that cannot."""

    def __init__(self, dataset: Any, collator: ImageCollator) -> None:
        images = dataset.select_columns([collator.image_column]).with_format(None)
        self.images, self.collator = undecoded(images, collator.image_column), collator

    def __getitems__(self, rows: range) -> tuple[Tensor | None, list[tuple[int, str | None, str]]]:
        column = self.collator.image_column
        readable, bad = [], []
        for row, encoded in zip(rows, self.images[rows][column], strict=True):
            try:
                image = self.collator.read(encoded)
            except (MissingSourceError, MemoryError):  # not the fault of the image
                raise
            except Exception as error:  # decoders raise many kinds of errors for a broken file
                bad.append((row, encoded["path"], repr(error)))
            else:
                readable.append({column: image, ROW: row})
        return (self.collator(readable)["pixel_values"] if readable else None), bad
