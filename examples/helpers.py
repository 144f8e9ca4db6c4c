"""What the small examples share: the bundled backbone, and a run over a stream."""

from __future__ import annotations

from tempfile import mkdtemp

from cil import BUNDLED_BACKBONE, digits
from datasets import Dataset
from transformers import AutoImageProcessor

from peft_luca import ContinualTrainer, ContinualTrainingArguments, TaskStream
from peft_luca.cli import load_backbone


def some_digits(*wanted: int) -> Dataset:
    """Every second image of some digits, whose names are "0" to "9"."""
    images = digits().filter(lambda label: label in wanted, input_columns="label")
    return images.select(range(0, len(images), 2))


def learn(stream: TaskStream, **arguments: object) -> ContinualTrainer:
    """A trainer that has learned the stream, in a new folder."""
    trainer = ContinualTrainer(
        model=load_backbone(str(BUNDLED_BACKBONE), "float32"),
        args=ContinualTrainingArguments(mkdtemp(), **arguments),
        stream=stream,
        processing_class=AutoImageProcessor.from_pretrained(BUNDLED_BACKBONE),
    )
    trainer.train()
    return trainer
