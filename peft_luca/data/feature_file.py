"""Arrow files of features ([CLS] vectors): reading a finished file, and writing one that can be interrupted."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from datasets.arrow_writer import ArrowWriter
from filelock import FileLock
from torch import Tensor

from ..utils import atomic_write, explain_write_errors, write_json


# Storage types: their names in Arrow, in numpy and in torch. Arrow has no bfloat16, so its bits are stored.
STORAGE = {
    "float32": ("float32", np.float32, torch.float32),
    "float16": ("float16", np.float16, torch.float16),
    "bfloat16": ("uint16", np.uint16, torch.bfloat16),
}
CHECKPOINT_SECONDS = 10.0  # time between two checkpoints of a partial file


def read_features(path: Path) -> tuple[Tensor, Tensor]:
    """Returns the features (images, d) and row numbers (images,) of a file, as views of its memory map."""
    table = datasets.Dataset.from_file(str(path)).data
    (chunk,) = table.column("features").chunks
    numpy_type, torch_type = {pa.type_for_alias(a): (n, t) for a, n, t in STORAGE.values()}[chunk.type.value_type]
    values = np.frombuffer(chunk.values.buffers()[1], numpy_type, len(chunk.values))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        features = torch.from_numpy(values.reshape(len(chunk), chunk.type.list_size)).view(torch_type)
        return features, torch.from_numpy(table.column("row").to_numpy())


class PartialFeatures:
    """
    A feature file in the making. One process at a time holds it, and checkpoints it every few seconds: the features in
    `.partial`, the number of rows done and the bad rows (whose image cannot be read) in `.partial.json`.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self.path = path
        self.arrow_type, self.numpy_type, _ = STORAGE[dtype]
        self.data_path, self.state_path = path.with_suffix(".partial"), path.with_suffix(".partial.json")
        state: dict[str, Any] = {"rows": 0, "width": 0, "bad": []}
        if self.data_path.is_file() and self.state_path.is_file():
            state = json.loads(self.state_path.read_text(encoding="utf-8"))
        self.rows, self.width, self.bad = state["rows"], state["width"], state["bad"]
        self.file: IO[bytes] = open(self.data_path, "r+b" if self.rows else "wb", buffering=0)
        self._last_checkpoint = time.monotonic()

    @staticmethod
    def is_finished(path: Path) -> bool:
        """Whether the file is complete, and nothing is left to clean up."""
        return path.is_file() and not path.with_suffix(".lock").exists()

    @classmethod
    @contextmanager
    def open(cls, path: Path, dtype: str) -> Iterator[PartialFeatures | None]:
        """Opens a partial feature file, once no other process holds it. Yields `None` if another has finished it."""
        with explain_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            held = FileLock(path.with_suffix(".lock")).acquire()
        with held:
            if path.is_file():
                cls._clean_up(path)
                yield None
            else:
                partial = cls(path, dtype)
                with partial.file:
                    yield partial

    def truncate(self, rows: int) -> None:
        """Drops everything after the first `rows` rows."""
        self.rows, self.bad = rows, [row for row in self.bad if row < rows]
        self.file.truncate((rows - len(self.bad)) * self.width * np.dtype(self.numpy_type).itemsize)
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
        """Writes the Arrow file, in one chunk so that one view of its memory map has all features."""
        rows = np.setdiff1d(np.arange(self.rows), self.bad)
        if not len(rows):
            raise ValueError(f"none of the {self.rows} images can be read. Check where they are stored.")
        values = np.memmap(self.data_path, self.numpy_type, "r", shape=(len(rows) * self.width,))
        features = pa.Array.from_buffers(pa.type_for_alias(self.arrow_type), len(values), [None, pa.py_buffer(values)])
        table = pa.table({"features": pa.FixedSizeListArray.from_arrays(features, self.width), "row": pa.array(rows)})
        columns = datasets.Features.from_arrow_schema(table.schema)
        with explain_write_errors(self.path), atomic_write(self.path) as temporary:
            writer = ArrowWriter(features=columns, path=str(temporary))
            writer.write_table(table, writer_batch_size=len(rows))
            writer.finalize()
        self._clean_up(self.path)

    @staticmethod
    def _clean_up(path: Path) -> None:
        """Removes the partial files. The lock goes last, because it shows that there is something to clean up."""
        for suffix in (".partial", ".partial.json", ".lock"):
            path.with_suffix(suffix).unlink(missing_ok=True)
