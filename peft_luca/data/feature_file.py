"""The Arrow files in which [CLS] is kept."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import datasets
import numpy as np
import pyarrow as pa
import torch
from datasets.arrow_writer import ArrowWriter
from filelock import FileLock
from torch import Tensor

from ..utils import atomic_write, explain_write_errors


# How [CLS] may be stored: the type in the Arrow file, in numpy and in torch. Arrow has no bfloat16: its bits are kept.
STORAGE = {
    "float32": ("float32", np.float32, torch.float32),
    "float16": ("float16", np.float16, torch.float16),
    "bfloat16": ("uint16", np.uint16, torch.bfloat16),
}
CHECKPOINT_SECONDS = 10.0  # while [CLS] is computed, how far it has come is written down this often


def read_features(path: Path) -> tuple[Tensor, Tensor]:
    """[CLS] (images, d) and row numbers (images,) from a file, as views of its memory map."""
    table = datasets.Dataset.from_file(str(path)).data
    (chunk,) = table.column("features").chunks
    numpy_type, torch_type = {pa.type_for_alias(a): (n, t) for a, n, t in STORAGE.values()}[chunk.type.value_type]
    values = np.frombuffer(chunk.values.buffers()[1], numpy_type, len(chunk.values))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        features = torch.from_numpy(values.reshape(len(chunk), chunk.type.list_size)).view(torch_type)
        return features, torch.from_numpy(table.column("row").to_numpy())


def is_finished(path: Path) -> bool:
    """Whether a file of [CLS] is complete, and nothing is left of its making, as a kill right at its end leaves it."""
    return path.is_file() and not path.with_suffix(".lock").exists()


def clear_away(path: Path) -> None:
    """Remove what a complete file of [CLS] was made of; the lock last, which says that there is something."""
    for suffix in (".partial", ".partial.json", ".lock"):
        path.with_suffix(suffix).unlink(missing_ok=True)


class PartialFeatures:
    """[CLS] vectors in a file that is not complete yet: held by one process at a time, written down now and then."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self.dtype = path, dtype
        self.data, self.state = path.with_suffix(".partial"), path.with_suffix(".partial.json")
        self.rows, self.width = 0, 0
        self.bad: list[int] = []
        if self.data.is_file() and self.state.is_file():
            state = json.loads(self.state.read_text(encoding="utf-8"))
            self.rows, self.width, self.bad = state["rows"], state["width"], state["bad"]
        self.file: IO[bytes]
        self._written_down = time.monotonic()

    @classmethod
    @contextmanager
    def of(cls, path: Path, dtype: str, timeout: float = -1) -> Iterator[PartialFeatures | None]:
        """What there is of a file; `None` if it is complete once other processes have let go of it."""
        lock = FileLock(path.with_suffix(".lock"), timeout=timeout)
        with explain_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        try:
            if path.is_file():
                clear_away(path)
                yield None
                return
            with explain_write_errors(path):
                partial = cls(path, dtype)
                partial.file = open(partial.data, "r+b" if partial.rows else "wb", buffering=0)
            with partial.file:
                yield partial
        finally:
            lock.release()

    def go_back_to(self, rows: int) -> None:
        """Forget what comes after a row."""
        self.rows, self.bad = rows, [row for row in self.bad if row < rows]
        self.file.truncate((rows - len(self.bad)) * self.width * np.dtype(STORAGE[self.dtype][1]).itemsize)
        self.file.seek(0, os.SEEK_END)

    def append(self, rows: int, vectors: Tensor | None, bad: list[int]) -> None:
        with explain_write_errors(self.path):
            if vectors is not None:
                self.width = vectors.shape[1]
                content = vectors.view(torch.uint8).numpy().data.cast("B")
                while content:  # a write to a disk that is filling up takes a part only, and the next one fails
                    content = content[self.file.write(content) :]
            self.rows += rows
            self.bad += bad
            if time.monotonic() - self._written_down > CHECKPOINT_SECONDS:
                self._write_down()

    def _write_down(self) -> None:
        os.fsync(self.file.fileno())
        state = {"rows": self.rows, "width": self.width, "bad": self.bad}
        with atomic_write(self.state) as temporary:
            temporary.write_text(json.dumps(state), encoding="utf-8")
        self._written_down = time.monotonic()

    def finish(self) -> None:
        """Make it the file, in one piece, so that all of it is one view of the memory map."""
        rows = np.setdiff1d(np.arange(self.rows), self.bad)
        if not len(rows):
            raise ValueError(
                f"none of the {self.rows} images can be read: look at where they lie, and at one of them."
            )
        arrow_type, numpy_type, _ = STORAGE[self.dtype]
        values = np.memmap(self.data, numpy_type, "r", shape=(len(rows) * self.width,))
        vectors = pa.Array.from_buffers(pa.type_for_alias(arrow_type), len(values), [None, pa.py_buffer(values)])
        table = pa.table({"features": pa.FixedSizeListArray.from_arrays(vectors, self.width), "row": pa.array(rows)})
        columns = {
            "features": datasets.List(datasets.Value(arrow_type), length=self.width),
            "row": datasets.Value("int64"),
        }
        with explain_write_errors(self.path), atomic_write(self.path) as temporary:
            writer = ArrowWriter(features=datasets.Features(columns), path=str(temporary))
            writer.write_table(table, writer_batch_size=len(rows))
            writer.finalize()
        clear_away(self.path)
