"""Datasets, folders, streaming datasets and Hub ids -> a train and a test `Dataset`."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    Image,
    IterableDataset,
    IterableDatasetDict,
    load_dataset,
)
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

from ..utils import list_names


SingleDataset: TypeAlias = Dataset | DatasetDict | IterableDataset | IterableDatasetDict | str | Path
DatasetLike: TypeAlias = SingleDataset | tuple[Dataset, Dataset | None]

IMAGE_SUFFIXES = frozenset(ImageFolder.EXTENSIONS)
# Names of folders that are splits rather than classes, as in `datasets`.
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= {"validation": "validation", "valid": "validation", "val": "validation", "dev": "validation"}
# A folder with one of these files describes its labels itself: `datasets` reads it.
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet", "dataset_dict.json", "dataset_info.json")
TABLES = (".parquet", ".arrow")


def load_splits(
    dataset: DatasetLike, train_split: str = "train", test_split: str | None = None
) -> tuple[Dataset, Dataset | None]:
    """Returns the train and the test images of anything that a [`TaskStream`] accepts."""
    if isinstance(dataset, str | Path):
        dataset = read_image_folder(Path(dataset)) or load_dataset(str(dataset))
    if isinstance(dataset, DatasetDict | IterableDatasetDict):
        if test_split is None:
            names = [name for name, split in SPLITS.items() if split != "train"]
            test_split = next((name for name in names if name in dataset and name != train_split), None)
        for split in (train_split, test_split):
            if split is not None and split not in dataset:
                raise ValueError(f"the dataset has no split {split!r}; it has {list(dataset)}")
        train, test = dataset[train_split], None if test_split is None else dataset[test_split]
    elif test_split is not None:
        raise ValueError(f"test_split={test_split!r} needs a DatasetDict, found a {type(dataset).__name__}")
    elif isinstance(dataset, tuple) and len(dataset) == 2:
        train, test = dataset
    else:
        train, test = dataset, None
    return _load(train), None if test is None else _load(test)


def _load(dataset: Any) -> Dataset:
    if isinstance(dataset, IterableDataset):
        dataset = _read_streaming(dataset)
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"found a {type(dataset).__name__}; needed a datasets.Dataset, a DatasetDict, a pair (train, test), or "
            "what datasets.load_dataset reads"
        )
    if dataset.format["type"] == "custom":
        raise ValueError(
            "the dataset has a transform (set_transform or with_transform), which would be lost; call reset_format() "
            "on it and leave transforming the images to the trainer"
        )
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
    read, ended = 0, False

    def rows() -> Iterator[Any]:
        nonlocal read, ended
        for row in dataset:
            yield row
            read += 1
        ended = True

    folder = tempfile.mkdtemp(prefix="peft_luca_stream_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        encoded = Dataset.from_generator(rows, features=dataset.features, cache_dir=folder)
        return encoded if features is None else encoded.cast(features)
    except Exception as error:
        if ended and not read:  # `datasets` cannot write a file without rows
            return Dataset.from_dict({name: [] for name in features or ()}, features=features)
        cause = error.__cause__ or error
        raise ValueError(
            f"the streaming dataset failed after {read} rows: {cause!r}. None of them is used: repair its source, and "
            "make the stream again"
        ) from cause


def read_image_folder(root: Path) -> DatasetDict | None:
    """
    Reads a folder of images, with a folder for each class, in `train` and `test` (or `validation`) or directly.
    Returns `None` if it is not such a folder: then `datasets.load_dataset` has to read it.

    The class of an image is the name of its folder. Other files and hidden files are ignored. `load_dataset` would
    count them to guess the type of the data, and would put the images of a class called `test` into the test split.
    """
    root = root.absolute()
    files = sorted(_files(root)) if root.is_dir() else []
    images = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
    described = any(file.name in METADATA or file.suffix in TABLES for file in files)
    if not images or described or _has_configs(root / "README.md"):
        return None
    groups = _group_by_split(root, images)
    for base, found in groups.values():
        _check_depths(base, found)
    names = sorted({image.parent.name for image in images})
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    columns = {
        split: {"image": [str(image) for image in found], "label": [image.parent.name for image in found]}
        for split, (_, found) in groups.items()
    }
    return DatasetDict({split: Dataset.from_dict(columns[split], features) for split in columns})


def _files(root: Path) -> Iterator[Path]:
    """Yields the files below a folder except hidden ones. Links to folders are followed, but each folder only once."""
    seen: set[str] = set()
    for folder, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        folders[:] = [] if real in seen else [name for name in folders if not name.startswith(".")]
        if real not in seen:
            yield from (Path(folder) / name for name in files if not name.startswith("."))
        seen.add(real)


def _has_configs(card: Path) -> bool:
    """Whether the card of a dataset says where its files are."""
    if not card.is_file():
        return False
    _, *front_matter = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    return any(line.startswith("configs:") for line in "".join(front_matter[:1]).splitlines())


def _group_by_split(root: Path, images: list[Path]) -> dict[str, tuple[Path, list[Path]]]:
    """Returns the folder and the images of each split. Without folders of splits, all images are for training."""
    parts = {image: image.relative_to(root).parts for image in images}
    tops = {path[0] for path in parts.values()}
    without_classes = {path[0] for path in parts.values() if len(path) <= 2}
    split_folders = sorted(top for top in tops - without_classes if top.lower() in SPLITS)
    if split_folders:
        if others := sorted(tops - set(split_folders)):
            beside = f"images in {list_names(others)}, beside its splits {list_names(split_folders)}"
            raise ValueError(f"{root} has {beside}; move them into the folder of a class in a split, or away")
        splits = [SPLITS[top.lower()] for top in split_folders]
        if len(set(splits)) < len(splits):
            raise ValueError(f"{root} has the folders {list_names(split_folders)}, which name a split twice; keep one")
        groups = zip(splits, split_folders, strict=True)
        return {split: (root / top, [i for i in images if parts[i][0] == top]) for split, top in groups}
    if all(top.lower() in SPLITS for top in tops):
        raise ValueError(
            f"the images in {root} are in {list_names(sorted(tops))}, which may be splits or classes: put a folder "
            "for each class into them or, if they are classes, put them into a folder 'train'"
        )
    # Folders of splits above the folders of classes: reading them as one set would mix the splits.
    inner = [{SPLITS[part.lower()] for part in path[:-2] if part.lower() in SPLITS} for path in parts.values()]
    splits_below = set.union(*inner)
    if len(splits_below) > 1 or all(inner):
        example = next(image for image, found in zip(images, inner, strict=True) if found)
        raise ValueError(
            f"{root} has its splits {list_names(sorted(splits_below))} further down, as in {example}: pass the folder "
            "they are in"
        )
    return {"train": (root, images)}


def _check_depths(base: Path, images: list[Path]) -> None:
    """Checks that all images of a split are equally deep, and in the folder of a class."""
    depths = [len(image.relative_to(base).parts) for image in images]
    if min(depths) == 1 or len(set(depths)) > 1:
        odd = images[depths.index(min(set(depths), key=depths.count))]
        raise ValueError(
            f"{odd} is not in a folder of a class as deep as the other images of {base}, so its class is not clear; "
            "move it into the folder of its class, or away"
        )
