"""Folders, streaming datasets and tables are read correctly, or refused with what to do."""

import io
import os

import datasets
import pandas as pd
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, IterableDataset, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from PIL import Image as PilImage

from peft_luca import TaskStream
from peft_luca.data.sources import load_splits, read_image_folder


TEXT = Features(image=Image(), label=Value("string"))


@pytest.fixture
def folder(tmp_path):
    """Makes a folder of files: an image for an int, its grey value; a file of other content for bytes."""
    count = 0

    def make(files):
        nonlocal count
        root = tmp_path / f"data_{(count := count + 1)}"
        for name, content in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content) if isinstance(content, bytes) else path.write_bytes(png(content))
        return root

    return make


def png(grey=0):
    buffer = io.BytesIO()
    PilImage.new("L", (2, 2), grey).save(buffer, "png")
    return buffer.getvalue()


def contents(dataset):
    """Class -> grey values of its train images and of its test images."""

    def greys(dataset):
        return [] if dataset is None else [row["image"].getpixel((0, 0)) for row in dataset]

    stream = TaskStream.from_dataset(dataset, increment=1, seed=None)
    return {task.classes[0]: (greys(task.train), greys(task.test)) for task in stream}


def rows(count=2, error=None):
    for i in range(count):
        yield {"image": {"bytes": png(i), "path": None}, "label": "ab"[i % 2]}
    if error:
        raise error


def streaming(features=TEXT, **kwargs):
    return IterableDataset.from_generator(rows, features=features, gen_kwargs=kwargs)


# --- folders ---


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cat/1.png": 1, "dog/3.jpeg": 3}, {"cat": ([1], []), "dog": ([3], [])}),
        (
            {"train/cat/1.png": 1, "train/cat/2.PNG": 2, "train/dog/3.png": 3, "test/cat/4.png": 4},
            {"cat": ([1, 2], [4]), "dog": ([3], [])},
        ),
        ({"Train/cat/1.png": 1, "val/cat/2.png": 2}, {"cat": ([1], [2])}),
        (  # classes with names of splits, whose images load_dataset mixes
            {"train/train/1.png": 1, "train/test/2.png": 2, "train/bus/3.png": 3, "test/train/4.png": 4},
            {"bus": ([3], []), "test": ([2], []), "train": ([1], [4])},
        ),
        ({"train/1.png": 1, "bus/3.png": 3}, {"bus": ([3], []), "train": ([1], [])}),
        ({"vehicles/train/steam/1.png": 1, "vehicles/bus/city/2.png": 2}, {"city": ([2], []), "steam": ([1], [])}),
        ({"猫/ä ö.png": 1, "café/b #1%20[c].png": 2}, {"猫": ([1], []), "café": ([2], [])}),
        ({"README.md": b"---\nlicense: mit\n---\n", "cat/1.png": 1}, {"cat": ([1], [])}),
        (  # other files, so many that load_dataset would read text
            {f"cat/notes{i}.txt": b"x" for i in range(9)}
            | {"cat/.DS_Store": b"x", "cat/._1.png": 9, ".git/x.png": 9, "dog/list.csv": b"a", "cat/1.png": 1},
            {"cat": ([1], [])},
        ),
    ],
)
def test_the_folder_of_an_image_is_its_class(folder, files, expected):
    assert contents(folder(files)) == expected


def test_a_plain_folder_is_read_as_by_datasets(folder, tmp_path):
    root = folder({f"{split}/{name}/{i}.png": i for split in ("train", "test") for name in "abc" for i in range(3)})
    expected = load_dataset(str(root), cache_dir=str(tmp_path / "cache"))
    found = read_image_folder(root)
    for split in ("train", "test"):
        assert found[split].features == expected[split].features
        parts = [d[split].cast_column("image", Image(decode=False)).to_list() for d in (found, expected)]
        assert sorted(parts[0], key=str) == sorted(parts[1], key=str)


def test_links_to_folders_are_followed_once(folder, tmp_path):
    root = folder({"cat/1.png": 1})
    os.symlink(folder({"7.png": 7}), root / "dog")
    os.symlink(root, root / "cat" / "loop")
    assert contents(root) == {"cat": ([1], []), "dog": ([7], [])}


def test_a_relative_path_outlives_a_change_of_the_working_folder(folder, monkeypatch):
    root = folder({"a/1.png": 1})
    monkeypatch.chdir(root.parent)
    stream = TaskStream.from_dataset(root.name)
    monkeypatch.chdir("/")
    assert stream[0].train[0]["image"].getpixel((0, 0)) == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"cat/1.png": 1, "dog/2.png": 2, "logo.png": 3}, r"logo\.png is not in the folder of a class"),
        ({"cat/1.png": 1, "dog/2.png": 2, "cat/more/3.png": 3}, r"more/3\.png is not in the folder of a class"),
        ({"1.png": 1}, r"1\.png is not in the folder of a class"),
        ({"train/1.png": 1, "test/2.png": 2}, "'test', 'train' may be splits or classes"),
        ({"train/cat/1.png": 1, "spare/2.png": 2}, "beside the splits 'train' there is 'spare'"),
        ({"train/cat/1.png": 1, "training/cat/2.png": 2}, "folders 'train', 'training' name a split twice"),
        ({"test/cat/1.png": 1}, r"no split 'train'; it has \['test'\]"),
        ({"all/train/cat/1.png": 1, "all/test/cat/2.png": 2}, r"splits are further down, as in .*2\.png"),
        ({"a/val/cat/2.png": 2, "b/train/cat/1.png": 1, "b/x/cat/3.png": 3}, "splits are further down"),
        ({"all/test/cat/1.png": 1}, "splits are further down"),
    ],
)
def test_a_folder_whose_classes_are_not_clear_is_refused(folder, files, message):
    with pytest.raises(ValueError, match=message):
        TaskStream.from_dataset(folder(files))


def test_other_folders_are_left_to_datasets(folder, tmp_path):
    root = folder({"metadata.csv": b"file_name,label\na.png,left\nb.png,right\n", "a.png": 1, "b.png": 2})
    assert read_image_folder(root) is None
    assert contents(root) == {"left": ([1], []), "right": ([2], [])}
    card = b"---\nconfigs:\n- config_name: default\n  data_files: 'left/*'\n---\n"
    for files in ({"README.md": card, "left/1.png": 1}, {"notes.txt": b"x"}):
        assert read_image_folder(folder(files)) is None
    with pytest.raises(FileNotFoundError, match="nowhere"):
        TaskStream.from_dataset(tmp_path / "nowhere")


# --- tables ---


def test_images_in_a_table_of_pandas_are_read(tmp_path):
    image = [{"path": "x.png", "bytes": png(1)}, {"path": None, "bytes": png(2)}]
    pd.DataFrame({"image": image, "label": ["a", "b"]}).to_parquet(tmp_path / "train.parquet")
    assert contents(tmp_path) == {"a": ([1], []), "b": ([2], [])}
    without_names = Dataset.from_dict({"image": [{"bytes": png(3), "path": None}], "label": ["a"]})
    assert contents(without_names) == {"a": ([3], [])}


@pytest.mark.parametrize("kind", ["numpy", "torch", "arrow", "pandas", None])
def test_a_format_is_reset(kind):
    data = Dataset.from_list(list(rows()), TEXT)
    expected = {"a": ([0], []), "b": ([1], [])}
    assert contents(data.with_format(kind)) == expected
    assert contents(data.to_iterable_dataset().with_format(kind)) == expected


# --- splits ---


@pytest.mark.parametrize(
    ("splits", "arguments", "tested"),
    [
        (("train", "test", "validation"), {}, "test"),
        (("train", "validation"), {}, "validation"),
        (("train", "extra"), {}, None),
        (("train", "extra"), {"test_split": "extra"}, "extra"),
        (("test", "validation"), {"train_split": "test"}, "validation"),
    ],
)
def test_which_split_is_tested_on(splits, arguments, tested):
    data = DatasetDict({split: Dataset.from_list(list(rows(i + 1)), TEXT) for i, split in enumerate(splits)})
    _, test = load_splits(data, **arguments)
    assert (None if test is None else len(test)) == (None if tested is None else len(data[tested]))


UNLABELLED = Dataset.from_list([{"image": {"bytes": png(), "path": None}, "label": -1}] * 2).cast_column(
    "label", ClassLabel(names=["a", "b"])
)


@pytest.mark.parametrize(
    "test",
    [
        UNLABELLED,
        UNLABELLED.remove_columns("label"),
        UNLABELLED.cast_column("label", Value("int64")),
        Dataset.from_dict({"image": [None], "label": [None]}),
    ],
)
def test_a_test_split_without_labels_is_told_apart(test):
    data = DatasetDict(train=Dataset.from_list(list(rows(4)), TEXT), test=test)
    with pytest.warns(UserWarning, match="'test' has no labels in 'label': no images are tested on; set test_size"):
        assert load_splits(data) == (data["train"], None)
    data["validation"] = Dataset.from_list(list(rows(3)), TEXT)
    with pytest.warns(UserWarning, match="'test' has no labels in 'label': 'validation' is tested on"):
        stream = TaskStream.from_dataset(data)
    assert len(stream[0].test) == 3


@pytest.mark.parametrize(
    ("dataset", "arguments", "error", "message"),
    [
        (DatasetDict(a=Dataset.from_dict({})), {}, ValueError, r"no split 'train'; it has \['a'\]"),
        (DatasetDict(train=Dataset.from_dict({})), {"test_split": "b"}, ValueError, r"no split 'b'; it has \['train"),
        (Dataset.from_dict({}), {"test_split": "test"}, ValueError, "needs a DatasetDict, found a Dataset"),
        (Dataset.from_dict({}).with_transform(lambda row: row), {}, ValueError, "has a transform"),
        ([{"image": 0}], {}, TypeError, "found a list; needed a datasets.Dataset"),
        ((None, Dataset.from_dict({})), {}, TypeError, "found a NoneType"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset, arguments, error, message):
    with pytest.raises(error, match=message):
        load_splits(dataset, **arguments)


# --- streaming datasets ---


def test_a_streaming_dataset_is_read_whole():
    features = Features(image=Image(), label=ClassLabel(names=["b", "a"]))
    both = datasets.IterableDatasetDict(train=streaming(features, count=3), test=streaming(features))
    for dataset in (both, (both["train"], both["test"])):
        train, test = load_splits(dataset)
        assert (train.features, len(train), len(test)) == (features, 3, 2)
        encoded = train.cast_column("image", Image(decode=False))["image"]
        assert [image["bytes"] for image in encoded] == [png(i) for i in range(3)]
    upper = streaming().map(lambda row: {"label": row["label"].upper()})  # features are unknown now
    assert TaskStream.from_dataset(upper, image_column="image", seed=None).classes == ("A", "B")


def test_rows_that_come_only_once_are_all_read():
    def once(source):
        yield from source

    def stream():
        return IterableDataset.from_generator(once, features=TEXT, gen_kwargs={"source": iter(list(rows()))})

    assert len(TaskStream.from_dataset(stream())[0].train) == 2
    tasks = TaskStream.from_tasks([stream()])
    assert (len(tasks[0].train), len(tasks.append(stream()).train)) == (2, 2)


def test_a_streaming_dataset_that_fails_is_not_used():
    stream = TaskStream.from_tasks([Dataset.from_list(list(rows()), TEXT)])
    with pytest.raises(DatasetGenerationError) as error:
        stream.append(streaming(count=3, error=RuntimeError("no sensor")))
    assert "no sensor" in str(error.value.__cause__)
    assert len(stream) == 1
