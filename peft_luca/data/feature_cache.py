"""Features ([CLS] vectors): computed once per image, and cached in files, whose writing can be interrupted."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import IO, Any

import datasets
import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from filelock import FileLock
from PIL import Image, ImageFile
from PIL import features as codecs
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers.utils import logging

from ..preprocessing import MissingSourceError, read_bytes, undecoded
from ..tuner.backbone import BackboneFacts
from ..utils import atomic_write, explain_write_errors, write_json
from .collator import ROW, ImageCollator


logger = logging.get_logger(__name__)

CACHE_FORMAT = 5
PACKAGES = ("torch", "torchvision", "transformers", "numpy", "pillow", "datasets")  # versions
STORAGE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SLOW = 60.0  # seconds: shorter runs are not warned about
CHECKPOINT_SECONDS = 10.0  # time between two checkpoints of a partial file


class FeatureDataset(Dataset[dict[str, Tensor]]):
    """
    Features of images, with labels. From a cache they are a read-only view of a memory-mapped file.

    Args:
        features (`torch.Tensor` of shape `(images, d)`): [CLS] vectors.
        labels (`torch.Tensor` of shape `(images,)`): Class ids.
        views (`Sequence[torch.Tensor]`, *optional*): Features of augmented views. Each epoch uses the next one.
    """

    def __init__(self, features: Tensor, labels: Tensor, views: Sequence[Tensor] = ()) -> None:
        self.features, self.labels, self.views = features, labels, list(views)
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


def read_features(path: Path, check: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the features (images, d) and row numbers (images,) of a file, as views of its memory map."""
    with safe_open(path, "pt") as file:
        features, rows = file.get_tensor("features"), file.get_tensor("rows")
        if check and (file.metadata() or {}).get("digest") != _digest(path, features, rows):
            raise ValueError("its digest differs")
        return features, rows


def _digest(path: Path, features: Tensor, rows: Tensor) -> str:
    digest = hashlib.sha256(f"{path.stem} {features.dtype} {tuple(features.shape)}".encode())
    for tensor in (features, rows):
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def is_whole(path: Path) -> bool:
    """Whether there is a feature file, as it was written. A spoilt one is warned about."""
    if not path.is_file():
        return False
    try:
        read_features(path, check=True)
    except Exception as error:  # of many kinds, for a broken file
        warnings.warn(f"{path} is spoilt, and its features are computed again: {error!r}.", stacklevel=2)
        return False
    return True


class PartialFeatures:
    """
    A feature file in the making. One process at a time holds it, and checkpoints it every few seconds: the features in
    `.partial`, the number of rows done and the bad rows (whose image cannot be read) in `.partial.json`.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self.dtype = path, STORAGE[dtype]
        self.data_path, self.state_path = path.with_suffix(".partial"), path.with_suffix(".partial.json")
        self.rows, self.width, self.bad = 0, 0, []
        with suppress(OSError, ValueError, KeyError, TypeError):  # without a sound checkpoint it starts again
            state = json.loads(self.state_path.read_text(encoding="utf-8"))
            size = (state["rows"] - len(state["bad"])) * state["width"] * self.dtype.itemsize
            if 0 <= size <= self.data_path.stat().st_size:
                self.rows, self.width, self.bad = state["rows"], state["width"], state["bad"]
        self.file: IO[bytes] = open(self.data_path, "r+b" if self.rows else "wb", buffering=0)
        self._last_checkpoint = time.monotonic()

    @classmethod
    @contextmanager
    def open(cls, path: Path, dtype: str) -> Iterator[PartialFeatures | None]:
        """Opens a partial feature file, once no other process holds it. Yields `None` if another has finished it."""
        with explain_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            held = FileLock(path.with_suffix(".lock")).acquire()
        with held:
            if is_whole(path):
                cls._clean_up(path)
                yield None
            else:
                partial = cls(path, dtype)
                with partial.file:
                    yield partial

    def truncate(self, rows: int) -> None:
        """Drops everything after the first `rows` rows."""
        self.rows, self.bad = rows, [row for row in self.bad if row < rows]
        self.file.truncate((rows - len(self.bad)) * self.width * self.dtype.itemsize)
        self.file.seek(0, os.SEEK_END)

    def append(self, rows: int, features: Tensor | None, bad: list[int]) -> None:
        """Adds the next `rows` rows: the features (readable rows, d), if any, and the numbers of the bad rows."""
        with explain_write_errors(self.path):
            if features is not None:
                self.width = features.shape[1]
                content = features.view(torch.uint8).numpy().data.cast("B")
                while content:  # on a disk that is nearly full a write stores only a part, and the next one fails
                    content = content[self.file.write(content) :]
            self.rows += rows
            self.bad += bad
            if time.monotonic() - self._last_checkpoint > CHECKPOINT_SECONDS:
                os.fsync(self.file.fileno())
                write_json(self.state_path, {"rows": self.rows, "width": self.width, "bad": self.bad})
                self._last_checkpoint = time.monotonic()

    def finish(self) -> None:
        """Writes the file."""
        rows = torch.from_numpy(np.setdiff1d(np.arange(self.rows), self.bad))
        if not len(rows):
            raise ValueError(f"none of the {self.rows} images can be read. Check where they are stored.")
        # A memory map, so that features of any size can be written.
        features = torch.from_file(str(self.data_path), size=len(rows) * self.width, dtype=self.dtype)
        tensors = {"features": features.view(len(rows), self.width), "rows": rows}
        with explain_write_errors(self.path), atomic_write(self.path) as temporary:
            save_file(tensors, temporary, {"digest": _digest(self.path, *tensors.values())})
        self._clean_up(self.path)

    @staticmethod
    def _clean_up(path: Path) -> None:
        """Removes the partial files. The lock goes last: it shows that there is something to clean up."""
        for suffix in (".partial", ".partial.json", ".lock"):
            path.with_suffix(suffix).unlink(missing_ok=True)


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
        # A lock that is left shows that there is something to clean up.
        needed = self.writes and (path.with_suffix(".lock").exists() or not is_whole(path))
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
        waited, began = 0.0, time.monotonic()
        for i in range(0, len(batches), processes):
            vectors, bad_rows = None, []
            if i + rank < len(batches):
                asked = time.monotonic()
                pixels, bad = next(own)
                waited += time.monotonic() - asked
                self._report(bad)
                bad_rows = [row for row, *_ in bad]
                if pixels is not None:
                    vectors = self.pooled_features(pixels).to("cpu", STORAGE[self.dtype]).contiguous()
                if vectors is not None and not vectors.isfinite().all():
                    found = f"[CLS] of an image in rows {batches[i + rank][0]} to {batches[i + rank][-1]}"
                    remedy = "Use features_dtype='float32', and a backbone in float32 if it has that already"
                    raise FloatingPointError(f"{found} is not finite, or too large for {self.dtype}. {remedy}.")
            parts = gather_object([(vectors, bad_rows)])
            for batch, part in zip(batches[i : i + processes], parts, strict=False):
                yield len(batch), *part
        share = waited / max(time.monotonic() - began, SLOW)
        if share > 0.5 and rank == 0:
            remedy = "set dataloader_num_workers higher, up to the number of cores, or store smaller images"
            logger.warning_once(f"Reading the images took {share:.0%} of the time for [CLS]: {remedy}.")

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
