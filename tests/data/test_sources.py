"""Folders, streams of rows and disks as users have them: read rightly, or refused with what is to be done."""

import io
import os
import shutil
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import datasets
import pytest
from datasets import Dataset, DatasetDict, Features, Image, IterableDataset, Value, load_dataset
from helpers import make_trainer
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from PIL import Image as PilImage

from peft_luca import LucaConfig, TaskStream
from peft_luca.data.feature_cache import digest_images
from peft_luca.data.sources import read_image_folder
from peft_luca.preprocessing import SourceGoneError, read_bytes


@pytest.fixture
def folder(tmp_path):
    """Makes a folder of files: of an image for an int, its grey value; of other content for bytes."""

    def make(files):
        root = tmp_path / "data"
        for name, content in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                PilImage.new("L", (2, 2), content).save(path, "png")
        return root

    return make


def contents(stream):
    """Class → grey values of its train and of its test images."""

    def greys(dataset):
        return [] if dataset is None else [row["image"].getpixel((0, 0)) for row in dataset]

    return {task.classes[0]: (greys(task.train), greys(task.test)) for task in stream}


def read(root):
    return contents(TaskStream.from_dataset(root, increment=1, seed=None))


def test_a_folder_for_each_class_with_splits_or_without(folder):
    files = {
        "train/cat/1.png": 1,
        "train/cat/2.PNG": 2,
        "train/dog/3.jpeg": 3,
        "test/cat/4.png": 4,
        "test/dog/5.png": 5,
    }
    assert read(folder(files)) == {"cat": ([1, 2], [4]), "dog": ([3], [5])}
    shutil.rmtree(folder({}))
    assert read(folder({"cat/1.png": 1, "dog/3.png": 3})) == {"cat": ([1], []), "dog": ([3], [])}
    shutil.rmtree(folder({}))
    assert read(folder({"Train/cat/1.png": 1, "val/cat/2.png": 2})) == {"cat": ([1], [2])}


def test_it_is_what_datasets_reads(folder, tmp_path):
    root = folder({f"{split}/{name}/{i}.png": i for split in ("train", "test") for name in "abc" for i in range(3)})
    expected = load_dataset(str(root), cache_dir=str(tmp_path / "cache"))
    found = read_image_folder(root)
    for split in ("train", "test"):
        assert found[split].features == expected[split].features
        plain = Image(decode=False)
        rows = [d[split].cast_column("image", plain).to_list() for d in (found, expected)]
        assert sorted(rows[0], key=str) == sorted(rows[1], key=str)


def test_stray_files_are_passed_by(folder):
    """So many files of text that `datasets` would take the folder for one of text."""
    strays = {f"cat/notes{i}.txt": b"x" for i in range(9)}
    strays |= {
        "Thumbs.db": b"x",
        "cat/.DS_Store": b"x",
        "dog/list.csv": b"a,b\n1,2\n",
        ".git/x.png": 9,
        "cat/._1.png": 9,
    }
    assert read(folder({"cat/1.png": 1, "dog/2.png": 2, **strays})) == {"cat": ([1], []), "dog": ([2], [])}


def test_classes_that_are_called_as_splits_are(folder):
    """`datasets` puts the images of train/test into both splits."""
    files = {
        "train/train/1.png": 1,
        "train/test/2.png": 2,
        "train/bus/3.png": 3,
        "test/train/4.png": 4,
        "test/bus/5.png": 5,
    }
    assert read(folder(files)) == {"bus": ([3], [5]), "test": ([2], []), "train": ([1], [4])}
    shutil.rmtree(folder({}))
    assert read(folder({"train/1.png": 1, "test/2.png": 2, "bus/3.png": 3})) == {
        "bus": ([3], []), "test": ([2], []), "train": ([1], []),
    }  # fmt: skip


def test_the_folder_that_an_image_lies_in_is_its_class(folder):
    assert read(folder({"animals/cat/1.png": 1, "animals/dog/2.png": 2, "things/cup/3.png": 3})).keys() == {
        "cat", "dog", "cup",
    }  # fmt: skip


def test_a_class_of_classes_may_be_called_as_a_split_is(folder):
    files = {"vehicles/train/steam/1.png": 1, "vehicles/bus/city/2.png": 2}
    assert read(folder(files)) == {"city": ([2], []), "steam": ([1], [])}


def test_a_folder_stays_where_it_is_when_the_process_goes_elsewhere(folder, monkeypatch, tmp_path):
    folder({"a/1.png": 1})
    monkeypatch.chdir(tmp_path)
    stream = TaskStream.from_dataset("data")
    monkeypatch.chdir("/")
    assert contents(stream) == {"a": ([1], [])}


def test_names_of_any_alphabet(folder):
    files = {"猫/ä ö.png": 1, "собака/b #1%20.png": 2, "café/[c].png": 3}
    assert read(folder(files)) == {"猫": ([1], []), "собака": ([2], []), "café": ([3], [])}


def test_links_to_folders_are_followed_once(folder, tmp_path):
    root = folder({"cat/1.png": 1})
    (tmp_path / "elsewhere").mkdir()
    PilImage.new("L", (2, 2), 7).save(tmp_path / "elsewhere" / "7.png")
    os.symlink(tmp_path / "elsewhere", root / "dog")
    os.symlink(root, root / "cat" / "loop")
    assert read(root) == {"cat": ([1], []), "dog": ([7], [])}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"cat/1.png": 1, "dog/2.png": 2, "logo.png": 3}, r"logo\.png does not lie in a class's folder"),
        ({"cat/1.png": 1, "dog/2.png": 2, "cat/more/3.png": 3}, r"more/3\.png does not lie in a class's folder"),
        ({"1.png": 1}, r"1\.png does not lie in a class's folder"),
        ({"train/1.png": 1, "test/2.png": 2}, "lie in 'test', 'train', which may be splits or classes"),
        ({"train/cat/1.png": 1, "spare/2.png": 2}, "has images in 'spare', beside its splits 'train'"),
        ({"train/cat/1.png": 1, "training/cat/2.png": 2}, "folders 'train', 'training', which name a split twice"),
        ({"test/cat/1.png": 1}, r"no split 'train'; it has \['test'\]"),
        (
            {"all/train/cat/1.png": 1, "all/test/cat/2.png": 2},
            r"its splits 'test', 'train' further down, as in .*2\.png",
        ),
        (
            {"a/train/cat/1.png": 1, "b/val/cat/2.png": 2, "b/x/cat/3.png": 3},
            "its splits 'train', 'validation' further",
        ),
        ({"all/test/cat/1.png": 1}, "its splits 'test' further down"),
    ],
)
def test_a_folder_that_leaves_classes_open_is_refused(folder, files, message):
    with pytest.raises(ValueError, match=message):
        TaskStream.from_dataset(folder(files))


def test_a_folder_that_describes_itself_is_left_to_datasets(folder):
    table = b"file_name,label\na.png,left\nb.png,right\n"
    root = folder({"metadata.csv": table, "a.png": 1, "b.png": 2})
    assert read_image_folder(root) is None
    assert read(root) == {"left": ([1], []), "right": ([2], [])}
    shutil.rmtree(root)
    card = b"---\nconfigs:\n- config_name: default\n  data_files: 'left/*'\n---\n"
    assert read_image_folder(folder({"README.md": card, "left/1.png": 1, "x.png": 2})) is None


def test_what_is_no_folder_of_images_is_left_to_datasets(folder, tmp_path):
    assert read_image_folder(tmp_path / "nowhere") is None
    assert read_image_folder(folder({"notes.txt": b"x"})) is None
    with pytest.raises(FileNotFoundError, match="nowhere"):
        TaskStream.from_dataset(tmp_path / "nowhere")


def test_a_card_of_a_folder_is_no_obstacle(folder):
    assert read(folder({"README.md": b"# Cats\n", "cat/1.png": 1})) == {"cat": ([1], [])}
    assert read(folder({"README.md": b"---\nlicense: mit\n---\n"})) == {"cat": ([1], [])}


def test_files_that_are_in_train_and_in_test_are_refused(folder):
    root = folder({"a/1.png": 1, "a/2.png": 2})
    features = Features(image=Image(), label=Value("string"))
    both = Dataset.from_dict({"image": [str(root / "a/1.png"), str(root / "a/2.png")], "label": ["a", "a"]}, features)
    with pytest.raises(ValueError, match=r"1 files are both train and test images, such as .*a/2\.png"):
        TaskStream.from_dataset((both, both.select([1])))
    assert len(TaskStream.from_dataset((both.select([0]), both.select([1])))[0].test) == 1
    apart = both.train_test_split(0.5, seed=0)
    assert len(TaskStream.from_dataset(apart)[0].test) == 1


# --- streams of rows ---


def breaking(rows):
    buffer = io.BytesIO()
    PilImage.new("L", (2, 2)).save(buffer, "png")
    for _ in range(rows):
        yield {"image": {"bytes": buffer.getvalue(), "path": None}, "label": "a"}
    raise RuntimeError("the sensor fell off")


@pytest.mark.parametrize("rows", [0, 3])
def test_a_generator_that_raises(rows):
    features = Features(image=Image(), label=Value("string"))
    broken = IterableDataset.from_generator(breaking, features=features, gen_kwargs={"rows": rows})
    message = rf"broke off after {rows} rows: RuntimeError\('the sensor fell off'\)\. None of them was kept"
    with pytest.raises(ValueError, match=message):
        TaskStream.from_dataset(broken)
    stream = TaskStream.from_tasks([Dataset.from_list(list(_some_rows()), features)])
    with pytest.raises(ValueError, match=message):
        stream.append(broken)
    assert len(stream) == 1


def _some_rows():
    try:
        yield from breaking(2)
    except RuntimeError:
        return


def test_rows_that_come_once_are_all_read():
    """A sensor, or a download: what was read cannot be read again."""

    def rows(source):
        yield from source

    def once():
        return IterableDataset.from_generator(rows, gen_kwargs={"source": iter(list(_some_rows()))})

    def with_features(dataset):
        return dataset.cast(Features(image=Image(), label=Value("string")))

    assert len(TaskStream.from_dataset(with_features(once()))[0].train) == 2
    assert len(TaskStream.from_tasks([with_features(once())])[0].train) == 2
    stream = TaskStream.from_tasks(
        [Dataset.from_list(list(_some_rows()), Features(image=Image(), label=Value("string")))]
    )
    assert len(stream.append(with_features(once())).train) == 2


def test_a_stream_without_rows_is_none():
    for features in (None, Features(image=Image(), label=Value("string"))):
        empty = IterableDataset.from_generator(no_rows, features=features)
        for read in (TaskStream.from_dataset, lambda data: TaskStream.from_tasks([data])):
            with pytest.raises(ValueError, match=r"the train images.* are none; every task needs at least one"):
                read(empty)
        rows = Dataset.from_list(list(_some_rows()), Features(image=Image(), label=Value("string")))
        assert TaskStream.from_dataset((rows, empty))[0].test is None


def no_rows():
    yield from ()


def test_a_transform_on_a_streaming_dataset_is_not_lost_in_silence():
    streamed = IterableDataset.from_generator(_some_rows, features=Features(image=Image(), label=Value("string")))
    renamed = streamed.map(lambda row: {"label": row["label"].upper()})
    assert TaskStream.from_dataset(renamed, image_column="image").classes == ("A",)


@pytest.mark.parametrize("name", ["test", "testing", "validation", "valid", "val", "dev"])
def test_a_split_to_measure_on_is_known_by_its_name(folder, name):
    data = read_image_folder(folder({"train/a/1.png": 1, "train/b/2.png": 2, "test/a/3.png": 3}))
    stream = TaskStream.from_dataset(DatasetDict({"train": data["train"], name: data["test"]}), increment=1, seed=None)
    assert contents(stream) == {"a": ([1], [3]), "b": ([2], [])}


def test_any_format_is_taken(folder):
    data = read_image_folder(folder({"a/1.png": 1, "b/2.png": 2}))["train"]
    for kind in ("numpy", "torch", "arrow", "pandas", None):
        stream = TaskStream.from_dataset(data.with_format(kind), increment=1, seed=None)
        assert contents(stream) == {"a": ([1], []), "b": ([2], [])}
        streamed = TaskStream.from_dataset(data.to_iterable_dataset().with_format(kind), increment=1, seed=None)
        assert contents(streamed) == {"a": ([1], []), "b": ([2], [])}


# --- a disk that goes away ---


def test_a_disk_that_goes_away_is_no_image_to_skip(folder, tmp_path):
    """Every image would be left out, and be left out for good: what was skipped is written down."""
    root = folder({"train/a/1.png": 1, "train/a/2.png": 2, "train/b/3.png": 3, "test/a/4.png": 4, "test/b/5.png": 5})
    stream = TaskStream.from_dataset(root)
    settings = {"on_bad_image": "skip", "features_cache_dir": str(tmp_path / "features")}
    trainer = make_trainer(tmp_path / "out", stream, **settings)
    shutil.move(root, tmp_path / "unplugged")
    with pytest.raises(OSError, match=r"a/1\.png cannot be read: its folder is not there any more"):
        trainer.train()
    shutil.move(tmp_path / "unplugged", root)
    trainer.train()
    assert len(trainer.features(stream[0], "train")) == 3
    assert trainer.results()["tasks"][0]["skipped_images"] == 0


@pytest.mark.parametrize("left", [[], [".Trash"]])
def test_a_disk_whose_images_lie_directly_in_it(tmp_path, left):
    """Its folder stays, and is empty."""
    disk = tmp_path / "disk"
    disk.mkdir()
    for i in range(3):
        PilImage.new("L", (2, 2), i).save(disk / f"{i}.png")
    features = Features(image=Image(), label=Value("string"))
    files = {"image": [str(disk / f"{i}.png") for i in range(3)], "label": ["a", "a", "b"]}
    stream = TaskStream.from_dataset(Dataset.from_dict(files, features))
    shutil.move(disk, tmp_path / "unplugged")
    disk.mkdir()
    for name in left:
        (disk / name).mkdir()
    trainer = make_trainer(tmp_path / "out", stream, on_bad_image="skip", features_cache_dir=str(tmp_path / "f"))
    with pytest.raises(OSError, match=r"0\.png cannot be read: its folder is empty.*No image was left out"):
        trainer.train()
    shutil.rmtree(disk)
    shutil.move(tmp_path / "unplugged", disk)
    trainer.train()
    assert trainer.results()["tasks"][0]["skipped_images"] == 0


def test_a_folder_that_may_not_be_listed_is_gone(folder, monkeypatch):
    root = folder({"a/1.png": 1})

    def refused(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(SourceGoneError, match="Permission denied"):
        read_bytes({"path": str(root / "a/2.png"), "bytes": None})


@pytest.mark.parametrize("status", [404, 410, 403, 500, 503, None])
def test_a_server_that_does_not_answer_is_no_image_to_skip(monkeypatch, status):
    """fsspec has one error, FileNotFoundError, for whatever a server says, and for none that is there."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.server_port if status else 1
        gone = SourceGoneError if status not in (404, 410) else FileNotFoundError
        try:
            with pytest.raises(gone):
                read_bytes({"path": f"http://127.0.0.1:{port}/1.png", "bytes": None})
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("cause", "gone"),
    [(None, False), (EntryNotFoundError, False), (RepositoryNotFoundError, True), (RevisionNotFoundError, True)],
)
@pytest.mark.parametrize(
    "path", ["hf://datasets/me/images/1.png", "https://huggingface.co/me/images/resolve/main/1.png"]
)
def test_a_repository_that_is_gone_is_no_image_to_skip(monkeypatch, path, cause, gone):
    """The Hub's file system has one error for both, too, and says by its cause what is missing."""

    def missing(*args, **kwargs):
        kind = {"response": SimpleNamespace(headers={}, request=None)} if gone else {}
        raise FileNotFoundError(path) from (cause and cause("there is none", **kind))

    monkeypatch.setattr(datasets.utils.file_utils, "xopen", missing)
    with pytest.raises(FileNotFoundError if not gone else SourceGoneError):
        read_bytes({"path": path, "bytes": None})


@pytest.mark.parametrize(("error", "said"), [(OSError(), r"cannot be read: OSError\(\)"), (MemoryError(), "^$")])
def test_what_a_source_says_is_said(monkeypatch, error, said):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets.utils.file_utils, "xopen", fails)
    with pytest.raises(SourceGoneError if isinstance(error, OSError) else MemoryError, match=said):
        read_bytes({"path": "images/1.png", "bytes": None})


def test_an_archive_that_is_gone_is_no_image_to_skip(tmp_path):
    image = {"path": f"zip://1.png::{tmp_path}/images.zip", "bytes": None}
    with pytest.raises(SourceGoneError, match=r"images\.zip cannot be read: its archive is not there any more"):
        read_bytes(image)
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        archive.writestr("2.png", b"two")
    with pytest.raises(FileNotFoundError) as missing:
        read_bytes(image)
    assert not isinstance(missing.value, SourceGoneError)
    assert read_bytes(image | {"path": image["path"].replace("1.png", "2.png")}) == b"two"


@pytest.mark.parametrize("path", ["a\0b.png", "nothing://1.png"])
def test_a_path_that_there_cannot_be_is_one_image(path):
    with pytest.raises(ValueError, match=r"null byte|not known") as refused:
        read_bytes({"path": path, "bytes": None})
    assert not isinstance(refused.value, OSError)
    images = [{"path": path, "bytes": None}, *(row["image"] for row in _some_rows())]
    assert digest_images(Dataset.from_dict({"image": images}, Features(image=Image())), "image")


def test_a_class_none_of_whose_images_can_be_read_is_named(tmp_path):
    features = Features(image=Image(), label=Value("string"))
    broken = [{"bytes": b"", "path": None}] * 2
    whole = [row["image"] for row in _some_rows()]
    for images, names, message in (
        (whole + broken, ["a", "a", "b", "b"], r"task 'task_0': none of the images of 'b' can be read, and 2"),
        (broken, ["a", "b"], r"none of the 2 images can be read"),
    ):
        stream = TaskStream.from_dataset(Dataset.from_dict({"image": images, "label": names}, features))
        for config in (None, LucaConfig(head="linear")):
            trainer = make_trainer(tmp_path / "out", stream, None, config, on_bad_image="skip", statistics=False)
            with pytest.raises(ValueError, match=message):
                trainer.train()
            assert not (tmp_path / "out" / "task_0").exists()


def test_a_file_that_is_gone_is_an_image_that_cannot_be_read(folder, tmp_path):
    root = folder({"a/1.png": 1, "a/2.png": 2, "b/3.png": 3})
    stream = TaskStream.from_dataset(root)
    (root / "a" / "1.png").unlink()
    with pytest.raises(ValueError, match=r"row 0 \(.*a/1\.png\) cannot be read: FileNotFoundError"):
        make_trainer(tmp_path / "raise", stream, features_cache_dir=str(tmp_path / "f")).train()
    trainer = make_trainer(tmp_path / "skip", stream, features_cache_dir=str(tmp_path / "f"), on_bad_image="skip")
    trainer.train()
    assert trainer.results()["tasks"][0]["skipped_images"] == 1


def test_columns_of_other_names(tmp_path):
    rows = list(_some_rows())
    data = Dataset.from_list(rows, Features(image=Image(), label=Value("string"))).rename_columns(
        {"image": "img", "label": "fine_label"}
    )
    with pytest.raises(ValueError, match=r"no column 'label'; pass label_column, one of \['img', 'fine_label'\]"):
        TaskStream.from_dataset(data)
    stream = TaskStream.from_dataset(data, label_column="fine_label")
    assert (stream.image_column, stream[0].train.column_names) == ("img", ["img", "labels"])
    trainer = make_trainer(tmp_path / "out", stream)
    trainer.train()
    assert trainer.tuner.classes == ("a",)


def test_an_empty_split():
    rows = Dataset.from_list(list(_some_rows()), Features(image=Image(), label=Value("string")))
    assert TaskStream.from_dataset(DatasetDict(train=rows, test=rows.select([])))[0].test is None
    with pytest.raises(ValueError, match="the train images are none; every task needs at least one"):
        TaskStream.from_dataset(DatasetDict(train=rows.select([]), test=rows))


def test_an_unreadable_mapping_is_not_taken_for_a_dataset():
    with pytest.raises(TypeError, match=r"found a dict; needed a datasets\.Dataset"):
        TaskStream.from_dataset({"train": datasets.Dataset.from_dict({"image": []})})
