"""The report by class, against scikit-learn's, and the page that is made of a run."""

import re
from html import unescape
from html.parser import HTMLParser

import pytest
from datasets import ClassLabel, DatasetDict
from helpers import NAMES, make_splits, make_trainer
from jinja2 import Environment

from peft_luca import TaskStream
from peft_luca.training.report import TEMPLATE


pytest.importorskip("matplotlib")
metrics = pytest.importorskip("sklearn.metrics")

# As strangers might call them.
CLASSES = ["<script>alert(1)</script>", "a & b", '" onload="x', "$\\frac$", "'single'", "white"]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A run of three tasks whose classes can hardly be told apart: half of the test labels are another class's."""
    splits = DatasetDict()
    for name, images in make_splits(test=6).items():
        labels = [(label + (i % 2) * (name == "test")) % 6 for i, label in enumerate(images["label"])]
        images = images.remove_columns("label").add_column("label", labels)
        splits[name] = images.cast_column("label", ClassLabel(names=CLASSES))
    stream = TaskStream.from_dataset(splits, increment=2, class_order=CLASSES)
    folder = tmp_path_factory.mktemp("report")
    trainer = make_trainer(folder / "out", stream, num_train_epochs=1, features_cache_dir=str(folder / "cache"))
    trainer.train()
    return trainer


def truth(trainer):
    """Names of the classes of all test images, and of those that are predicted, by `Trainer.predict`."""
    names, wanted, predicted = trainer.tuner.classes, [], []
    for task in trainer.stream:
        wanted += [trainer.stream.classes[i] for i in task.test["labels"][:]]
        predicted += [names[i] for i in trainer.predict(task.test).predictions.argmax(1)]
    return wanted, predicted


def test_the_report_by_class_is_scikit_learns(trainer):
    wanted, predicted = truth(trainer)
    report = trainer.class_report()
    theirs = metrics.classification_report(wanted, predicted, output_dict=True, zero_division=float("nan"))
    assert [row["class"] for row in report["classes"]] == list(trainer.tuner.classes)
    for row in report["classes"]:
        expected = theirs[row["class"]]
        assert row["images"] == expected["support"]
        assert row["recall"] == pytest.approx(expected["recall"])
        assert row["precision"] == pytest.approx(expected["precision"])
    confusion = metrics.confusion_matrix(wanted, predicted, labels=CLASSES)
    assert report["confused"]
    found = {(CLASSES.index(pair["class"]), CLASSES.index(pair["predicted"])): pair for pair in report["confused"]}
    for (i, j), count in ((place, int(confusion[place])) for place in [(i, j) for i in range(6) for j in range(6)]):
        assert count == (found[i, j]["images"] if (i, j) in found else 0) or i == j
    for (i, _), pair in found.items():
        assert pair["share"] == pytest.approx(pair["images"] / confusion[i].sum())
        for task, row in pair["examples"]:  # which are what they are said to be
            (test,) = (known.test for known in trainer.stream if known.name == task)
            assert trainer.stream.classes[test["labels"][row]] == pair["class"]
    counts = [pair["images"] for pair in report["confused"]]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == sum(w != p for w, p in zip(wanted, predicted, strict=True))


def test_the_report_by_class_is_of_the_router_that_is_set(trainer):
    trainer.tuner.set_router("nearest")
    wanted, predicted = truth(trainer)
    recalls = [row["recall"] for row in trainer.class_report()["classes"]]
    trainer.tuner.set_router("auto")
    assert recalls == pytest.approx(list(metrics.recall_score(wanted, predicted, labels=CLASSES, average=None)))


class Page(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data.strip())


def test_the_page_needs_no_network_and_holds_figures_tasks_classes_and_pictures(trainer):
    path = trainer.report()
    assert path == trainer.folder.path / "report.html"
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    pictures = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert all(source.startswith("data:image/png;base64,") for source in pictures)
    examples = sum(len(pair["examples"]) for pair in trainer.class_report()["confused"][:20])
    assert len(pictures) == 6 + examples > 7
    assert not re.search(r"(src|href)=.https?:|url\(|@import|<link|<script", text)
    assert {"task_0", "task_1", "task_2", "Forgetting", "Right expert chosen"} <= set(page.words)
    assert f"{100 * trainer.results()['last_accuracy']:.1f} %" in page.words
    trainer.report()  # again
    assert [file.name for file in path.parent.iterdir() if file.name.startswith(".")] == []


def test_names_of_classes_are_text_on_the_page_and_nothing_else(trainer):
    text = trainer.report().read_text(encoding="utf-8")
    page = Page(text)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script"})
    assert not any("onload" in attributes for _, attributes in page.tags)
    for name in CLASSES:
        assert name in page.words
    assert CLASSES[0] in unescape(text)


def test_shares_are_written_so_that_a_person_reads_them():
    module = Environment().from_string(TEMPLATE.read_text(encoding="utf-8").split("<!DOCTYPE")[0]).module
    written = {value: str(module.percent(value)).strip() for value in (None, 0.0, 1e-9, 0.0123, 0.99999, 1.0)}
    assert list(written.values()) == ["–", "0.0 %", "&lt; 0.1 %", "1.2 %", "&gt; 99.9 %", "100.0 %"]


def test_a_run_without_test_images_and_a_deleted_task_have_a_page(tmp_path):
    tasks = {f"t{i}": make_splits(NAMES[2 * i : 2 * i + 2])["train"] for i in range(2)}
    trainer = make_trainer(tmp_path / "out", TaskStream.from_tasks(tasks), num_train_epochs=0)
    trainer.train()
    path = trainer.report()
    assert "nothing was measured" in path.read_text(encoding="utf-8")
    assert trainer.class_report()["confused"] == []
    trainer.delete_adapter("t0")
    assert not path.exists()  # it names what was deleted
    text = trainer.report().read_text(encoding="utf-8")
    words = set(Page(text).words)
    assert "t1" in words
    assert not {"t0", *NAMES[:2]} & words
