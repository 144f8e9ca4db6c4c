"""What every part uses: names of classes and experts, errors, and files that are written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError


# Names of experts, and so of tasks: adapters of PEFT, modules of torch, folders on any disk.
NAME_RULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
# Class names end in labels, in cards and on screens.
MAX_CLASS_NAME = 1000
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
LOCK_NAME = ".lock"
# A run that was killed may leave workers that hold its lock for some seconds more.
LOCK_SECONDS = 10.0


class InvalidExpertError(ValueError):
    """A file of an expert, or of a collection of them, is not what it should be. Nothing was made of it."""


def pluralize(count: int, noun: str) -> str:
    """`1 class`, `2 classes`."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{count} {noun if count == 1 else plural}"


def check_classes(classes: Any) -> list[str]:
    """
    The class names as a list, checked: not empty, all different, and strings that labels, cards and screens can show.

    Raises:
        ValueError: with the names that are not.
    """
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        kind = "the string " if isinstance(classes, str) else ""
        raise ValueError(f"classes must be a list of class names, got {kind}{classes!r}.")
    if isinstance(classes, (set, frozenset)):
        raise ValueError(f"classes must be in an order, that of the expert's rows, but a set has none: {classes!r}.")
    names = list(classes)
    if not names:
        raise ValueError("classes is empty, but an expert needs at least one class.")
    wrong = [name for name in names if not isinstance(name, str) or not name.strip()]
    if wrong:
        raise ValueError(f"class names must be non-empty strings, got {wrong[:5]!r}.")
    unfit = [name for name in names if len(name) > MAX_CLASS_NAME or CONTROL.search(name)]
    if unfit:
        raise ValueError(
            f"class names have at most {MAX_CLASS_NAME} characters and no control characters, got "
            f"{ascii(unfit[0])[:200]}."
        )
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"each class may be named once in an expert, but these come more than once: {twice[:5]!r}.")
    forms = Counter(unicodedata.normalize("NFC", name) for name in names)
    alike = [ascii(name) for name in names if forms[unicodedata.normalize("NFC", name)] > 1]
    if alike:
        raise ValueError(
            f"these class names look the same, and differ by their Unicode form only: {', '.join(alike[:5])}. Bring "
            "all names to one form with unicodedata.normalize('NFC', name)."
        )
    return names


def list_names(names: Iterable[Any], limit: int = 10) -> str:
    """Returns the first names for a message, and how many more there are: `'a', 'b' and 3 more`."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more


def show(value: Any) -> str:
    """A stranger's value in a message: escaped, and not at length."""
    try:
        text = ascii(value)
    except RecursionError:
        text = f"a {type(value).__name__} of very many levels"
    return text if len(text) <= 200 else f"{text[:200]}…"


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A name to write to, that becomes the file once it is written and on the disk; or nothing does."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        yield temporary
        with open(temporary, "rb") as content:
            os.fsync(content.fileno())
        os.replace(temporary, path)
        if os.name == "posix":  # the new name, too, has to be on the disk
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Errors of the disk say which file could not be written, and what is to be done."""
    try:
        yield
    except TimeoutError:
        raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OSError(
            getattr(error, "errno", None) or errno.EIO,
            f"cannot write {path}: {reason}. What was finished before is kept: make room, or make the folder "
            "writable, and start again",
        ) from error


@contextmanager
def hold_lock(lock: FileLock) -> Iterator[None]:
    """
    Holds the lock of a run's folder, which goes with the process however that ends.

    Raises:
        RuntimeError: another run holds it.
    """
    path = Path(lock.lock_file)
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout as error:
            raise RuntimeError(
                f"another run is at work in {path.parent}, and two would overwrite each other's experts. Wait until "
                "it has ended, or choose another output_dir."
            ) from error
    try:
        yield
    finally:
        if lock.lock_counter == 1:
            path.unlink(missing_ok=True)  # while it is held: whoever has opened it meanwhile sees that it is gone
        lock.release()


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole or not at all."""
    with atomic_write(path) as temporary:
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        temporary.write_text(f"{text}\n", encoding="utf-8")
