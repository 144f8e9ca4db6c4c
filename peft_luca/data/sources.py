"""Datasets, folders, streaming datasets and Hub ids -> a train and a test `Dataset`."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import datasets
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, IterableDataset, IterableDatasetDict
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

from ..utils import list_names
from .labeled_images import has_labels


SingleDataset: TypeAlias = Dataset | DatasetDict | IterableDataset | IterableDatasetDict | str | Path
DatasetLike: TypeAlias = SingleDataset | tuple[Dataset, Dataset | None]

# Names of folders that are splits rather than classes, as in `datasets`.
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= {"validation": "validation", "valid": "validation", "val": "validation", "dev": "validation"}


def load_splits(
    dataset: DatasetLike, train_split: str = "train", test_split: str | None = None, label_column: str = "label"
) -> tuple[Dataset, Dataset | None]:
    """Returns the train and the test images of anything that a [`TaskStream`] accepts."""
    if isinstance(dataset, str | Path):
        place = Path(dataset).expanduser()
        dataset = read_image_folder(place) or datasets.load_dataset(str(place if place.exists() else dataset))
    if isinstance(dataset, DatasetDict | IterableDatasetDict):
        if test_split is None:
            found = [n for n, split in SPLITS.items() if split != "train" and n in dataset and n != train_split]
            test_split = next((name for name in found if has_labels(dataset[name], label_column)), None)
            if found and test_split != found[0]:
                used = f"{test_split!r} is tested on" if test_split else "no images are tested on; set test_size"
                warnings.warn(f"the split {found[0]!r} has no labels in {label_column!r}: {used}.", stacklevel=4)
        if missing := {train_split, test_split} - {None, *dataset}:
            raise ValueError(f"the dataset has no split {missing.pop()!r}; it has {list(dataset)}")
        train, test = dataset[train_split], None if test_split is None else dataset[test_split]
    elif test_split is not None:
        raise ValueError(f"test_split={test_split!r} needs a DatasetDict, found a {type(dataset).__name__}")
    else:
        train, test = dataset if isinstance(dataset, tuple) else (dataset, None)
    return _load(train), None if test is None else _load(test)


def _load(dataset: Any) -> Dataset:
    if isinstance(dataset, IterableDataset):
        dataset = _read_streaming(dataset)
    if not isinstance(dataset, Dataset):
        needed = "a datasets.Dataset, a DatasetDict, a pair (train, test), or what datasets.load_dataset reads"
        raise TypeError(f"found a {type(dataset).__name__}; needed {needed}")
    if dataset.format["type"] == "custom":
        raise ValueError("the dataset has a transform, which would be lost; call reset_format() on it first")
    for name, feature in dataset.features.items():
        if isinstance(feature, dict) and feature.keys() == {"bytes", "path"}:  # images in a table of pandas
            dataset = dataset.cast_column(name, Image())
    return dataset


def _read_streaming(dataset: IterableDataset) -> Dataset:
    """Reads a streaming dataset once, into a temporary file that is removed when the process ends."""
    dataset, features = dataset.with_format(None), dataset.features
    for name, feature in (features or {}).items():
        if isinstance(feature, Image):  # keeps the encoded bytes: encoding a decoded image again changes it
            dataset = dataset.cast_column(name, Image(decode=False))
    folder = tempfile.mkdtemp(prefix="peft_luca_stream_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    encoded = Dataset.from_generator(dataset.__iter__, features=dataset.features, cache_dir=folder)
    return encoded if features is None else encoded.cast(features)


def read_image_folder(root: Path) -> DatasetDict | None:
    """
    Reads a folder of images, with a folder for each class, in `train` and `test` (or `validation`) or directly.
    Returns `None` if it is not such a folder: then `datasets.load_dataset` has to read it.

    The class of an image is the name of its folder. Other files and hidden files are ignored, which `load_dataset`
    would count to guess the type of the data. It would also take a class called `test` for a split.
    """
    root = root.absolute()
    files = sorted(_files(root)) if root.is_dir() else []
    images = [file for file in files if file.suffix.lower() in ImageFolder.EXTENSIONS]
    # Some folders describe their images themselves: in metadata, tables, or the card of a dataset.
    described = any(file.stem == "metadata" or file.suffix in (".parquet", ".arrow") for file in files)
    if (card := root / "README.md").is_file():
        described |= "\nconfigs:" in card.read_text(encoding="utf-8", errors="replace")
    if not images or described:
        return None
    features = Features({"image": Image(), "label": ClassLabel(names=sorted({image.parent.name for image in images}))})
    splits = DatasetDict()
    for split, found in _group_by_split(root, images).items():
        columns = {"image": [str(image) for image in found], "label": [image.parent.name for image in found]}
        splits[split] = Dataset.from_dict(columns, features)
    return splits


def image_files(root: Path) -> list[Path]:
    """Returns the images below a folder except hidden ones, sorted."""
    return sorted(file for file in _files(root) if file.suffix.lower() in ImageFolder.EXTENSIONS)


def _files(root: Path) -> Iterator[Path]:
    """Yields the files below a folder except hidden ones. Links to folders are followed, but each folder only once."""
    seen: set[str] = set()
    for folder, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        folders[:] = [] if real in seen else [name for name in folders if not name.startswith(".")]
        if real not in seen:
            yield from (Path(folder) / name for name in files if not name.startswith("."))
        seen.add(real)


def _group_by_split(root: Path, images: list[Path]) -> dict[str, list[Path]]:
    """Returns the images of each split. Without folders of splits, all images are for training."""
    parts = {image: image.relative_to(root).parts for image in images}
    tops = {path[0] for path in parts.values()}
    # A folder that holds images itself is a class, whatever its name.
    classes = {path[0] for path in parts.values() if len(path) <= 2}
    splits = {top: SPLITS[top.lower()] for top in sorted(tops - classes) if top.lower() in SPLITS}
    groups = {split: [image for image in images if parts[image][0] == top] for top, split in splits.items()}
    below = [{SPLITS[part.lower()] for part in path[:-2] if part.lower() in SPLITS} for path in parts.values()]
    problem = None
    if others := splits and sorted(tops - set(splits)):
        problem = f"beside the splits {list_names(splits)} there is {list_names(others)}"
    elif len(groups) < len(splits):
        problem = f"the folders {list_names(splits)} name a split twice"
    elif not splits and all(top.lower() in SPLITS for top in tops):
        problem = f"{list_names(sorted(tops))} may be splits or classes (classes can go into a folder 'train')"
    elif not splits and (len(set.union(*below)) > 1 or all(below)):
        problem = f"splits are further down, as in {next(i for i, found in zip(images, below, strict=True) if found)}"
    groups = groups or {"train": images}
    for found in groups.values():
        depths = [len(parts[image]) for image in found]
        if problem is None and (min(depths) == 1 or len(set(depths)) > 1):
            odd = found[depths.index(min(set(depths), key=depths.count))]
            problem = f"{odd} is not in the folder of a class as deep as the others"
    if problem is not None:
        needed = "a folder of images for each class, in the folders 'train' and 'test' or directly"
        raise ValueError(f"the classes of the images in {root} are not clear: {problem}. Needed: {needed}")
    return groups
