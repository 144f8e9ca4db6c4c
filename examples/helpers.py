"""What the small examples share: the bundled backbone, and a run over a stream."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp

from cil import BUNDLED_BACKBONE, digits, load_backbone
from datasets import Dataset
from transformers import AutoImageProcessor

from peft_luca import ContinualTrainer, ContinualTrainingArguments, TaskStream


def some_digits(*wanted: int) -> Dataset:
    """The images of some digits, whose names are "0" to "9"."""
    return digits().filter(lambda label: label in wanted, input_columns="label")


def learn(stream: TaskStream, folder: str | Path | None = None, **arguments: object) -> ContinualTrainer:
    """A trainer that has learned the stream, in a new folder unless one is given."""
    trainer = ContinualTrainer(
        model=load_backbone(str(BUNDLED_BACKBONE), "float32"),
        args=ContinualTrainingArguments(str(folder or mkdtemp()), **arguments),
        stream=stream,
        processing_class=AutoImageProcessor.from_pretrained(BUNDLED_BACKBONE),
    )
    trainer.train()
    return trainer
