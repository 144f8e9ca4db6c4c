"""The command `peft-luca`: every verb on a small run, as a user calls it."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from accelerate import PartialState
from helpers import NAMES, files_in, make_images, make_processor, make_splits, make_vit, read_json

from peft_luca import cli, load_experts
from peft_luca.training.run_folder import JOURNAL_NAME


FOUR = NAMES[:4]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A backbone, images in folders, and a run of two tasks that the command has learned."""
    place = tmp_path_factory.mktemp("cli")
    make_vit().save_pretrained(place / "vit")
    make_processor().save_pretrained(place / "vit")
    for split, images in make_splits(FOUR).items():
        for i, row in enumerate(images):
            folder = place / "images" / split / FOUR[row["label"]]
            folder.mkdir(parents=True, exist_ok=True)
            row["image"].save(folder / f"{i}.png")
    given = ["--model", place / "vit", "--dataset", place / "images", "--increment", 2, "--num_train_epochs", 2]
    given += ["--output_dir", place / "out", "--disable_tqdm", "True", "--use_cpu", "True", "--report_to", "none"]
    cli.main(["train", *map(str, given)])
    return place, list(map(str, given))


def said(capsys, *given):
    capsys.readouterr()
    cli.main([str(argument) for argument in given])
    return capsys.readouterr().out


def refused(capsys, *given):
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(argument) for argument in given])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


def contents(folder):
    return {name: (folder / name).read_bytes() for name in files_in(folder)}


def test_training_again_resumes(place, capsys):
    folder, given = place
    before = contents(folder / "out")
    out = said(capsys, "train", *given)
    assert "2 experts" in out
    assert contents(folder / "out") == before


def test_show_needs_no_backbone(place, capsys):
    folder, _ = place
    shown = said(capsys, "show", folder / "out")
    assert shown.startswith(f"2 experts of {folder / 'vit'}, router auto\n")
    about = json.loads(said(capsys, "show", folder / "out", "--json"))
    assert [expert["name"] for expert in about["experts"]] == ["task_0", "task_1"]
    assert sorted(label for expert in about["experts"] for label in expert["classes"]) == sorted(FOUR)
    assert about["figures"]["last_accuracy"] == read_json(folder / "out" / "results.json")["last_accuracy"]
    assert "Accuracy after the last task" in shown


def test_predict_writes_csv_and_json_lines(place, capsys, tmp_path):
    folder, _ = place
    model = load_experts(make_vit(), folder / "out")
    files = sorted((folder / "images" / "test").rglob("*.png"))
    wanted = model.predict(files, top_k=2)
    out = said(capsys, "predict", folder / "out", folder / "images" / "test", "--top_k", 2, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [Path(row["image"]) for row in rows] == files
    assert [row["label"] for row in rows] == [one.label for one in wanted]
    assert rows[0]["top"] == pytest.approx(wanted[0].top)
    table = tmp_path / "answers.csv"
    said(capsys, "predict", folder / "out", "--out", table, *files[:3])
    with open(table, newline="") as content:
        found = list(csv.DictReader(content))
    assert [row["label"] for row in found] == [one.label for one in wanted[:3]]
    assert float(found[0]["probability"]) == pytest.approx(wanted[0].probability)
    assert "there are no images in" in refused(capsys, "predict", folder / "out", tmp_path)
    assert "unrecognized arguments: --no" in refused(capsys, "predict", folder / "out", files[0], "--no", files[1])
    assert "unrecognized arguments: more" in refused(capsys, "show", folder / "out", "more")
    before = contents(tmp_path)
    unreadable = folder / "vit" / "config.json"
    assert "cannot be read" in refused(capsys, "predict", folder / "out", files[0], unreadable, "--out", table)
    assert contents(tmp_path) == before  # what was there stays, and nothing else is left
    assert "cannot be read" in refused(capsys, "predict", folder / "out", folder / "vit" / "config.json")


def test_predictions_of_a_dataset_are_shared_out_and_go_on(place, capsys, tmp_path, monkeypatch):
    folder, _ = place
    given = "predict", folder / "out", "--dataset", folder / "images", "--split", "test", "--out"
    said(capsys, *given, tmp_path / "whole.jsonl")
    whole = [json.loads(line) for line in (tmp_path / "whole.jsonl").read_text().splitlines()]
    assert [row["row"] for row in whole] == list(range(16))
    model = load_experts(make_vit(), folder / "out")
    files = sorted((folder / "images" / "test").rglob("*.png"))
    assert [row["label"] for row in whole] == [one.label for one in model.predict(files)]
    monkeypatch.setattr(cli, "CHUNK", 3)
    monkeypatch.setattr(PartialState(), "num_processes", 2)
    parts = []
    for index in (0, 1):
        monkeypatch.setattr(PartialState(), "process_index", index)
        file = tmp_path / f"answers.{index}-of-2.jsonl"
        said(capsys, *given, tmp_path / "answers.jsonl")
        content = file.read_bytes()
        parts += [json.loads(line) for line in content.decode().splitlines()]
        part = content.decode()[: len(content) * 2 // 3]

        def cut_off(out, *args, text=part, **kwargs):
            out.write(text)
            raise ZeroDivisionError

        with monkeypatch.context() as killed:  # in the middle of a line
            killed.setattr(cli, "_write_answers", cut_off)
            with pytest.raises(ZeroDivisionError):
                cli.main([str(argument) for argument in (*given, tmp_path / "answers.jsonl")])
        assert file.read_bytes() == content
        said(capsys, *given, tmp_path / "answers.jsonl", "--top_k", 2)  # other answers do not go on with these
        assert len(json.loads(file.read_text().splitlines()[0])["top"]) == 2
        cli.main([str(argument) for argument in (*given, tmp_path / "answers.jsonl")])
        assert "has the answers for the first 5 of 8 images" in capsys.readouterr().err
        assert file.read_bytes() == content
    assert not list(tmp_path.glob("*.partial"))
    parts.sort(key=lambda row: row["row"])
    for one, other in zip(parts, whole, strict=True):
        assert one["label"] == other["label"]
        assert one["probability"] == pytest.approx(other["probability"])
    assert "one of both" in refused(capsys, *given, tmp_path / "more.jsonl", *files[:1])
    assert "several processes write files" in refused(capsys, *given[:-1])


def test_evaluate_matches_classes_by_name(place, capsys):
    folder, _ = place
    report = json.loads(said(capsys, "evaluate", folder / "out", "--dataset", folder / "images", "--json"))
    assert report["accuracy"] == pytest.approx(read_json(folder / "out" / "results.json")["last_accuracy"])
    assert sorted(report["classes"]) == sorted(FOUR)
    assert "16 images: accuracy" in said(capsys, "evaluate", folder / "out", "--dataset", folder / "images")


def test_delete_needs_no_data_and_the_next_start_measures_the_others(place, capsys, tmp_path):
    folder, given = place
    out = shutil.copytree(folder / "out", tmp_path / "out")
    assert "there is no expert 'x'" in refused(capsys, "delete", out, "x")
    shown = said(capsys, "delete", out, "task_0")
    assert "1 expert " in shown
    assert "Accuracy" not in shown  # until the others have been measured
    assert "is the only expert" in refused(capsys, "delete", out, "task_1")
    assert not (out / "task_0").exists()
    said(capsys, "train", *[str(out) if argument == str(folder / "out") else argument for argument in given])
    assert not (out / JOURNAL_NAME).exists()
    results = read_json(out / "results.json")
    assert [task.get("deleted", False) for task in results["tasks"]] == [True, False]
    assert results["last_accuracy"] == 1.0  # of two classes that are told apart
    assert not (out / "task_0").exists()


def test_pull_compose_and_delete_of_a_collection(place, capsys, tmp_path):
    folder, _ = place
    said(capsys, "pull", folder / "out", tmp_path / "copy")
    whole = contents(folder / "out")
    left_out = {"results.json", "matrix.jsonl", "preprocessor_config.json"}
    assert contents(tmp_path / "copy") == {name: whole[name] for name in whole if name not in left_out}
    both = tmp_path / "both"
    said(capsys, "compose", both, f"mine={folder / 'out'}", f"theirs={tmp_path / 'copy'}")
    assert list(load_experts(make_vit(), both).experts) == [
        f"{a}_task_{i}" for a in ("mine", "theirs") for i in (0, 1)
    ]
    assert "is not empty" in refused(capsys, "compose", both, folder / "out")
    assert "a name of its own" in refused(capsys, "compose", tmp_path / "new", f"mine={folder / 'out'}", both)
    said(capsys, "delete", tmp_path / "copy", "task_1")
    assert {name.split("/")[0] for name in files_in(tmp_path / "copy")} == {"experts.json", "task_0"}
    assert list(load_experts(make_vit(), tmp_path / "copy").experts) == ["task_0"]


def test_help_fits_on_two_screens_and_has_examples(capsys):
    for given in (["--help"], ["train", "--help"], ["predict", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(given)
        assert stopped.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) < 60
        assert given[0] != "--help" or "examples:" in lines
    with pytest.raises(SystemExit):
        cli.main(["train", "--help-all"])
    assert "--adam_beta2" in capsys.readouterr().out


def test_what_cannot_be_done_is_said_in_a_line(capsys, tmp_path, monkeypatch):
    assert "neither a folder nor a Hub id" in refused(capsys, "show", tmp_path / "nowhere")
    assert "adapter_config.json" in refused(capsys, "show", tmp_path)
    assert "invalid choice" in refused(capsys, "fly")
    monkeypatch.setattr(cli, "load_backbone", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    images = make_images(FOUR)
    images.to_parquet(tmp_path / "train.parquet")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "--model", "x", "--dataset", str(tmp_path), "--output_dir", str(tmp_path / "out")])
    assert stopped.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("peft-luca: interrupted. What was finished is kept")
