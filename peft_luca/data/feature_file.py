"""Files of features ([CLS] vectors): reading a finished file, and writing one that can be interrupted."""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np
import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..utils import atomic_write, explain_write_errors, write_json


STORAGE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CHECKPOINT_SECONDS = 10.0  # time between two checkpoints of a partial file


def read_features(path: Path, check: bool = False) -> tuple[Tensor, Tensor]:
    """
    Returns the features (images, d) and row numbers (images,) of a file, as views of its memory map. With `check` it
    raises if the content is not that which was written under this name.
    """
    with safe_open(path, "pt") as file:
        features, rows = file.get_tensor("features"), file.get_tensor("rows")
        if check and (file.metadata() or {}).get("digest") != _digest(path, features, rows):
            raise ValueError("its digest differs")
        return features, rows


def _digest(path: Path, features: Tensor, rows: Tensor) -> str:
    digest = hashlib.sha256(f"{path.stem} {features.dtype} {tuple(features.shape)}".encode())
    for tensor in (features, rows):
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def is_whole(path: Path) -> bool:
    """Whether there is a feature file, as it was written. A spoilt one is warned about."""
    if not path.is_file():
        return False
    try:
        read_features(path, check=True)
    except Exception as error:  # of many kinds, for a broken file
        warnings.warn(f"{path} is spoilt, and its features are computed again: {error!r}.", stacklevel=2)
        return False
    return True


class PartialFeatures:
    """
    A feature file in the making. One process at a time holds it, and checkpoints it every few seconds: the features in
    `.partial`, the number of rows done and the bad rows (whose image cannot be read) in `.partial.json`.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self.path = path
        self.dtype = STORAGE[dtype]
        self.data_path, self.state_path = path.with_suffix(".partial"), path.with_suffix(".partial.json")
        self.rows, self.width, self.bad = 0, 0, []
        with suppress(OSError, ValueError, KeyError, TypeError):  # without a sound checkpoint it starts again
            state = json.loads(self.state_path.read_text(encoding="utf-8"))
            size = (state["rows"] - len(state["bad"])) * state["width"] * self.dtype.itemsize
            if 0 <= size <= self.data_path.stat().st_size:
                self.rows, self.width, self.bad = state["rows"], state["width"], state["bad"]
        self.file: IO[bytes] = open(self.data_path, "r+b" if self.rows else "wb", buffering=0)
        self._last_checkpoint = time.monotonic()

    @staticmethod
    def is_finished(path: Path) -> bool:
        """Whether the file is complete, and nothing is left to clean up."""
        return is_whole(path) and not path.with_suffix(".lock").exists()

    @classmethod
    @contextmanager
    def open(cls, path: Path, dtype: str) -> Iterator[PartialFeatures | None]:
        """Opens a partial feature file, once no other process holds it. Yields `None` if another has finished it."""
        with explain_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            held = FileLock(path.with_suffix(".lock")).acquire()
        with held:
            if is_whole(path):
                cls._clean_up(path)
                yield None
            else:
                partial = cls(path, dtype)
                with partial.file:
                    yield partial

    def truncate(self, rows: int) -> None:
        """Drops everything after the first `rows` rows."""
        self.rows, self.bad = rows, [row for row in self.bad if row < rows]
        self.file.truncate((rows - len(self.bad)) * self.width * self.dtype.itemsize)
        self.file.seek(0, os.SEEK_END)

    def append(self, rows: int, features: Tensor | None, bad: list[int]) -> None:
        """Adds the next `rows` rows: the features (readable rows, d), if any, and the numbers of the bad rows."""
        with explain_write_errors(self.path):
            if features is not None:
                self.width = features.shape[1]
                content = features.view(torch.uint8).numpy().data.cast("B")
                while content:  # on a disk that is nearly full a write stores only a part, and the next one fails
                    content = content[self.file.write(content) :]
            self.rows += rows
            self.bad += bad
            if time.monotonic() - self._last_checkpoint > CHECKPOINT_SECONDS:
                os.fsync(self.file.fileno())
                write_json(self.state_path, {"rows": self.rows, "width": self.width, "bad": self.bad})
                self._last_checkpoint = time.monotonic()

    def finish(self) -> None:
        """Writes the file."""
        rows = torch.from_numpy(np.setdiff1d(np.arange(self.rows), self.bad))
        if not len(rows):
            raise ValueError(f"none of the {self.rows} images can be read. Check where they are stored.")
        # A memory map, so that features of any size can be written.
        features = torch.from_file(str(self.data_path), size=len(rows) * self.width, dtype=self.dtype)
        tensors = {"features": features.view(len(rows), self.width), "rows": rows}
        with explain_write_errors(self.path), atomic_write(self.path) as temporary:
            save_file(tensors, temporary, {"digest": _digest(self.path, *tensors.values())})
        self._clean_up(self.path)

    @staticmethod
    def _clean_up(path: Path) -> None:
        """Removes the partial files. The lock goes last, because it shows that there is something to clean up."""
        for suffix in (".partial", ".partial.json", ".lock"):
            path.with_suffix(suffix).unlink(missing_ok=True)
