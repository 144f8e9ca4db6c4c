"""Class names, text for messages, atomic writes and the lock of a folder."""

import os

import pytest
from filelock import FileLock
from helpers import files_in, read_json

from peft_luca import utils
from peft_luca.utils import (
    MAX_CLASS_NAME,
    NAME_RULE,
    atomic_write,
    check_classes,
    explain_write_errors,
    hold_lock,
    list_names,
    pluralize,
    show,
    write_json,
)


def test_text_for_messages():
    assert [pluralize(1, "class"), pluralize(2, "class"), pluralize(0, "task")] == ["1 class", "2 classes", "0 tasks"]
    assert list_names("abc") == "'a', 'b', 'c'"
    assert list_names((str(i) for i in range(5)), 2) == "'0', '1' and 3 more"
    assert show("é\n") == r"'\xe9\n'"
    assert show("a" * 300) == "'" + "a" * 199 + "…"
    nested = []
    for _ in range(10_000):
        nested = [nested]
    assert show(nested) == "a deeply nested list"


def test_names_of_experts_are_names_of_folders_and_modules():
    assert all(NAME_RULE.fullmatch(name) for name in ("a", "1-b_C", "a" * 128))
    assert not any(NAME_RULE.fullmatch(name) for name in ("", "-a", "a.b", "a/b", "a\n", "é", "a" * 129))


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (3, "must be a list of class names, got 3"),
        ("cat", "must be a list of class names, got the string 'cat'"),
        ({"cat"}, "must be a list of class names, got {'cat'}"),
        ([], "classes is empty"),
        (["a", 3], r"class names must be non-empty strings, got \[3\]"),
        (["a", " \u00a0"], "class names must be non-empty strings"),
        (["a\nb"], r"no control characters, got 'a\\nb'"),
        (["a\x00"], "no control characters"),
        (["a" * (MAX_CLASS_NAME + 1)], "at most 1000 characters"),
        (["a", "b", "a"], r"each class may be named once in an expert, but these are repeated: \['a'\]"),
        (["café", "cafe\u0301"], r"look the same.*'cafe\\u0301'.*unicodedata\.normalize\('NFC', name\)"),
    ],
)
def test_bad_class_names_are_refused(classes, message):
    with pytest.raises(ValueError, match=message):
        check_classes(classes)


def test_a_write_that_fails_changes_nothing(tmp_path):
    path = tmp_path / "a"
    with atomic_write(path) as temporary:
        temporary.write_text("first")
        assert not path.exists()

    def fail():
        with atomic_write(path) as temporary:
            temporary.write_text("second")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "first"
    assert files_in(tmp_path) == ["a"]
    write_json(path, {"é": [1]})
    assert read_json(path) == {"é": [1]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, float("nan"))
    assert read_json(path) == {"é": [1]}


def test_errors_of_the_disk_name_the_file(tmp_path):
    with pytest.raises(OSError, match=r"cannot write .*/a: No space left on device. What was finished before is kept"):
        with explain_write_errors(tmp_path / "a"):
            raise OSError(28, os.strerror(28))


def test_one_run_at_a_time_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(utils, "LOCK_SECONDS", 0.01)
    path = tmp_path / "out" / ".lock"
    first, second = FileLock(path), FileLock(path)
    with hold_lock(first), hold_lock(first):  # a run may enter again
        with pytest.raises(RuntimeError, match=r"another run is at work in .*out.* choose another output_dir"):
            with hold_lock(second):
                pass
    assert not path.exists()
    with hold_lock(second):
        assert path.exists()
