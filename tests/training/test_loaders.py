"""Whatever reads the images and however many there are: the same experts."""

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict
from helpers import NAMES, assert_same, expert_tensors, make_images, make_splits, make_stream, make_trainer

from peft_luca import TaskStream
from peft_luca.training.batches import EpochBatches


def experts(trainer):
    return {name: expert_tensors(trainer.model, name) for name in trainer.tuner.experts}


def learn(folder, stream=None, **settings):
    trainer = make_trainer(folder / "out", stream, features_cache_dir=str(folder / "features"), **settings)
    trainer.train()
    return trainer


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_workers_change_nothing(tmp_path, start, cached):
    settings = {"cache_features": cached, "num_train_epochs": 1}
    alone = learn(tmp_path / "alone", make_stream(increment=6), **settings)
    helped = learn(
        tmp_path / "helped", make_stream(increment=6), dataloader_num_workers=2, dataloader_prefetch_factor=2,
        dataloader_multiprocessing_context=start, **settings,
    )  # fmt: skip
    for name, tensors in experts(alone).items():
        assert_same(expert_tensors(helped.model, name), tensors)
    assert (helped.args.dataloader_num_workers, helped.args.dataloader_prefetch_factor) == (2, 2)  # as they were


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_pinned_memory_changes_nothing(tmp_path):
    plain = learn(tmp_path / "plain", make_stream(increment=6))
    pinned = learn(tmp_path / "pinned", make_stream(increment=6), dataloader_pin_memory=True)
    assert_same(expert_tensors(pinned.model, "task_0"), expert_tensors(plain.model, "task_0"))


@pytest.mark.parametrize("cached", [True, False])
def test_a_last_batch_of_one(tmp_path, cached):
    stream = TaskStream.from_tasks([DatasetDict(train=make_images(NAMES[:1], 9), test=make_images(NAMES[:1], 1))])
    trainer = learn(tmp_path, stream, cache_features=cached, num_train_epochs=1)
    assert trainer.state.max_steps == 2
    assert trainer.results()["last_accuracy"] == 1.0


def test_a_short_last_batch_can_be_left_out(tmp_path):
    stream = TaskStream.from_tasks([make_images(NAMES[:1], 9)])
    assert learn(tmp_path, stream, dataloader_drop_last=True, num_train_epochs=1).state.max_steps == 1


def test_tasks_of_one_class_of_any_size_that_come_back(tmp_path):
    tasks = {
        "one": make_splits(NAMES[:1], 1, 1),
        "many": make_splits(NAMES[1:4], 30, 2),
        "few": make_splits(NAMES[4:], 2, 1),
        "again": make_splits(NAMES[:2], 5, 2, seed=9),
    }
    trainer = learn(tmp_path, TaskStream.from_tasks(tasks))
    assert trainer.tuner.classes == NAMES
    assert [len(row) for row in trainer.results()["accuracy_matrix"]] == [4] * 4
    assert trainer.results()["task_known_accuracy"] > 0.8
    assert all(torch.isfinite(tensor).all() for tensors in experts(trainer).values() for tensor in tensors.values())


def test_every_process_takes_its_part_of_the_same_batches():
    for rows in (1, 2, 7, 48, 49):
        whole = list(EpochBatches(range(rows), 8, seed=5))
        parts = [list(EpochBatches(range(rows), 8, 5, rank, 3)) for rank in range(3)]
        assert len(whole) == len(EpochBatches(range(rows), 8, 5)) == -(-rows // 8)
        for batch, *shares in zip(whole, *parts, strict=True):
            assert sorted(row for share in shares for row in share) == sorted(batch)
        assert sorted(row for batch in whole for row in batch) == list(range(rows))
    batches = EpochBatches(range(48), 8, 5)
    first = list(batches)
    batches.set_epoch(1)
    assert list(batches) != first
    batches.set_epoch(0)
    assert list(batches) == first


def test_a_streaming_dataset_trains_and_evaluates_as_the_same_rows_do(tmp_path):
    splits = make_splits(NAMES[:4])
    rows = {name: Dataset.to_iterable_dataset(split) for name, split in splits.items()}
    streamed = IterableDatasetDict({name: split.filter(lambda _: True) for name, split in rows.items()})
    results = []
    for name, dataset in (("whole", splits), ("streamed", streamed)):
        trainer = learn(tmp_path / name, TaskStream.from_dataset(dataset, increment=2, seed=None))
        metrics = trainer.evaluate()
        results.append((experts(trainer), metrics["eval_accuracy_matrix"], trainer.results()["classes"]))
    (whole, matrix, classes), (other, same_matrix, same_classes) = results
    assert (matrix, classes) == (same_matrix, same_classes)
    for name, tensors in whole.items():
        assert_same(other[name], tensors)
