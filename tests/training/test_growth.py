"""A stream that goes on after it was finished: new classes, new data of old ones, and experts that are dropped."""

import pytest
from helpers import NAMES, assert_same, expert_tensors, files_in, make_splits, make_stream, make_trainer, read_json

from peft_luca import TaskStream


@pytest.fixture
def settings(tmp_path):
    return {"features_cache_dir": str(tmp_path / "features"), "num_train_epochs": 2}


def shape(matrix):
    """Which entries of an accuracy matrix were measured."""
    return [[value is not None for value in row] for row in matrix]


def experts(trainer):
    return {name: expert_tensors(trainer.model, name) for name in trainer.tuner.experts}


def test_a_month_later(tmp_path, settings):
    out = tmp_path / "out"
    make_trainer(out, make_stream(NAMES[:4], names=NAMES[:4]), **settings).train()
    # New classes, and new data of an old task's, without train() being called first.
    later = make_trainer(out, make_stream(NAMES[:4], names=NAMES[:4]), **settings)
    later.train_task(make_splits(NAMES[4:]), "new")
    later.train_task(make_splits(NAMES[:2], seed=77), "again")
    assert list(later.tuner.experts) == ["task_0", "task_1", "new", "again"]
    assert later.tuner.classes == NAMES
    results = read_json(out / "results.json")
    assert [task["name"] for task in results["tasks"]] == ["task_0", "task_1", "new", "again"]
    assert shape(results["accuracy_matrix"]) == [[j <= i for j in range(4)] for i in range(4)]
    assert results["last_accuracy"] == pytest.approx(later.evaluate()["eval_last_accuracy"])
    # And all of it comes back, in a stream that has grown likewise.
    stream = make_stream(NAMES[:4], names=NAMES[:4])
    stream.append(make_splits(NAMES[4:]), "new")
    stream.append(make_splits(NAMES[:2], seed=77), "again")
    back = make_trainer(out, stream, **settings)
    assert back.train().global_step == 0
    for name, tensors in experts(later).items():
        assert_same(expert_tensors(back.model, name), tensors)


def test_tasks_in_another_order_than_the_streams(tmp_path, settings):
    out = tmp_path / "out"
    first = make_trainer(out, **settings)
    first.train_task(first.stream[2])
    back = make_trainer(out, **settings)
    back.train()
    assert [task["name"] for task in read_json(out / "results.json")["tasks"]] == ["task_2", "task_0", "task_1"]
    assert_same(expert_tensors(back.model, "task_2"), expert_tensors(first.model, "task_2"))


def test_dropping_an_expert(tmp_path, settings):
    out = tmp_path / "out"
    trainer = make_trainer(out, **settings)
    trainer.train()
    trainer.delete_adapter("task_1")
    results = read_json(out / "results.json")
    assert shape(results["accuracy_matrix"]) == [[True, False, False], [True, True, False], [True, False, True]]
    assert [task.get("deleted", False) for task in results["tasks"]] == [False, True, False]
    assert [expert["name"] for expert in read_json(out / "experts.json")["experts"]] == ["task_0", "task_2"]
    assert not any(name.startswith("task_1") for name in files_in(out))
    # It is as if it had never been there, and it stays away.
    without = make_splits().filter(lambda label: label not in (2, 3), input_columns="label")
    stream = TaskStream.from_dataset(without, increment=2, class_order=NAMES[:2] + NAMES[4:])
    never = make_trainer(tmp_path / "never", stream, **settings)
    never.train()
    back = make_trainer(out, **settings)
    back.train()
    assert list(back.tuner.experts) == ["task_0", "task_2"]
    for ours, theirs in (("task_0", "task_0"), ("task_2", "task_1")):
        kept = {key.replace(ours, "x"): value for key, value in expert_tensors(back.model, ours).items()}
        assert_same(kept, {key.replace(theirs, "x"): v for key, v in expert_tensors(never.model, theirs).items()})
    assert back.evaluate()["eval_last_accuracy"] == never.evaluate()["eval_last_accuracy"]
    # Its classes may come back under another name.
    with pytest.raises(ValueError, match="'task_1' was learnt and its expert deleted"):
        back.train_task(back.stream[1])
    back.train_task(make_splits(NAMES[2:4]), "once_more")
    matrix = read_json(out / "results.json")["accuracy_matrix"]
    assert shape(matrix)[-1] == [True, False, True, True]


def test_what_cannot_be_dropped(tmp_path, settings):
    trainer = make_trainer(tmp_path / "out", make_stream(increment=6), **settings)
    with pytest.raises(ValueError, match="there is no expert 'task_0' to delete"):
        trainer.delete_adapter("task_0")
    trainer.train()
    with pytest.raises(ValueError, match="'task_0' is the only expert"):
        trainer.delete_adapter("task_0")
    assert (tmp_path / "out" / "task_0" / "adapter_config.json").is_file()


def test_a_grown_run_refuses_the_stream_it_began_with(tmp_path, settings):
    make_trainer(tmp_path / "out", **settings).train()
    small = make_stream(NAMES[:4], names=NAMES[:4])
    with pytest.raises(ValueError, match="its task 'task_2' is not among"):
        make_trainer(tmp_path / "out", small, **settings).train_task(small[0])


def test_another_task_under_the_name_of_one_that_failed_is_learnt_from_its_own_images(tmp_path):
    stream = make_stream(names=NAMES[:2], order=NAMES[:2])
    trainer = make_trainer(tmp_path / "out", stream, features_cache_dir=str(tmp_path / "features"))
    trainer.train()
    finish, trainer._finish = trainer._finish, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train_task(make_splits(NAMES[2:4], train=4), "late")
    trainer._finish = finish
    trainer.train_task(make_splits(NAMES[4:6], train=6), "late")
    assert len(trainer.features(trainer.stream[-1], "train")) == 12
    assert trainer.tuner.experts["late"] == NAMES[4:6]


def test_a_run_goes_on_without_the_images_of_a_task_that_was_forgotten(tmp_path):
    settings = {"features_cache_dir": str(tmp_path / "features")}
    tasks = {f"t{i}": make_splits(NAMES[2 * i : 2 * i + 2]) for i in range(3)}
    trainer = make_trainer(tmp_path / "out", TaskStream.from_tasks(tasks), **settings)
    trainer.train()
    trainer.delete_adapter("t1")
    left = {name: task for name, task in tasks.items() if name != "t1"}
    again = make_trainer(tmp_path / "out", TaskStream.from_tasks(left), **settings)
    again.train()
    assert list(again.tuner.experts) == ["t0", "t2"]
    assert again.evaluate()["eval_accuracy_matrix"][-1] == trainer.evaluate()["eval_accuracy_matrix"][-1]
    again.train_task(make_splits(NAMES[2:4]), "t3")
    assert [task["name"] for task in read_json(tmp_path / "out" / "results.json")["tasks"]] == ["t0", "t1", "t2", "t3"]


def test_a_task_that_the_stream_lacks_is_named(tmp_path):
    settings = {"features_cache_dir": str(tmp_path / "features")}
    make_trainer(tmp_path / "out", TaskStream.from_tasks({"t0": make_splits(NAMES[:2])}), **settings).train()
    other = make_trainer(tmp_path / "out", TaskStream.from_tasks({"t9": make_splits(NAMES[:2])}), **settings)
    with pytest.raises(ValueError, match="its task 't0' is not among 't9'"):
        other.train()
