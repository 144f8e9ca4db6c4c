"""
One LuCA expert, trained by transformers' own `Trainer`, saved and loaded by PEFT's own methods: no stream, no tasks.

    python examples/one_adapter.py
"""

from __future__ import annotations

from tempfile import mkdtemp

import numpy as np
from cil import BUNDLED_BACKBONE, digits
from peft import PeftModel, get_peft_model
from transformers import AutoImageProcessor, Trainer, TrainingArguments, set_seed

from peft_luca import ImageCollator, LucaConfig
from peft_luca.cli import load_backbone


def main() -> None:
    set_seed(0)  # the expert's first rows are random
    folder, backbone = mkdtemp(), str(BUNDLED_BACKBONE)
    images = digits().rename_column("label", "labels").train_test_split(200, train_size=800, seed=0)
    names = images["train"].features["labels"].names
    model = get_peft_model(load_backbone(backbone, "float32"), LucaConfig(classes=names))
    model.compute_reference()  # once, before training
    model.print_trainable_parameters()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            folder, num_train_epochs=3, per_device_train_batch_size=32, learning_rate=2e-3, save_strategy="no",
            lr_scheduler_type="cosine", remove_unused_columns=False, dataloader_pin_memory=False, report_to="none",
        ),
        train_dataset=images["train"],
        eval_dataset=images["test"],
        data_collator=ImageCollator(AutoImageProcessor.from_pretrained(backbone), "image"),
        compute_metrics=lambda output: {"accuracy": float(np.mean(output.predictions.argmax(1) == output.label_ids))},
    )  # fmt: skip
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    model.save_pretrained(folder, save_embedding_layers=False)

    trainer.model = PeftModel.from_pretrained(load_backbone(backbone, "float32"), folder)
    again = trainer.evaluate()["eval_accuracy"]
    print(f"accuracy {accuracy:.3f} over {len(names)} classes, and {again:.3f} after loading it again")


if __name__ == "__main__":
    main()
