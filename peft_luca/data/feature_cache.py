"""[CLS] of images, once each, kept in Arrow files."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from ..preprocessing import ROW, ImageCollator, SourceGoneError, read_bytes, to_rgb, undecoded
from ..tuner.backbone import BackboneFacts
from .feature_file import STORAGE, PartialFeatures, is_finished, read_features


CACHE_FORMAT = 2
# What can change the numbers without any argument changing.
PACKAGES = ("torch", "torchvision", "transformers", "pillow", "datasets")


class FeatureDataset(Dataset[dict[str, Tensor]]):
    """
    [CLS] of images with their labels. Read from a cache, the features are a view of a memory-mapped file: they take no
    memory of their own, and cannot be written to.

    Args:
        features (`torch.Tensor` of shape `(images, d)`): [CLS] vectors.
        labels (`torch.Tensor` of shape `(images,)`): Class ids.
        views (`Sequence[torch.Tensor]`, *optional*):
            [CLS] of several augmented views of the same images, of the same shape. They take turns, one per epoch.

    Attributes:
        skipped (`list[int]`): Rows of the dataset that are left out since their image could not be read.
    """

    def __init__(self, features: Tensor, labels: Tensor, views: Sequence[Tensor] = ()) -> None:
        self.features = features
        self.labels = labels
        self.views = list(views)
        self.skipped: list[int] = []

    @classmethod
    def from_file(cls, path: Path, labels: Tensor) -> FeatureDataset:
        """What [`extract_features`] wrote, with the labels of all rows of the dataset, in its order."""
        features, rows = read_features(path)
        dataset = cls(features, labels if len(rows) == len(labels) else labels[rows])
        dataset.skipped = np.setdiff1d(np.arange(len(labels)), rows.numpy()).tolist()
        return dataset

    def set_epoch(self, epoch: int) -> None:
        """Take the next view, where there are several."""
        if self.views:
            self.features = self.views[epoch % len(self.views)]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"features": _widen(self.features[index]), "labels": self.labels[index]}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        # A whole batch at once: the loader's default, row by row and stacked again, costs more than the training step.
        rows = torch.tensor(indices, dtype=torch.long)
        return {"features": _widen(self.features.index_select(0, rows)), "labels": self.labels.index_select(0, rows)}

    @staticmethod
    def collate(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a loader's `collate_fn` has left to do: nothing."""
        return batch


def _widen(features: Tensor) -> Tensor:
    return features.float() if features.dtype in (torch.float16, torch.bfloat16) else features


def default_cache_dir() -> Path:
    """Where [CLS] is kept unless `features_cache_dir` says otherwise: a folder in the cache of `datasets`."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "peft_luca"


def features_key(backbone: BackboneFacts, collator: ImageCollator, images: str, dtype: str = "float32") -> str:
    """
    The name under which [CLS] of images is kept: a digest of everything that its numbers depend on, so that a file
    which is found is never stale. How many images pass at a time is not among it: that moves [CLS] by rounding only.

    Args:
        backbone ([`BackboneFacts`]): Its fingerprint, class and config.
        collator ([`ImageCollator`]): The image processor with its settings, the augmentation, its view and seed.
        images (`str`): [`digest_images`].
        dtype (`str`, *optional*, defaults to `"float32"`): How [CLS] is stored.
    """
    processor = collator.processing_class
    settings = processor.to_dict() if hasattr(processor, "to_dict") else None
    if settings is None or not type(processor).__module__.startswith("transformers."):
        # Code of one's own: a digest of all that pickles of it.
        settings = [settings, datasets.fingerprint.Hasher.hash(processor)]
    parts = {
        "format": CACHE_FORMAT,
        "packages": {name: _version(name) for name in PACKAGES},
        "backbone": [backbone.fingerprint, backbone.architecture],
        "processor": [f"{type(processor).__module__}.{type(processor).__qualname__}", settings],
        "augmentation": [collator.augmentation, collator.view, collator.seed if collator.augmentation else None],
        "images": images,
        "dtype": dtype,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:40]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def digest_images(dataset: Any, image_column: str) -> str:
    """
    SHA-256 over the bytes of a dataset's images in their order: of the files themselves where the dataset only holds
    paths. Labels, file names and times do not count: images are the same when their bytes are, and a file that was
    changed in place is another. Reads everything once.
    """
    digest = hashlib.sha256()
    images = undecoded(dataset.select_columns([image_column]), image_column)
    for rows in images.with_format("arrow").iter(batch_size=64):
        for image in rows[image_column].to_pylist():
            try:
                content = read_bytes(image)
            except SourceGoneError:
                raise
            except (OSError, ValueError):  # there is no such file, or cannot be
                digest.update(b"-1 ")
            else:
                digest.update(f"{len(content)} ".encode() + content)
    return digest.hexdigest()


def extract_features(
    read: Callable[[Tensor], Tensor],
    dataset: Any,
    collator: ImageCollator,
    batch_size: int,
    num_workers: int = 0,
    description: str = "Extracting features",
    disable_tqdm: bool = False,
    *,
    path: Path | None = None,
    dtype: str = "float32",
    on_bad_image: str = "raise",
    writes: bool = True,
    loader_options: Mapping[str, Any] | None = None,
) -> FeatureDataset:
    """
    One pass of the backbone over a dataset, into an Arrow file of the columns `features` and `row`. What is in the
    file already is not computed again; what another process is computing is waited for; what was interrupted goes on
    at the last batch that was written down. Batches begin at the same rows whatever the number of processes, which
    take them in turns.

    Args:
        read (function): pixel values `(batch, channels, height, width)` → [CLS] `(batch, d)`.
        dataset (`datasets.Dataset`): Rows of an image and, in the column `labels`, its label.
        collator ([`ImageCollator`]): Rows → `pixel_values`.
        batch_size (`int`): Images in a pass.
        num_workers (`int`, *optional*, defaults to `0`): Processes that decode and preprocess images.
        description (`str`, *optional*): What the progress bar says.
        disable_tqdm (`bool`, *optional*, defaults to `False`): No progress bar.
        path (`Path`, *optional*): The file. Without, [CLS] is kept in memory only.
        dtype (`str`, *optional*, defaults to `"float32"`): `"float32"`, `"float16"` or `"bfloat16"`, in the file.
        on_bad_image (`str`, *optional*, defaults to `"raise"`):
            What an image does that cannot be read: `"raise"` or `"skip"`.
        writes (`bool`, *optional*, defaults to `True`): Whether this process is one that writes the file.
        loader_options (`dict`, *optional*): More arguments of the `DataLoader`.

    Returns:
        [`FeatureDataset`]: [CLS] on the CPU, in the dataset's order, in the type of the file.

    Raises:
        ValueError: an image cannot be read: with its row and its file.
        OSError: the file cannot be written, or what the images are read from is not there any more.
    """
    if path is None:
        with tempfile.TemporaryDirectory() as folder:
            kept = extract_features(
                read, dataset, collator, batch_size, num_workers, description, disable_tqdm,
                path=Path(folder) / "features.arrow", dtype=dtype, on_bad_image=on_bad_image,
                loader_options=loader_options,
            )  # fmt: skip
            kept.features = kept.features.clone()
            return kept
    process, total = PartialState(), len(dataset)
    rank, processes = process.process_index, process.num_processes
    with ExitStack() as stack:
        partial = stack.enter_context(PartialFeatures.of(path, dtype)) if writes and not is_finished(path) else None
        done = min(gather_object([total if partial is None else partial.rows]))
        if done < total:
            done -= done % batch_size
        if partial is not None:
            partial.go_back_to(done)
        starts = range(done, total, batch_size)
        batches: list[Any] = [range(s, min(s + batch_size, total)) for s in starts[rank::processes]]
        loader: DataLoader[Any] = DataLoader(
            _EncodedImages(dataset, collator.image_column),
            batch_sampler=batches,
            collate_fn=_ReadableImages(collator),
            num_workers=num_workers,
            **(loader_options or {}),
        )
        own_batches = iter(loader)
        disable_tqdm = disable_tqdm or not process.is_main_process
        with tqdm(total=total, initial=done, desc=description, unit="img", leave=False, disable=disable_tqdm) as bar:
            for first in range(0, len(starts), processes):
                part: tuple[Any, list[int]] = (None, [])
                if first + rank < len(starts):
                    pixels, bad = next(own_batches)
                    if bad and on_bad_image == "raise":
                        raise ValueError(_cannot_read(*bad[0]))
                    vectors = None if pixels is None else read(pixels).to("cpu", STORAGE[dtype][2]).contiguous()
                    part = (vectors, [row for row, *_ in bad])
                parts = gather_object([part])
                for start, (vectors, bad_rows) in zip(starts[first : first + processes], parts, strict=False):
                    rows = min(batch_size, total - start)
                    if partial is not None:
                        partial.append(rows, vectors, bad_rows)
                    bar.update(rows)
        if partial is not None:
            partial.finish()
    process.wait_for_everyone()
    features = FeatureDataset.from_file(path, _labels(dataset))
    if features.skipped and on_bad_image == "raise":
        row, image = _EncodedImages(dataset, collator.image_column)[features.skipped[0]]
        raise ValueError(_cannot_read(row, image["path"], "an earlier run has skipped it"))
    return features


def _labels(dataset: Any) -> Tensor:
    return torch.tensor(dataset.select_columns(["labels"]).with_format("arrow")[:]["labels"].to_numpy())


def _cannot_read(row: int, file: str | None, reason: str) -> str:
    return (
        f"the image in row {row} ({file or 'kept in the dataset, without a file name'}) cannot be read: {reason}. "
        "Mend it or take it out, or leave such images out with on_bad_image='skip'."
    )


class _EncodedImages(Dataset[Any]):
    """Row numbers and images of a dataset as they lie there, not decoded yet."""

    def __init__(self, dataset: Any, image_column: str) -> None:
        self.images = undecoded(dataset.select_columns([image_column]), image_column).with_format(None)
        self.image_column = image_column

    def __getitem__(self, row: int) -> tuple[int, dict[str, Any]]:
        return row, self.images[row][self.image_column]

    def __getitems__(self, rows: range) -> list[tuple[int, dict[str, Any]]]:
        return list(zip(rows, self.images[rows][self.image_column], strict=True))


class _ReadableImages:
    """Encoded images → pixel values of those that can be read, and row, file and reason of those that cannot."""

    def __init__(self, collator: ImageCollator) -> None:
        self.collator = collator

    def __call__(
        self, rows: list[tuple[int, dict[str, Any]]]
    ) -> tuple[Tensor | None, list[tuple[int, str | None, str]]]:
        readable, bad = [], []
        for row, encoded in rows:
            try:
                image = to_rgb(encoded)
            except SourceGoneError:
                raise
            except Exception as error:  # whatever a decoder raises at a broken file
                bad.append((row, encoded["path"], repr(error)))
            else:
                readable.append({self.collator.image_column: image, ROW: row})
        return (self.collator(readable)["pixel_values"] if readable else None), bad
