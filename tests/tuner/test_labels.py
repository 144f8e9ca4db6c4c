"""Labels as users have them: each is the class that was meant, or the stream says what it took it for."""

import unicodedata
import warnings

import pytest
from datasets import ClassLabel, DatasetDict, List, Value
from helpers import NAMES, make_images, make_splits, make_trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_task_stream import images, named, names_of

from peft_luca import LucaConfig, TaskStream
from peft_luca.utils import MAX_CLASS_NAME, check_classes


@pytest.fixture(autouse=True)
def no_warning_that_is_not_expected():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def test_integer_labels_that_start_at_one_or_have_gaps():
    stream = TaskStream.from_dataset((images([1, 2, 3, 7, 7]), images([7, 1])), increment=2, seed=None)
    assert [task.classes for task in stream] == [("1", "2"), ("3", "7")]
    assert [task.train["labels"][:] for task in stream] == [[0, 1], [2, 3, 3]]
    assert [names_of(stream, task.test) for task in stream] == [["1"], ["7"]]


def test_class_labels_with_gaps_whose_test_split_lacks_some_and_orders_them_otherwise():
    data = DatasetDict(train=named("abcdef", 5, 1, 3), test=named("fdx", 1, 0, 0))
    stream = TaskStream.from_dataset(data, increment=1, seed=None)
    assert [task.classes for task in stream] == [("b",), ("d",), ("f",)]
    assert [None if task.test is None else names_of(stream, task.test) for task in stream] == [None, ["d"], ["f", "f"]]


AGAIN = [
    ([[0, 1, 1], [1, 0]], "begin at 0, and 0, 1 are labels"),
    ([[0, 1], [0, 1, 2]], "begin at 0, and 0, 1 are labels"),  # of more classes than there were
    ([[0, 1, 2], [0, 3]], "begin at 0, and 0 are labels"),
    ([[1, 2], [1, 2, 3]], "begin at 1, and 1, 2 are labels"),  # and so where they are counted from 1
    ([[1, 2], [0, 1]], "begin at 0, and 1 are labels"),  # or one task from 1 and another from 0
]


@pytest.mark.parametrize(("parts", "message"), AGAIN)
def test_labels_that_start_again_are_told(parts, message):
    """Whether 0 is the same class in every task, only the user knows."""
    with pytest.warns(UserWarning, match=rf"of task 'task_1' {message} of earlier.*ClassLabel\(names=\[") as told:
        stream = TaskStream.from_tasks([images(part) for part in parts])
    assert len(told) == 1
    assert set(stream.classes) == {str(label) for part in parts for label in part}


@pytest.mark.parametrize("parts", [[[0, 1], [2, 3], [1, 2]], [[2, 3], [0, 1]], [[5, 6], [5]], [[0], [1], [2]]])
def test_labels_that_go_on_are_not_told(parts):
    assert TaskStream.from_tasks([images(part) for part in parts]).classes[0] == str(parts[0][0])


def test_names_that_start_again_are_names():
    other = images([0, 1], ClassLabel(names=["oak", "fir"]))
    assert TaskStream.from_tasks([named("ab", 0, 1), other]).classes == ("a", "b", "oak", "fir")
    assert TaskStream.from_tasks([named("01", 0, 1), named("01", 0, 1)]).classes == ("0", "1")


def test_a_class_that_comes_back_is_one_class(tmp_path):
    stream = TaskStream.from_tasks([make_splits(NAMES[:2]), make_splits(NAMES[2:4]), make_splits(NAMES[:2], seed=3)])
    trainer = make_trainer(tmp_path, stream, num_train_epochs=1)
    trainer.train()
    assert trainer.tuner.classes == NAMES[:4]
    assert trainer.results()["last_accuracy"] > 0.8


@pytest.mark.parametrize("router", ["entropy", "gaussian", "prototype", "hybrid"])
def test_classes_with_one_image_each(tmp_path, router):
    stream = TaskStream.from_tasks([make_splits([name], 1, 2) for name in NAMES[:3]])
    trainer = make_trainer(tmp_path, stream, router=router)
    trainer.train()
    assert trainer.results()["task_known_accuracy"] == 1.0
    assert all(0 <= value <= 1 for value in trainer.results()["per_task_accuracy"])


SPELLINGS = [("Cat", "cat"), ("cat ", "cat"), ("big  cat", "big cat"), ("ﬁn", "fin"), ("STRASSE", "straße")]
SPELLINGS += [("a\u00a0b", "a b"), ("\ufeffcat", "cat"), ("ca\u200bt", "cat")]  # of which nobody sees a thing


@pytest.mark.parametrize("names", SPELLINGS)
def test_names_that_differ_by_spelling_are_two_classes_and_told(names):
    with pytest.warns(UserWarning, match="same but for capital letters, spaces, letters that nobody sees or") as told:
        stream = TaskStream.from_dataset(images([*names, "dog"]), increment=1)
    assert len(told) == 1
    assert set(stream.classes) == {*names, "dog"}
    assert all(repr(name) in str(told[0].message) for name in names)
    stream.append(images(["owl"]))  # told once, not at every task
    with pytest.warns(UserWarning, match="'OWL'"):
        stream.append(images(["OWL"]))


def test_names_that_differ_by_their_unicode_form_are_refused():
    composed, decomposed = "café", unicodedata.normalize("NFD", "café")
    with pytest.raises(ValueError, match=r"look the same.*'cafe\\u0301'.*unicodedata\.normalize\('NFC', name\)"):
        TaskStream.from_dataset(images([composed, decomposed]))
    stream = TaskStream.from_dataset(images([composed]))
    with pytest.raises(ValueError, match="look the same"):
        stream.append(images([decomposed]))
    assert stream.classes == (composed,)
    with pytest.raises(ValueError, match="look the same"):
        LucaConfig(classes=[composed, decomposed])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "class names must be non-empty strings"),
        (" \u00a0", "class names must be non-empty strings"),
        ("a\nb", r"no control characters, got 'a\\nb'"),
        ("a\x00", "no control characters"),
        ("a" * (MAX_CLASS_NAME + 1), "at most 1000 characters"),
    ],
)
def test_names_that_no_file_may_hold_are_refused_before_anything_is_trained(name, message):
    with pytest.raises(ValueError, match=message):
        TaskStream.from_dataset(images([name, "b"]))
    with pytest.raises(ValueError, match=message):
        LucaConfig(classes=[name, "b"])
    assert TaskStream.from_dataset(images(["a" * MAX_CLASS_NAME])).classes == ("a" * MAX_CLASS_NAME,)


def test_none_is_no_label():
    for labels, feature in (([None, "a"], Value("string")), ([None, 0], Value("int64"))):
        with pytest.raises(
            ValueError, match=r"column 'label' of the train images is empty \(None\) in 1 rows.* row 0"
        ):
            TaskStream.from_dataset(images(labels, feature))


@pytest.mark.parametrize(
    "feature", [List(Value("int64")), List(Value("int64"), length=2), List(ClassLabel(names=["a", "b"]))]
)
def test_several_labels_an_image_are_refused(feature):
    with pytest.raises(ValueError, match=r"must hold one ClassLabel, integer or string per image, found List"):
        TaskStream.from_dataset(images([[0, 1]], feature))


def test_a_list_of_one_label_is_a_list():
    for feature in (List(Value("int64")), List(Value("string"), length=1)):
        with pytest.raises(ValueError, match=r"one ClassLabel, integer or string per image, found List.* or map it"):
            TaskStream.from_dataset(images([["1"]] if feature.length == 1 else [[1]], feature))


def test_labels_of_any_width():
    for kind in ("int8", "uint16", "int32", "uint64"):
        assert TaskStream.from_dataset(images([3, 200 % 128], Value(kind)), seed=None).classes == ("3", "72")
    assert TaskStream.from_dataset(images(["b", "a"], Value("large_string")), seed=None).classes == ("a", "b")


def test_images_of_the_test_split_alone_are_refused():
    with pytest.raises(ValueError, match="outside the label space, which no train image has: green"):
        TaskStream.from_dataset(DatasetDict(train=make_images(NAMES[:1]), test=make_images(NAMES[:2])))


@pytest.mark.parametrize("name", ["Cat", "cat ", unicodedata.normalize("NFD", "café")])
def test_a_test_split_that_spells_otherwise_is_told_how(name):
    """As when one of the two was zipped on another system."""
    with pytest.raises(ValueError, match=r"which no train image has.*spelt in another way: .* for '") as told:
        TaskStream.from_dataset((images(["cat", "café"]), images([name])))
    assert ascii(name) in str(told.value)


# --- whatever the names ---

NAME = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=8).filter(str.strip)
LABEL_SPACES = st.lists(NAME, min_size=1, max_size=12, unique_by=lambda name: unicodedata.normalize("NFC", name))


@settings(max_examples=60, deadline=None)
@given(names=LABEL_SPACES, data=st.data())
def test_a_label_space_is_any_names_in_the_order_of_their_first_image(names, data):
    rows = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=20))
    parts = data.draw(
        st.integers(1, len(rows)).map(lambda size: [rows[i : i + size] for i in range(0, len(rows), size)])
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stream = TaskStream.from_tasks([images(part) for part in parts])
    assert set(stream.classes) == set(rows)
    assert stream.classes == tuple(dict.fromkeys(name for task in stream for name in task.classes))
    for task, part in zip(stream, parts, strict=True):
        assert names_of(stream, task.train) == part
        assert task.classes == tuple(sorted(set(part)))


@settings(max_examples=60, deadline=None)
@given(names=LABEL_SPACES, data=st.data())
def test_no_order_of_tasks_changes_what_a_task_is(names, data):
    tasks = {
        f"t{i}": images([name, *data.draw(st.lists(st.sampled_from(names), max_size=3))])
        for i, name in enumerate(names)
    }
    order = data.draw(st.permutations(list(tasks)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, other = TaskStream.from_tasks(tasks), TaskStream.from_tasks({name: tasks[name] for name in order})
    assert set(one.classes) == set(other.classes)
    by_name = {task.name: task for task in other}
    for task in one:
        assert task.classes == by_name[task.name].classes
        assert names_of(one, task.train) == names_of(other, by_name[task.name].train)
    for task in reversed(list(one)):
        assert one.pop() is task
    assert (len(one), one.classes) == (0, ())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=4), max_size=6))
def test_class_names_are_kept_as_they_are_or_refused(names):
    try:
        kept = check_classes(names)
    except ValueError:
        kept = None
    assert kept is None or kept == names
    sound = bool(names) and all(name.strip() and name.isprintable() for name in names)
    if sound and len({unicodedata.normalize("NFC", name) for name in names}) == len(names):
        assert kept == names
