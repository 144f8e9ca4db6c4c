"""Shared helpers: errors, names of classes and experts, text for messages, atomic writes and the lock of a folder."""

from __future__ import annotations

import errno
import json
import os
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError


# The name of an expert, and of its task, is an adapter name in PEFT, a module name in torch and a folder on any disk.
NAME_RULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
MAX_CLASS_NAME = 1000  # characters
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# Cyrillic and Greek letters that look like Latin ones, in small letters.
LOOKALIKES = str.maketrans("аеорсухіјѕһԁԛԝвкмнтαβεζηικμνορτυχ", "aeopcyxijshdqwbkmhtabezhikmvoptux")
LOCK_NAME = ".lock"
LOCK_SECONDS = 10.0  # workers of a killed run may hold its lock for a few seconds more


class InvalidExpertError(ValueError):
    """A file of an expert, or of a collection of experts, is not valid. Nothing was loaded from it."""


def pluralize(count: int, noun: str) -> str:
    """Returns a count with its noun: `1 class`, `2 classes`."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{count} {noun if count == 1 else plural}"


def list_names(names: Iterable[Any], limit: int = 10) -> str:
    """Returns the first names for a message, and how many more there are: `'a', 'b' and 3 more`."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more


def show(value: Any) -> str:
    """Returns an untrusted value for a message: as ASCII, and shortened to 200 characters."""
    try:
        text = ascii(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}…"


def check_classes(classes: Any) -> list[str]:
    """Checks class names and returns them as a list. They must be distinct strings that can be displayed."""
    if isinstance(classes, (str, set, frozenset)) or not isinstance(classes, Iterable):
        kind = "the string " if isinstance(classes, str) else ""
        raise ValueError(f"classes must be a list of class names, got {kind}{classes!r}.")
    names = list(classes)
    if not names:
        raise ValueError("classes is empty, but an expert needs at least one class.")
    if wrong := [name for name in names if not isinstance(name, str) or not name.strip()]:
        raise ValueError(f"class names must be non-empty strings, got {wrong[:5]!r}.")
    if wrong := [name for name in names if len(name) > MAX_CLASS_NAME or CONTROL_CHARACTERS.search(name)]:
        rule = f"at most {MAX_CLASS_NAME} characters and no control characters"
        raise ValueError(f"class names have {rule}, got {show(wrong[0])}.")
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"each class may be named once in an expert, but these are repeated: {repeated[:5]!r}.")
    forms = Counter(unicodedata.normalize("NFC", name) for name in names)
    if alike := [ascii(name) for name in names if forms[unicodedata.normalize("NFC", name)] > 1]:
        raise ValueError(
            f"these class names look the same and differ only in their Unicode form: {', '.join(alike[:5])}. Bring "
            "all names to one form with unicodedata.normalize('NFC', name)."
        )
    return names


def spelling(name: str) -> str:
    """Returns a name without differences that are easily missed: case, spaces, invisible characters, alike letters."""
    visible = (c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) != "Cf")
    return " ".join("".join(visible).casefold().translate(LOOKALIKES).split())


def warn_about_spellings(names: Iterable[str], known: Iterable[str], remedy: str = "", stacklevel: int = 3) -> None:
    """Warns about new names that differ from others only in spelling: a mistake, or really two classes."""
    spellings: dict[str, list[str]] = {}
    for name in names:
        spellings.setdefault(spelling(name), []).append(name)
    alike = [found for found in spellings.values() if len(found) > 1 and not set(found) <= set(known)]
    if alike:
        found = "; ".join(map(ascii, alike[:5]))
        text = f"class names differ only in case, spaces, invisible characters or letters that look alike: {found}"
        warnings.warn(text + remedy, stacklevel=stacklevel)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to. It replaces `path` when the block ends, and is removed if that fails."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        yield temporary
        with open(temporary, "rb") as content:
            os.fsync(content.fileno())
        os.replace(temporary, path)
        if os.name == "posix":  # the renaming must reach the disk too
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file atomically."""
    with atomic_write(path) as temporary:
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        temporary.write_text(f"{text}\n", encoding="utf-8")


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Adds to errors of the disk which file could not be written, and what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        text = f"cannot write {path}: {why}. What was finished before is kept: make room, or make the folder writable"
        raise OSError(getattr(error, "errno", None) or errno.EIO, text) from error


@contextmanager
def hold_lock(lock: FileLock) -> Iterator[None]:
    """Holds the lock of a run's folder. The system releases it when the process ends, however it ends."""
    path = Path(lock.lock_file)
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout as error:
            message = f"another run is at work in {path.parent}. Wait for its end, or choose another output_dir."
            raise RuntimeError(message) from error
    try:
        yield
    finally:
        if lock.lock_counter == 1:
            path.unlink(missing_ok=True)  # while it is held: a process that has just opened it sees that it is gone
        lock.release()
