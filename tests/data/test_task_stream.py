"""`TaskStream`: classes and images go to the right tasks, labels are matched by name, bad data is refused."""

import io
import itertools
import unicodedata
import warnings

import datasets
import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value, load_from_disk
from helpers import NAMES, files_in, make_images
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PilImage

from peft_luca.data.task_stream import TaskStream


@pytest.fixture(autouse=True)
def no_unexpected_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def png():
    buffer = io.BytesIO()
    PilImage.new("L", (2, 2)).save(buffer, "png")
    return buffer.getvalue()


PNG = png()


def images(labels, feature=None, column="image", **columns):
    """A dataset of tiny images. The path of each names its row and label; the stream does not look at it."""
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


def test_the_default_class_order_is_that_of_the_literature():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    stream = TaskStream.from_dataset(images(list(range(100))), increment=10)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    np.random.seed(1993)
    assert stream.classes == tuple(str(label) for label in np.random.permutation(100))
    assert stream.classes[:5] == ("68", "56", "78", "8", "23")  # how the order of CIFAR-100 is known to start
    assert len(stream) == 10
    assert (stream[0].name, stream[0].classes) == ("task_0", stream.classes[:10])


def test_without_a_seed_classes_keep_the_order_of_the_dataset():
    assert TaskStream.from_dataset(named("zyx", 2, 0, 1), seed=None).classes == ("z", "y", "x")
    assert TaskStream.from_dataset(images(["b", "a", "c"]), seed=None).classes == ("a", "b", "c")
    assert TaskStream.from_dataset(images([10, 9]), seed=None).classes == ("9", "10")
    assert TaskStream.from_dataset(named("abcde", 4, 1, 1), seed=None).classes == ("b", "e")  # those with images


@pytest.mark.parametrize(
    ("labels", "order", "expected"),
    [
        (named("abc", 0, 1, 2), ["c", "a", "b"], "cab"),
        (named("abc", 0, 1, 2), np.array([2, 0, 1]), "cab"),
        (images([7, 3, 5]), [7, 3, 5], "735"),
    ],
)
def test_class_order_by_name_or_label(labels, order, expected):
    stream = TaskStream.from_dataset(labels, increment=1, class_order=order)
    assert [task.classes for task in stream] == [(name,) for name in expected]
    for i, task in enumerate(stream):
        assert task.train["labels"][:] == [i]
        assert names_of(stream, task.train) == [expected[i]]


@pytest.mark.parametrize(
    ("increment", "init_classes", "sizes"),
    [(3, 4, [4, 3, 3]), (4, None, [4, 4, 2]), (None, None, [10]), (None, 4, [4, 6]), (np.int64(5), np.int32(1), None)],
)
def test_how_many_classes_a_task_has(increment, init_classes, sizes):
    stream = TaskStream.from_dataset(
        images(list(range(10))), increment=increment, init_classes=init_classes, seed=None
    )
    assert [len(task.classes) for task in stream] == (sizes or [1, 5, 4])


def test_tasks_are_named_as_one_likes():
    stream = TaskStream.from_dataset(images(["a", "b", "c"]), increment=2, task_names=["spring", "autumn"])
    assert [task.name for task in stream] == ["spring", "autumn"]
    with pytest.raises(ValueError, match="task_names must name each of the 2 tasks, got 1 names"):
        TaskStream.from_dataset(images(["a", "b", "c"]), increment=2, task_names=["spring"])
    with pytest.raises(ValueError, match=r"the name of a task has .* got 'a/b'"):
        TaskStream.from_dataset(images(["a", "b", "c"]), increment=2, task_names=["a/b", "c"])


@settings(max_examples=25, deadline=None)
@given(labels=st.lists(st.integers(0, 12), min_size=1, max_size=30), data=st.data())
def test_tasks_partition_classes_and_images(labels, data):
    increment = data.draw(st.integers(1, len(set(labels))))
    seed = data.draw(st.none() | st.integers(0, 9))
    stream = TaskStream.from_dataset(images(labels), increment=increment, seed=seed)
    assert tuple(itertools.chain(*(task.classes for task in stream))) == stream.classes
    assert sorted(itertools.chain(*(paths(task.train) for task in stream))) == sorted(paths(images(labels)))
    for task in stream:
        assert set(names_of(stream, task.train)) == set(task.classes)
        assert [path.split("-")[1][:-4] for path in paths(task.train)] == names_of(stream, task.train)


def test_tasks_have_only_the_images_and_their_labels():
    data = images(["a", "b"], column="picture", note=["x", "y"]).rename_column("label", "labels").with_format("numpy")
    stream = TaskStream.from_dataset(data, label_column="labels", class_order=["b", "a"], increment=1)
    assert stream.image_column == "picture"
    for task in stream:
        assert task.train.features == {"picture": Image(), "labels": Value("int64")}
        assert task.train.format["type"] is None
        assert task.train[0]["picture"].size == (2, 2)
    assert stream[0].train.data.nbytes == stream[1].train.data.nbytes  # both select rows of one table


def test_train_and_test_are_matched_by_name():
    stream = TaskStream.from_dataset((named("abc", 0, 1, 2), named("cbax", 0, 1, 0)), increment=1, seed=None)
    assert [None if task.test is None else names_of(stream, task.test) for task in stream] == [None, ["b"], ["c", "c"]]
    assert paths(stream[2].test) == ["0-0.png", "2-0.png"]
    stream = TaskStream.from_dataset((named("ab", 0, 1), images(["b", "a", "b"])), increment=1, seed=None)
    assert [len(task.test) for task in stream] == [1, 2]
    stream = TaskStream.from_dataset((images(["a"]), images(["a"]).select([])))
    assert stream[0].test is None


def test_encoded_images_and_paths_are_taken_too(tmp_path):
    (tmp_path / "1.png").write_bytes(PNG)
    paths = Dataset.from_dict({"image": [str(tmp_path / "1.png")], "label": ["a"]})
    for data in (images(["a"]).cast_column("image", Image(decode=False)), paths):
        task = TaskStream.from_dataset(data, image_column="image")[0]
        assert task.train.features["image"] == Image()
        assert task.train[0]["image"].size == (2, 2)


def test_labels_of_any_type():
    for kind in ("int8", "uint16", "uint64"):
        assert TaskStream.from_dataset(images([3, 72], Value(kind)), seed=None).classes == ("3", "72")
    assert TaskStream.from_dataset(images(["b", "a"], Value("large_string")), seed=None).classes == ("a", "b")


def test_test_size_holds_out_the_same_share_of_each_class():
    data = images([0] * 10 + [1] * 20 + [2] * 2)
    stream = TaskStream.from_dataset(data, increment=1, seed=None, test_size=0.2)
    assert [(len(task.train), len(task.test)) for task in stream] == [(8, 2), (16, 4), (1, 1)]
    held_out = sorted(itertools.chain(*(paths(task.test) for task in stream)))
    assert sorted(itertools.chain(held_out, *(paths(task.train) for task in stream))) == sorted(paths(data))
    assert sorted(paths(TaskStream.from_dataset(data, seed=None, test_size=0.2)[0].test)) == held_out
    assert sorted(paths(TaskStream.from_dataset(data, seed=1, test_size=0.2)[0].test)) != held_out
    single = TaskStream.from_dataset(images([0, 0, 1]), increment=1, seed=None, test_size=0.5)[1]
    assert (len(single.train), single.test) == (1, None)  # a class of one image is not tested
    alone = TaskStream.from_dataset(images([0] * 10), seed=None, test_size=0.2)
    assert paths(alone[0].test) == paths(stream[0].test)  # whatever the other classes are


def test_a_shuffled_dataset_is_read_without_decoding(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("decoded an image")

    with monkeypatch.context() as patch:
        patch.setattr(Image, "decode_example", refuse)
        stream = TaskStream.from_dataset(named("abc", *[0, 1, 2] * 5).shuffle(seed=0), increment=1, test_size=0.4)
    for task in stream:
        for part in (task.train, task.test):
            assert {"abc"[int(path[-5])] for path in paths(part)} == set(task.classes) == set(names_of(stream, part))


# --- domain-incremental ---


def domains():
    train = images(["a", "b", "b", "a", "c"], domain=["photo", "photo", "sketch", "sketch", "sketch"])
    return DatasetDict(train=train, test=images(["b", "a", "c"], domain=["photo", "sketch", "sketch"]))


def test_nothing_is_written_beside_the_data(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    make_images(NAMES[:2]).save_to_disk(tmp_path / "data")
    shuffled = load_from_disk(tmp_path / "data").select([5, 0, 9, 3])
    before = {file: (tmp_path / "data" / file).stat().st_mtime_ns for file in files_in(tmp_path / "data")}
    (task,) = TaskStream.from_dataset(shuffled)
    assert {file: (tmp_path / "data" / file).stat().st_mtime_ns for file in files_in(tmp_path / "data")} == before
    assert [image.tobytes() for image in task.train["image"]] == [image.tobytes() for image in shuffled["image"]]
    assert len(files_in(tmp_path / "cache")) == 1


def test_one_task_per_domain_with_shared_classes():
    stream = TaskStream.from_domains(domains())
    assert [(task.name, task.classes) for task in stream] == [("photo", ("a", "b")), ("sketch", ("a", "b", "c"))]
    assert stream.classes == ("a", "b", "c")
    assert [names_of(stream, task.test) for task in stream] == [["b"], ["a", "c"]]
    assert paths(stream[1].train) == ["2-b.png", "3-a.png", "4-c.png"]


def test_the_domain_order_changes_only_the_numbers_of_labels():
    forward, backward = (TaskStream.from_domains(domains(), domain_order=o) for o in (None, ["sketch", "photo"]))
    for one, other in zip(forward, reversed(list(backward)), strict=True):
        assert (one.name, one.classes, paths(one.train)) == (other.name, other.classes, paths(other.train))
        assert names_of(forward, one.train) == names_of(backward, other.train)


def test_bad_domains_are_refused():
    with pytest.raises(ValueError, match=r"Column name \['style'\] not in the dataset"):
        TaskStream.from_domains(domains(), domain_column="style")
    with pytest.raises(ValueError, match=r"domain_order needs each of the 2 .*missing: 'photo'"):
        TaskStream.from_domains(domains(), domain_order=["sketch"])
    with pytest.raises(ValueError, match=r"letters, digits, '_', '-', 128 at most, got 'a\.b'"):
        TaskStream.from_domains(images(["a"], domain=["a.b"]))
    train = domains()["train"]
    with pytest.raises(ValueError, match=r"column 'domain' of the test images has values outside .*: 'oil'"):
        TaskStream.from_domains((train, images(["a"], domain=["oil"])))
    with pytest.raises(ValueError, match="task 'photo' has test images but no train images of the classes 'c'"):
        TaskStream.from_domains((train, images(["c"], domain=["photo"])))
    with pytest.raises(ValueError, match=r"empty \(None\) in 1 rows, first in row 1"):
        TaskStream.from_domains(images(["a", "b"], domain=["photo", None]))


# --- task by task ---


def test_tasks_from_a_list_a_dict_and_a_generator():
    parts = [images(["b", "a"]), DatasetDict(train=images(["c"]), test=images(["c"])), (images(["a"]), images(["a"]))]
    stream = TaskStream.from_tasks(parts)
    assert [task.name for task in stream] == ["task_0", "task_1", "task_2"]
    assert [task.classes for task in stream] == [("a", "b"), ("c",), ("a",)]
    assert [task.test is None for task in stream] == [True, False, False]
    assert stream[2].train["labels"][:] == stream[2].test["labels"][:] == [0]
    stream = TaskStream.from_tasks(dict(zip(["x", "y-1", "Z_2"], parts, strict=True)))
    assert [task.name for task in stream] == ["x", "y-1", "Z_2"]
    assert len(TaskStream.from_tasks(part for part in parts)) == 3
    with pytest.raises(ValueError, match="at least one task, found none"):
        TaskStream.from_tasks([])


def test_append_keeps_known_ids_and_pop_removes_new_ones():
    stream = TaskStream.from_dataset(named("abc", 0, 1, 2), class_order=["c", "b", "a"])
    task = stream.append((named("dbe", 0, 1, 2), named("eb", 0, 1)), name="more")
    assert stream.classes == ("c", "b", "a", "d", "e")
    assert stream[-1] is task
    assert task.classes == ("d", "b", "e")
    assert (task.train["labels"][:], task.test["labels"][:]) == ([3, 1, 4], [4, 1])
    assert stream.append(named("a", 0)).name == "task_2"
    stream.pop()
    assert stream.pop() is task
    assert (stream.classes, len(stream)) == (("c", "b", "a"), 1)
    stream.pop()
    assert stream.append(images([5])).classes == ("5",)  # an empty stream takes labels of any kind


@pytest.mark.parametrize(
    ("dataset", "name", "match"),
    [
        (images(["a"]), "first", "a task 'first', so another cannot be named 'first'"),
        (images(["a"]), "First", "a task 'first', so another cannot be named 'First'"),
        (images(["a"]), "a/b", "the name of a task has .* got 'a/b'"),
        (images(["a"]), 1, "the name of a task has .* got 1"),
        ((images(["a"]), images(["b"])), None, "test images of task 'task_1' has values outside .*: 'b'"),
        (images([1]), None, "of the train images of task 'task_1' must hold class names or integers as"),
        (images(["b"], column="picture"), None, r"Column name \['image'\] not in"),
        (images([]), None, "train images of task 'task_1' are none"),
        (images(["a", "cafe\u0301", "café"]), None, "look the same"),
    ],
)
def test_a_refused_task_does_not_change_the_stream(dataset, name, match):
    stream = TaskStream.from_tasks({"first": images(["a"])})
    before = repr(stream)
    with pytest.raises(ValueError, match=match):
        stream.append(dataset, name)
    assert repr(stream) == before


def test_a_task_is_told_of_by_the_name_that_it_has():
    with pytest.raises(ValueError, match="a task 'Birds', so another cannot be named 'birds'"):
        TaskStream.from_tasks({"Birds": images(["a"]), "birds": images(["b"])})


@pytest.mark.parametrize(
    "one",
    [
        "folder",
        datasets.IterableDatasetDict(),
        {"train": images(["a"])},
        {s: images(["a"]) for s in ("train", "test")},
    ],
)
def test_one_dataset_is_not_a_list_of_tasks(one):
    with pytest.raises(ValueError, match=rf"needs a list or a dict of datasets .* found one {type(one).__name__}"):
        TaskStream.from_tasks(one)


# --- labels of other datasets ---


def test_labels_of_other_datasets_are_matched_by_name():
    stream = TaskStream.from_dataset(named("abc", 0, 1, 2), class_order=["c", "a", "b"])
    given = [named("cab", 0, 1, 2), images(["c", "a", "b"])]
    for data in (*given, *(data.rename_column("label", "labels") for data in given)):
        matched = stream.match(data)
        assert matched.features == {"image": Image(), "labels": Value("int64")}
        assert (names_of(stream, matched), matched["labels"][:]) == (["c", "a", "b"], [0, 1, 2])
    numbers = TaskStream.from_dataset(images([3, 5]), class_order=[5, 3])
    assert numbers.match(images([3, 5]))["labels"][:] == [1, 0]
    global_ids = images([1, 0]).rename_column("label", "labels")
    assert stream.match(global_ids) is global_ids
    for data in (images([]), images(["a"]).remove_columns("label"), images([-1, -1]), None, [{"labels": 1}]):
        assert stream.match(data) is data
    with pytest.raises(
        ValueError, match=r"column 'label' of the dataset has values outside the label space .*: 'owl'"
    ):
        stream.match(images(["a", "owl"]))
    with pytest.raises(ValueError, match="has a transform, which would be lost"):
        stream.match(images(["a"]).with_transform(lambda batch: batch))


# --- warnings ---


@pytest.mark.parametrize(
    ("parts", "begin", "shared"),
    [
        ([images([1, 2]), images([0, 1])], 0, "'1'"),
        ([images([0, 1, 2]), images([1, 2])], 1, "'1', '2'"),
        ([images([0], ClassLabel(num_classes=2)), images([0], ClassLabel(num_classes=2))], 0, "'0'"),
        ([images(["0", "10"]), images(["0", "10"])], 0, "'0', '10'"),
    ],
)
def test_numbers_that_begin_again_are_warned_about(parts, begin, shared):
    """Only the user knows whether 0 is the same class in each task."""
    with pytest.warns(
        UserWarning, match=rf"of task 'task_1' begin at {begin}, and {shared} are taken for classes of earl.*names="
    ) as caught:
        TaskStream.from_tasks(parts)
    assert len(caught) == 1


@pytest.mark.parametrize("parts", [[[0, 1], [2, 3]], [[2, 3], [0, 1]], [[5, 6], [5]], [["a", "1"], ["a", "1"]]])
def test_labels_that_continue_are_not_warned_about(parts):
    TaskStream.from_tasks([images(part) for part in parts])


@pytest.mark.parametrize(
    "names",
    [("Cat", "cat"), ("ﬁn", "fin"), ("a\u00a0b", "a b"), ("\ufeffcat", "cat"), ("сат", "cat"), ("ΑΤ", "at")],
    ids=ascii,
)
def test_names_that_differ_only_in_spelling_are_warned_about(names):
    with pytest.warns(UserWarning, match="differ only in case, spaces, invisible characters or letters") as caught:
        stream = TaskStream.from_dataset(images([*names, "dog"]), increment=1)
    assert len(caught) == 1
    assert set(stream.classes) == {*names, "dog"}
    assert all(ascii(name) in str(caught[0].message) for name in names)
    stream.append(images(["owl"]))  # warned once, not at each task
    with pytest.warns(UserWarning, match="'OWL'"):
        stream.append(images(["OWL"]))


@pytest.mark.parametrize("name", ["Cat", "cat ", unicodedata.normalize("NFD", "café")])
def test_a_test_split_that_spells_a_class_differently_is_refused_with_a_hint(name):
    with pytest.raises(ValueError, match=r"outside the label space .*spelled differently: .* for '") as refused:
        TaskStream.from_dataset((images(["cat", "café"]), images([name])))
    assert ascii(name) in str(refused.value)


# --- bad data ---


@pytest.mark.parametrize(
    ("dataset", "arguments", "match"),
    [
        (images(["a"]), {"label_column": "y"}, r"Column name \['y'\] not in the dataset. Current columns"),
        (images(["a"], column="labels"), {}, r"columns \['labels'\] are duplicated"),
        (
            images(["a"]).remove_columns("image"),
            {},
            r"columns of images \[\]; pass image_column, one of \['label'\]",
        ),
        (
            images(["a"]).add_column("b", [{"bytes": PNG, "path": None}], feature=Image()),
            {},
            r"columns of images \['image', 'b'\]; pass",
        ),
        (images(["a", None]), {}, r"column 'label' of the train images is empty \(None\) in 1 rows, first in row 1"),
        (named("ab", 0, None, 1), {}, "first in row 1"),
        (named("ab", 0, 1, -1), {}, "row 2 of column 'label' of the train images is -1, which names no class"),
        (images([0.5], Value("float32")), {}, r"one ClassLabel, integer or string per image, found Value\('float32'"),
        (images([[0, 1]], List(Value("int64"))), {}, "integer or string per image, found List"),
        (images([]), {}, "the train images are none"),
        (images(["a", "b\n"]), {}, "no control characters"),
        (
            (images(["a"]), images(["a", "b"])),
            {},
            "'label' of the test images has values outside .*: 'b'",
        ),
        ((images(["a"]), images([1])), {}, "outside the label space of the train images: '1'"),
        (images([0, 1]), {"increment": 3}, "increment must be a whole number from 1 to the 2 classes, got 3"),
        (images([0, 1]), {"increment": 1, "init_classes": -1}, "init_classes must be .* got -1"),
        (images([0, 1]), {"class_order": [0, 1, 1]}, "each of the 2 .*; missing: none; repeated .*image: '1'"),
        (
            images([0, 1]),
            {"class_order": [0, 2]},
            "class_order .* missing: '1'; repeated or without .* image: '2'",
        ),
        (
            images(["a", "b"]),
            {"class_order": [0, 1]},
            "missing: 'a', 'b'; repeated .* image: '0', '1'",
        ),
        (images([0, 0]), {"test_size": 1.0}, r"test_size must be a share between 0 and 1, got 1\.0"),
        ((images([0]), images([0])), {"test_size": 0.5}, "the dataset has 1 test images; leave out test_size"),
    ],
)
def test_bad_data_is_refused(dataset, arguments, match):
    with pytest.raises(ValueError, match=match):
        TaskStream.from_dataset(dataset, **arguments)


def test_a_missing_image_is_named_by_its_row():
    column = [None, *images(["b", "c"]).with_format("arrow")[:]["image"].to_pylist()]
    data = Dataset.from_dict({"image": column, "label": [*"abc"]}).cast_column("image", Image())
    with pytest.raises(ValueError, match=r"column 'image' is empty \(None\) in 1 rows, first in row 2"):
        TaskStream.from_dataset(data.select([2, 1, 0]))
    assert len(TaskStream.from_dataset(data.select([2, 1]))[0].train) == 2


def test_a_class_label_without_a_name_is_refused():
    data = images([0, 2])
    data.info.features["label"] = ClassLabel(names=["a", "b"])  # as in a file that was written wrongly
    with pytest.raises(ValueError, match="row 1 of column 'label' of the train images is 2, which names no class"):
        TaskStream.from_dataset(data)


def test_files_that_are_both_train_and_test_images_are_refused(tmp_path):
    for name in "12":
        (tmp_path / name).write_bytes(PNG)
    files = {"image": [str(tmp_path / "1"), str(tmp_path / "2")], "label": ["a", "a"]}
    both = Dataset.from_dict(files, Features(image=Image(), label=Value("string")))
    with pytest.raises(ValueError, match=r"1 files are both train and test images, such as .*/2$"):
        TaskStream.from_dataset((both, both.select([1])))
    assert len(TaskStream.from_dataset((both.select([0]), both.select([1])))[0].test) == 1


def test_repr_shows_what_is_in_the_stream():
    data = DatasetDict(train=images(list(range(24)) * 2), test=images(list(range(24))))
    lines = repr(TaskStream.from_dataset(data, increment=2, seed=None)).split("\n")
    assert lines[0] == "TaskStream: 12 tasks, 24 classes, 48 train and 24 test images"
    assert lines[1] == "  task_0: 2 classes ('0', '1'), 4 train and 2 test images"
    assert lines[-1] == "  ... and 2 more tasks"
    assert "('0', '1', '2' and 21 more), 48 train and 0 test" in repr(
        TaskStream.from_dataset(data["train"], seed=None)
    )
