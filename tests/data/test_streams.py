import io
import itertools
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PilImage

from peft_luca.data.task_stream import TaskStream


def png(value=0):
    buffer = io.BytesIO()
    PilImage.new("L", (2, 2), value).save(buffer, "png")
    return buffer.getvalue()


PNG = png()


def images(labels, feature=None, column="image", **columns):
    """A dataset of tiny images. Each carries its row and label in its path, where the stream does not look."""
    feature = Value("int64" if isinstance(next(iter(labels), 0), int) else "string") if feature is None else feature
    data = {
        column: [{"bytes": PNG, "path": f"{row}-{label}.png"} for row, label in enumerate(labels)],
        "label": labels,
    }
    features = {column: Image(), "label": feature, **{name: Value("string") for name in columns}}
    return Dataset.from_dict({**data, **columns}, features=Features(features))


def named(names, *labels):
    """A dataset with a ClassLabel of these names."""
    return images(list(labels), ClassLabel(names=list(names)))


def paths(dataset):
    return [image["path"] for image in dataset.cast_column("image", Image(decode=False))["image"]]


def names_of(stream, dataset):
    return [stream.classes[label] for label in dataset["labels"]]


# --- class-incremental ---


def test_default_class_order_is_the_literatures():
    stream = TaskStream.from_dataset(images(list(range(100))), increment=10)
    np.random.seed(1993)
    assert stream.classes == tuple(str(label) for label in np.random.permutation(100))
    assert stream.classes[:5] == ("68", "56", "78", "8", "23")  # the well-known start of CIFAR-100's order
    assert len(stream) == 10
    assert stream[0].classes == stream.classes[:10]
    assert stream[0].name == "task_0"


def test_reading_a_stream_leaves_the_global_random_state_alone():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    TaskStream.from_dataset(images([0, 0, 1, 1]), increment=1, test_size=0.5)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_seed_none_keeps_the_datasets_order():
    assert TaskStream.from_dataset(named("zyx", 2, 0, 1), seed=None).classes == ("z", "y", "x")
    assert TaskStream.from_dataset(images(["b", "a", "c"]), seed=None).classes == ("a", "b", "c")
    assert TaskStream.from_dataset(images([10, 9]), seed=None).classes == ("9", "10")


@pytest.mark.parametrize("order", [["c", "a", "b"], [2, 0, 1], np.array([2, 0, 1])])
def test_class_order_by_name_or_label(order):
    stream = TaskStream.from_dataset(named("abc", 0, 1, 2), increment=1, class_order=order)
    assert [task.classes for task in stream] == [("c",), ("a",), ("b",)]
    assert [paths(task.train) for task in stream] == [["2-2.png"], ["0-0.png"], ["1-1.png"]]
    assert [task.train["labels"][:] for task in stream] == [[0], [1], [2]]


def test_class_order_of_integer_labels_is_by_label():
    stream = TaskStream.from_dataset(images([7, 3]), class_order=[7, 3], increment=1)
    assert stream.classes == ("7", "3")


def test_numbers_of_numpys_are_numbers():
    stream = TaskStream.from_dataset(images([0, 1, 2]), increment=np.int64(1), init_classes=np.int32(2), seed=None)
    assert [len(task.classes) for task in stream] == [2, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"class_order": np.array([[2], [1], [0]])},
        {"class_order": torch.tensor([2.0, 1.0, 0.0])},
        {"class_order": [True, False, 2]},
        {"increment": np.array([1, 2])},
        {"increment": True},
        {"init_classes": 1.5, "increment": 1},
    ],
)
def test_what_is_no_whole_number_is_refused_as_such(options):
    with pytest.raises(ValueError, match=r"by its name or its number|must be a whole number"):
        TaskStream.from_dataset(images([0, 1, 2]), **options)


def test_init_classes_and_a_smaller_last_task():
    stream = TaskStream.from_dataset(images(list(range(10))), increment=3, init_classes=4, seed=None)
    assert [len(task.classes) for task in stream] == [4, 3, 3]
    stream = TaskStream.from_dataset(images(list(range(10))), increment=4)
    assert [len(task.classes) for task in stream] == [4, 4, 2]
    assert [len(task.classes) for task in TaskStream.from_dataset(images(list(range(10))))] == [10]


def test_tasks_have_the_image_column_and_labels_alone():
    stream = TaskStream.from_dataset(images(["a", "b"], column="picture", note=["x", "y"]), increment=1)
    assert stream.image_column == "picture"
    for task in stream:
        assert task.train.features == {"picture": Image(), "labels": Value("int64")}
        assert task.train[0]["picture"].size == (2, 2)


def test_a_label_column_named_labels_is_replaced():
    stream = TaskStream.from_dataset(
        named("ab", 1, 1, 0).rename_column("label", "labels"), label_column="labels", class_order=["b", "a"]
    )
    assert stream[0].train["labels"][:] == [0, 0, 1]


def test_train_and_test_are_matched_by_name():
    data = DatasetDict(train=named("abc", 0, 1, 2), test=named("cba", 0, 1, 2, 0))
    stream = TaskStream.from_dataset(data, increment=1, seed=None)
    assert [names_of(stream, task.test) for task in stream] == [["a"], ["b"], ["c", "c"]]
    assert paths(stream[2].test) == ["0-0.png", "3-0.png"]


def test_class_label_matches_strings_by_name():
    stream = TaskStream.from_dataset((named("ab", 0, 1), images(["b", "a", "b"])), increment=1, seed=None)
    assert [len(task.test) for task in stream] == [1, 2]


def test_declared_classes_without_images_are_left_out():
    stream = TaskStream.from_dataset(named("abcde", 4, 1, 1), increment=1, seed=None)
    assert stream.classes == ("b", "e")


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
def test_which_split_is_the_test_split(splits, arguments, tested):
    data = DatasetDict({split: images([0] * (i + 1)) for i, split in enumerate(splits)})
    (task,) = TaskStream.from_dataset(data, **arguments)
    assert (None if task.test is None else len(task.test)) == (None if tested is None else len(data[tested]))


def test_a_task_without_test_images_has_none():
    stream = TaskStream.from_dataset((images([0, 1]), images([1])), increment=1, seed=None)
    assert stream[0].test is None
    assert len(stream[1].test) == 1


def test_test_size_holds_out_the_same_share_of_every_class():
    data = images([0] * 10 + [1] * 20 + [2] * 2)
    stream = TaskStream.from_dataset(data, increment=1, seed=None, test_size=0.2)
    assert [(len(task.train), len(task.test)) for task in stream] == [(8, 2), (16, 4), (1, 1)]
    everything = sorted(itertools.chain(*(paths(task.train) + paths(task.test) for task in stream)))
    assert everything == sorted(paths(data))
    again = TaskStream.from_dataset(data, increment=3, seed=None, test_size=0.2)
    assert sorted(paths(again[0].test)) == sorted(itertools.chain(*(paths(task.test) for task in stream)))
    other = TaskStream.from_dataset(data, increment=3, seed=1, test_size=0.2)
    assert sorted(paths(other[0].test)) != sorted(paths(again[0].test))


def test_what_is_held_out_of_a_class_does_not_depend_on_the_others():
    alone = TaskStream.from_dataset(images(["a"] * 50), test_size=0.3)
    among = TaskStream.from_dataset(images(["a"] * 50 + ["b"] * 9), increment=1, class_order=["b", "a"], test_size=0.3)
    assert paths(alone[0].test) == paths(among[1].test)


def test_shuffled_dataset_and_no_image_is_decoded(monkeypatch):
    data = named("abc", *[0, 1, 2] * 5).shuffle(seed=0)
    assert data._indices is not None

    def refuse(*args, **kwargs):
        raise AssertionError("decoded an image")

    with monkeypatch.context() as patch:
        patch.setattr(Image, "decode_example", refuse)
        stream = TaskStream.from_dataset(data, increment=1, test_size=0.4)
    for task in stream:
        for part in (task.train, task.test):
            assert {"abc"[int(path[-5])] for path in paths(part)} == set(task.classes) == set(names_of(stream, part))
    assert stream[0].train[0]["image"].size == (2, 2)


def test_tasks_share_the_images_of_the_dataset():
    stream = TaskStream.from_dataset(images([0, 1] * 5), increment=1)
    assert stream[0].train.data.nbytes == stream[1].train.data.nbytes  # both index one table


def test_formats_are_reset():
    stream = TaskStream.from_dataset(images([0, 1]).with_format("numpy"))
    assert stream[0].train.format["type"] is None


@settings(max_examples=30, deadline=None)
@given(labels=st.lists(st.integers(0, 12), min_size=1, max_size=30), data=st.data())
def test_tasks_partition_classes_and_images(labels, data):
    classes = len(set(labels))
    increment = data.draw(st.integers(1, classes))
    init = data.draw(st.none() | st.integers(1, classes))
    seed = data.draw(st.none() | st.integers(0, 9))
    stream = TaskStream.from_dataset(images(labels), increment=increment, init_classes=init, seed=seed)
    sizes = [len(task.classes) for task in stream]
    assert sizes[0] == min(init or increment, classes)
    assert all(size == increment for size in sizes[1:-1])
    assert sum(sizes) == classes
    assert tuple(itertools.chain(*(task.classes for task in stream))) == stream.classes
    assert sorted(itertools.chain(*(paths(task.train) for task in stream))) == sorted(paths(images(labels)))
    for task in stream:
        assert set(names_of(stream, task.train)) == set(task.classes)
        assert [path.split("-")[1][:-4] for path in paths(task.train)] == names_of(stream, task.train)


# --- domain-incremental ---


def domains():
    train = images(["a", "b", "b", "a", "c"], domain=["photo", "photo", "sketch", "sketch", "sketch"])
    return DatasetDict(train=train, test=images(["b", "a", "c"], domain=["photo", "sketch", "sketch"]))


def test_one_task_per_domain_with_shared_classes():
    stream = TaskStream.from_domains(domains())
    assert [(task.name, task.classes) for task in stream] == [("photo", ("a", "b")), ("sketch", ("a", "b", "c"))]
    assert stream.classes == ("a", "b", "c")
    assert [names_of(stream, task.test) for task in stream] == [["b"], ["a", "c"]]
    assert paths(stream[1].train) == ["2-b.png", "3-a.png", "4-c.png"]


def test_domain_order_changes_numbering_and_nothing_else():
    forward = TaskStream.from_domains(domains())
    backward = TaskStream.from_domains(domains(), domain_order=["sketch", "photo"])
    for one, other in zip(forward, reversed(list(backward)), strict=True):
        assert (one.name, one.classes) == (other.name, other.classes)
        assert paths(one.train) == paths(other.train)
        assert names_of(forward, one.train) == names_of(backward, other.train)


def test_domains_that_cannot_be():
    with pytest.raises(ValueError, match="no column 'style'; pass domain_column, one of"):
        TaskStream.from_domains(domains(), domain_column="style")
    with pytest.raises(ValueError, match=r"domain_order needs each of the 2 .*missing: photo"):
        TaskStream.from_domains(domains(), domain_order=["sketch"])
    with pytest.raises(ValueError, match=r"'a\.b': .*adapter name.*from_tasks\(\{name: dataset"):
        TaskStream.from_domains(images(["a"], domain=["a.b"]))
    train = domains()["train"]
    with pytest.raises(ValueError, match=r"column 'domain' of the test images .* which no train image has: oil"):
        TaskStream.from_domains((train, images(["a"], domain=["oil"])))
    with pytest.raises(ValueError, match="task 'photo' has test images but no train images of the classes c"):
        TaskStream.from_domains((train, images(["c"], domain=["photo"])))
    with pytest.raises(ValueError, match=r"empty \(None\) in 1 rows, first in row 1"):
        TaskStream.from_domains(images(["a", "b"], domain=["photo", None]))


# --- task by task ---


def test_tasks_from_a_list_and_a_dict():
    parts = [images(["b", "a"]), DatasetDict(train=images(["c"]), test=images(["c"])), (images(["a"]), images(["a"]))]
    stream = TaskStream.from_tasks(parts)
    assert [task.name for task in stream] == ["task_0", "task_1", "task_2"]
    assert [task.classes for task in stream] == [("a", "b"), ("c",), ("a",)]
    assert [task.test is None for task in stream] == [True, False, False]
    assert stream[2].train["labels"][:] == stream[2].test["labels"][:] == [0]
    stream = TaskStream.from_tasks(dict(zip(["x", "y-1", "Z_2"], parts, strict=True)))
    assert [task.name for task in stream] == ["x", "y-1", "Z_2"]


def test_append_keeps_known_ids_and_gives_new_ones():
    stream = TaskStream.from_dataset(named("abc", 0, 1, 2), class_order=["c", "b", "a"])
    task = stream.append((named("dbe", 0, 1, 2), named("eb", 0, 1)), name="more")
    assert stream.classes == ("c", "b", "a", "d", "e")
    assert stream[-1] is task
    assert task.classes == ("d", "b", "e")
    assert task.train["labels"][:] == [3, 1, 4]
    assert task.test["labels"][:] == [4, 1]
    assert stream.append(named("a", 0)).name == "task_2"


@pytest.mark.parametrize(
    ("dataset", "name", "match"),
    [
        (images(["a"]), "first", "a task 'first' already"),
        (images(["a"]), "a/b", "cannot be named 'a/b'"),
        (images(["a"]), "a\n", "cannot be named"),
        (images(["a"]), "", "cannot be named"),
        ((images(["a"]), images(["b"])), None, "test images of task 'task_1' .*outside the label space.* has: b"),
        (images([1]), None, "'label' of the train images of task 'task_1' holds integers, the other labels are class"),
        (images(["b"], column="picture"), None, "no column 'image'; pass image_column, one of"),
        (images([]), None, "train images of task 'task_1' are none"),
    ],
)
def test_a_refused_task_leaves_the_stream_as_it_was(dataset, name, match):
    stream = TaskStream.from_tasks({"first": images(["a"])})
    before = repr(stream)
    with pytest.raises(ValueError, match=match):
        stream.append(dataset, name)
    assert repr(stream) == before


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5), min_size=1, max_size=5))
def test_label_space_is_the_union_in_order_of_first_appearance(parts):
    stream = TaskStream.from_tasks([images(part) for part in parts])
    assert stream.classes == tuple(dict.fromkeys(itertools.chain(*(sorted(set(part)) for part in parts))))
    for task, part in zip(stream, parts, strict=True):
        assert task.classes == tuple(sorted(set(part)))
        assert names_of(stream, task.train) == part


def test_tasks_that_cannot_be():
    with pytest.raises(ValueError, match="at least one task, found none"):
        TaskStream.from_tasks([])
    with pytest.raises(ValueError, match="cannot be named 1"):
        TaskStream.from_tasks({1: images(["a"])})


@pytest.mark.parametrize("one", [DatasetDict, dict])
def test_splits_are_not_tasks(one):
    with pytest.raises(
        ValueError, match=rf"found one {one.__name__} of the splits train, test; to split it into tasks"
    ):
        TaskStream.from_tasks(one(train=images(["a"]), test=images(["a"])))


@pytest.mark.parametrize("one", [images(["a"]), "folder", Path("folder"), datasets.IterableDatasetDict()])
def test_one_data_set_is_no_list_of_tasks(one):
    with pytest.raises(ValueError, match=rf"needs a list or a dict of datasets, found one {type(one).__name__}; to"):
        TaskStream.from_tasks(one)


@pytest.mark.parametrize("tasks", [None, 3])
def test_what_is_no_list_of_tasks_is_a_type_error(tasks):
    with pytest.raises(TypeError, match=rf"needs a list or a dict of datasets, found a {type(tasks).__name__}"):
        TaskStream.from_tasks(tasks)
    with pytest.raises(TypeError, match=rf"found a {type(tasks).__name__}; needed a datasets"):
        TaskStream.from_tasks([tasks])


def test_tasks_may_come_from_a_generator():
    stream = TaskStream.from_tasks(images([name]) for name in "ab")
    assert [(task.name, task.classes) for task in stream] == [("task_0", ("a",)), ("task_1", ("b",))]


def test_a_stream_that_is_empty_again_takes_labels_of_any_kind():
    stream = TaskStream.from_tasks([images([0, 1])])
    stream.pop()
    assert stream.append(images(["a"])).classes == ("a",)


# --- whatever the stream ---


def test_repr_says_what_is_in_it():
    data = DatasetDict(train=images(list(range(24)) * 2), test=images(list(range(24))))
    text = repr(TaskStream.from_dataset(data, increment=2, seed=None))
    assert text.startswith(
        "TaskStream: 12 tasks, 24 classes, 48 train and 24 test images\n  task_0: 2 classes (0, 1),"
    )
    assert "4 train and 2 test images" in text
    assert text.endswith("... and 2 more tasks")
    assert "(0, 1, 2, ... 21 more)" in repr(TaskStream.from_dataset(data, seed=None))


def test_image_folder(tmp_path):
    for split, style, count in (("train", "cat", 3), ("train", "dog", 2), ("test", "cat", 1), ("test", "dog", 1)):
        folder = tmp_path / "data" / split / style
        folder.mkdir(parents=True)
        for i in range(count):
            (folder / f"{i}.png").write_bytes(png(i))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        stream = TaskStream.from_dataset(tmp_path / "data", increment=1, seed=None)
    assert [(task.classes, len(task.train), len(task.test)) for task in stream] == [(("cat",), 3, 1), (("dog",), 2, 1)]
    assert stream[1].train[1]["image"].getpixel((0, 0)) == 1


@pytest.mark.parametrize(
    ("dataset", "arguments", "match"),
    [
        (images(["a"]), {"label_column": "y"}, r"no column 'y'; pass label_column, one of \['image', 'label'\]"),
        (images(["a"]), {"image_column": "img"}, "no column 'img'; pass image_column, one of"),
        (images(["a"]), {"image_column": "label"}, r"must be decoded images, found Value\('string'\).*cast_column"),
        (images(["a"]).cast_column("image", Image(decode=False)), {}, "must be decoded images, found .*decode=False"),
        (images(["a"], column="labels"), {}, "cannot be named 'labels'"),
        (images(["a"]).remove_columns("image"), {}, r"0 columns of images .*one of \['label'\], after cast_column"),
        (
            images(["a"]).add_column("b", [{"bytes": PNG, "path": None}], feature=Image()),
            {},
            r"2 columns of images \(\['image', 'b'\]\)",
        ),
        (images(["a", None]), {}, r"column 'label' of the train images is empty \(None\) in 1 rows, first in row 1"),
        (named("ab", 0, None, 1), {}, "first in row 1"),
        (named("ab", 0, 1, -1), {}, "row 2 of column 'label' of the train images is -1, which names no class"),
        (images([3, -1]), {}, "row 1 .* is -1"),
        (
            images([0.5], Value("float32")),
            {},
            r"one ClassLabel, integer or string per image, found Value\('float32'\)",
        ),
        (images([[0, 1]], List(Value("int64"))), {}, "integer or string per image, found List"),
        (images([True], Value("bool")), {}, "integer or string per image, found"),
        (images(["a"]).with_transform(lambda rows: rows), {}, "has a transform"),
        (images([]), {}, "the train images are none"),
        (
            (images(["a"]), images(["a", "b"])),
            {},
            "label column of the test images .*outside the label space.* has: b",
        ),
        ((images(["a"]), images([1])), {}, "of the test images holds integers, the other labels are class names"),
        ((images(["a"]), images(["a"]).remove_columns("image")), {}, "test images have no column 'image'"),
        (images([0, 1]), {"increment": 3}, "increment must be a whole number from 1 to the 2 classes, got 3"),
        (images([0, 1]), {"increment": 0}, "increment must be .* got 0"),
        (images([0, 1]), {"increment": 1.0}, r"increment must be .* got 1\.0"),
        (images([0, 1]), {"increment": 1, "init_classes": -1}, "init_classes must be .* got -1"),
        (images([0, 1]), {"class_order": [0]}, "class_order needs each of the 2 .* once, found missing: 1"),
        (images([0, 1]), {"class_order": [0, 1, 1]}, "named twice: 1"),
        (images([0, 1]), {"class_order": [0, 2]}, "without a train image: 2; missing: 1"),
        (images([0, 1]), {"class_order": [0.5, 1]}, r"class_order names each by its name or its number, found 0\.5"),
        (images([0, 1]), {"class_order": [None, 1]}, "class_order names each by its name or its number, found None"),
        (images(["a", "b"]), {"class_order": [0, 1]}, "without a train image: 0, 1; missing: a, b"),
        (images([0]), {"test_split": "test"}, "test_split='test' needs a DatasetDict, found a Dataset"),
        (images([0, 0]), {"test_size": 1.0}, r"test_size must be a share between 0 and 1, got 1\.0"),
        (images([0, 0]), {"test_size": 0.0}, r"test_size must be a share between 0 and 1, got 0\.0"),
        (images([0, 0, 1]), {"test_size": 0.5}, "class '1' has one image; test_size needs at least two"),
        ((images([0]), images([0])), {"test_size": 0.5}, "the dataset has 1 test images; leave out test_size"),
        (DatasetDict(a=images([0])), {}, r"no split 'train'; it has \['a'\]"),
        (DatasetDict(train=images([0])), {"test_split": "b"}, r"no split 'b'; it has \['train'\]"),
    ],
)
def test_what_is_wrong_with_the_data_is_said(dataset, arguments, match):
    with pytest.raises(ValueError, match=match):
        TaskStream.from_dataset(dataset, **arguments)


def test_a_missing_image_is_said_by_its_row():
    data = images(["a", "b", "c"])
    holes = Dataset.from_dict(
        {"image": [None, *data.with_format("arrow")[1:]["image"].to_pylist()], "label": [*"abc"]}
    )
    holes = holes.cast_column("image", Image())
    with pytest.raises(ValueError, match=r"column 'image' of the train images is empty \(None\) in 1 rows.* row 2"):
        TaskStream.from_dataset(holes.select([2, 1, 0]))
    assert len(TaskStream.from_dataset(holes.select([2, 1]))[0].train) == 2


@pytest.mark.parametrize(
    ("dataset", "match"),
    [
        ([{"image": 0, "label": 0}], "found a list; needed a datasets.Dataset"),
        ((None, images(["a"])), "found a NoneType"),
        (None, "found a NoneType"),
    ],
)
def test_what_is_no_dataset_is_a_type_error(dataset, match):
    with pytest.raises(TypeError, match=match):
        TaskStream.from_dataset(dataset)


def streamed(dataset):
    """The same rows from a generator that does not say how many they are."""

    def rows():
        yield from dataset.cast_column("image", Image(decode=False))

    return datasets.IterableDataset.from_generator(rows, features=dataset.features)


def test_a_streaming_dataset_is_what_it_is_once_read():
    train, test = named("abcd", 0, 3, 1, 2, 0, 3), named("abcd", 1, 0)
    whole = TaskStream.from_dataset((train, test), increment=2)
    both = datasets.IterableDatasetDict(train=streamed(train), test=streamed(test))
    for dataset in ((streamed(train), streamed(test)), both):
        stream = TaskStream.from_dataset(dataset, increment=2)
        assert stream.classes == whole.classes
        for task, expected in zip(stream, whole, strict=True):
            assert (task.name, task.classes) == (expected.name, expected.classes)
            assert task.train["labels"] == expected.train["labels"]
            assert paths(task.train) == paths(expected.train)
            assert (task.test is None) == (expected.test is None)


def test_a_streaming_task_can_be_appended_and_says_what_is_wrong_with_it():
    stream = TaskStream.from_tasks([streamed(named("ab", 0, 1))])
    stream.append(streamed(named("bc", 1)), "more")
    assert stream.classes == ("a", "b", "c")
    with pytest.raises(ValueError, match="the train images of task 'none' are none"):
        stream.append(streamed(named("ab")), "none")
    with pytest.raises(ValueError, match="found one IterableDataset"):
        TaskStream.from_tasks(streamed(named("ab", 0)))


def test_a_streaming_dataset_without_features_is_read_too():
    pixels = [PilImage.new("RGB", (4, 4), color) for color in ("red", "blue")]
    stream = TaskStream.from_dataset(
        datasets.IterableDataset.from_generator(lambda: ({"image": p, "label": i} for i, p in enumerate(pixels))),
        image_column="image",
    )
    assert [row["image"].getpixel((0, 0)) for row in stream[0].train] == [(255, 0, 0), (0, 0, 255)]


def test_a_class_label_beyond_its_names_is_refused():
    data = images([0, 2])
    data.info.features["label"] = ClassLabel(names=["a", "b"])  # as a file that was written wrongly has it
    with pytest.raises(ValueError, match="row 1 of column 'label' of the train images is 2, which names no class"):
        TaskStream.from_dataset(data)


def test_long_lists_of_names_are_cut():
    with pytest.raises(ValueError, match=r"no train image has: b, c, d, e, f; add"):
        TaskStream.from_dataset((images(["a"]), images([*"abcdef"])))
    with pytest.raises(ValueError, match=r"no train image has: b, c, d, e, f, \.\.\. 1 more; add"):
        TaskStream.from_dataset((images(["a"]), images([*"abcdefg"])))


def test_tasks_whose_names_differ_by_capital_letters_alone_are_refused():
    with pytest.raises(ValueError, match="a task 'a' already, and another cannot be named 'A'"):
        TaskStream.from_tasks({"a": images([0, 1]), "A": images([2, 3])})
