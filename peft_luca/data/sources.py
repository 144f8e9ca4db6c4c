"""What a user hands to a stream (datasets, folders, streams of rows, Hub ids) → a train and a test `Dataset`."""

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


DatasetLike: TypeAlias = (
    Dataset | DatasetDict | IterableDataset | IterableDatasetDict | tuple[Dataset, Dataset | None] | str | Path
)

IMAGE_SUFFIXES = frozenset(ImageFolder.EXTENSIONS)
# Folders that are splits and not classes, as `datasets` knows them, where their images lie in folders of their own.
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= {"validation": "validation", "valid": "validation", "val": "validation", "dev": "validation"}
# A folder that has one of these says itself what its labels are: `datasets` reads it.
DESCRIBED = ("metadata.csv", "metadata.jsonl", "metadata.parquet", "dataset_dict.json", "dataset_info.json")
TABLES = (".parquet", ".arrow")


def splits_of(
    dataset: DatasetLike, train_split: str = "train", test_split: str | None = None
) -> tuple[Dataset, Dataset | None]:
    """The train and the test images of a data set, read where they are not `datasets` yet."""
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
    train, test = _on_disk(train), _on_disk(test)
    for part in (train,) if test is None else (train, test):
        if not isinstance(part, Dataset):
            raise TypeError(
                f"found a {type(part).__name__}; needed a datasets.Dataset, a DatasetDict, a pair (train, test), or "
                "what datasets.load_dataset reads"
            )
        if part.format["type"] == "custom":
            raise ValueError(
                "the dataset has a transform (set_transform or with_transform), which would be lost; call "
                "reset_format() on it and leave transforming the images to the trainer"
            )
    return train, test


def read_image_folder(root: Path) -> DatasetDict | None:
    """
    A folder of images, with a folder for each class, in `train` and `test` (or `validation`) or directly; `None` where
    it is something else, which is for `datasets.load_dataset`.

    The class of an image is the name of the folder that it lies in. Files that are no images, and hidden ones, are
    passed by: `load_dataset` counts them when it guesses what kind of data a folder holds, and puts the images of a
    class called `test` into the test split.

    Raises:
        ValueError: images lie where it cannot be told which class they are of.
    """
    root = root.absolute()
    files = sorted(_files(root)) if root.is_dir() else []
    images = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
    described = any(file.name in DESCRIBED or file.suffix in TABLES for file in files)
    if not images or described or _has_configs(root / "README.md"):
        return None
    below: dict[str, list[Path]] = {}
    for image in images:
        below.setdefault(image.relative_to(root).parts[0], []).append(image)
    nested = {top for top, found in below.items() if all(len(image.relative_to(root).parts) > 2 for image in found)}
    split_folders = sorted(top for top in nested if top.lower() in SPLITS)
    if not split_folders:
        if all(top.lower() in SPLITS for top in below):
            raise ValueError(
                f"the images in {root} lie in {_names(below)}, which may be splits or classes: put a folder for each "
                "class into them, or, if they are classes, put them into a folder 'train'"
            )
        # Above the classes' folders: what is read as one would mix them.
        inner = [{SPLITS[p.lower()] for p in i.relative_to(root).parts[:-2] if p.lower() in SPLITS} for i in images]
        splits = set.union(*inner)
        if len(splits) > 1 or all(inner):
            first = images[[bool(found) for found in inner].index(True)]
            raise ValueError(
                f"{root} has its splits {_names(splits)} further down, as in {first}: pass the folder they lie in"
            )
        groups = {"train": (root, images)}
    else:
        beside = sorted(set(below) - set(split_folders))
        if beside:
            raise ValueError(
                f"{root} has images in {_names(beside)}, beside its splits {_names(split_folders)}; move them into a "
                "class's folder of a split, or away"
            )
        named = [SPLITS[top.lower()] for top in split_folders]
        if len(set(named)) < len(named):
            raise ValueError(f"{root} has the folders {_names(split_folders)}, which name a split twice; keep one")
        groups = {split: (root / top, below[top]) for split, top in zip(named, split_folders, strict=True)}
    for base, found in groups.values():
        _check_depths(base, found)
    names = sorted({image.parent.name for _, found in groups.values() for image in found})
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    return DatasetDict(
        {
            split: Dataset.from_dict(
                {"image": [str(image) for image in found], "label": [image.parent.name for image in found]},
                features=features,
            )
            for split, (_, found) in groups.items()
        }
    )


def _files(root: Path) -> Iterator[Path]:
    """The files below a folder, hidden ones left out; links to folders are followed, each folder once."""
    seen: set[str] = set()
    for folder, inside, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        inside[:] = [] if real in seen else [name for name in inside if not name.startswith(".")]
        files = [] if real in seen else files
        seen.add(real)
        yield from (Path(folder) / name for name in files if not name.startswith("."))


def _has_configs(card: Path) -> bool:
    """Whether a data set's card says where its files are."""
    if not card.is_file():
        return False
    _, *front_matter = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    return any(line.startswith("configs:") for line in "".join(front_matter[:1]).splitlines())


def _check_depths(base: Path, images: list[Path]) -> None:
    """All images of a split lie equally deep, each in the folder of its class."""
    depths = {len(image.relative_to(base).parts) for image in images}
    if depths & {1} or len(depths) > 1:
        by_depth = sorted(depths, key=lambda d: sum(len(i.relative_to(base).parts) == d for i in images))
        odd = next(image for image in images if len(image.relative_to(base).parts) == by_depth[0])
        raise ValueError(
            f"{odd} does not lie in a class's folder as deep as the other images of {base} do, so that its class "
            "cannot be told; move it into its class's folder, or away"
        )


def _names(names: Any) -> str:
    return ", ".join(repr(name) for name in sorted(names)[:5])


def _on_disk(dataset: Any) -> Any:
    """A streaming dataset read once, to its end, into a file that goes with the process; anything else as it is."""
    if not isinstance(dataset, IterableDataset):
        return dataset
    dataset, features = dataset.with_format(None), dataset.features
    for name, feature in (features or {}).items():
        if isinstance(feature, Image):  # as it is encoded: decoded and encoded again it would not be the same
            dataset = dataset.cast_column(name, Image(decode=False))
    rows, read, ended = dataset, 0, False

    def counted() -> Iterator[Any]:
        nonlocal read, ended
        for row in rows:
            yield row
            read += 1
        ended = True

    folder = tempfile.mkdtemp(prefix="peft_luca_stream_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        encoded = Dataset.from_generator(counted, features=rows.features, cache_dir=folder)
        return encoded if features is None else encoded.cast(features)
    except Exception as error:
        if ended and not read:  # no fault, and nothing to make a file of
            return Dataset.from_dict({name: [] for name in features or ()}, features=features)
        cause = error.__cause__ or error
        raise ValueError(
            f"the streaming dataset broke off after {read} rows: {cause!r}. None of them was kept: mend its source, "
            "and make the stream again"
        ) from cause
