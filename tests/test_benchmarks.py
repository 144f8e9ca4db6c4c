"""The harness of the benchmarks: one command, one row, on any data set; and the page that is made of the rows."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import growth
import layerwise
import methods
import numpy as np
import pytest
import report
import run
import torch
import tsne
from bench import Bench
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from helpers import COLORS, NAMES, SIDE, draw, make_images, make_processor, make_splits, make_vit


ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "examples" / "benchmarks"
CONFIGS = {path.stem: json.loads(path.read_text()) for path in sorted((BENCHMARKS / "configs").glob("*.json"))}
QUICK = {
    **{name: {"training": {"num_train_epochs": 2}} for name in ("luca", "luca_gaussian", "joint_luca")},
    "luca_paper": {"training": {"recipe": "paper", "augmentation": False, "num_train_epochs": 2}},
    "sequential_head": {"rate": 0.05},
    "lora": {"epochs": 1},
    "sequential_lora": {"epochs": 1},
}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("backbone")
    make_vit().save_pretrained(folder)
    make_processor().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    """Six colours, saved to disk, with a column that tells two domains apart."""
    folder = tmp_path_factory.mktemp("data") / "colors"
    splits = make_splits()
    for split, images in splits.items():
        domains = Value("string")
        splits[split] = images.add_column("domain", ["plain", "loud"] * (len(images) // 2), feature=domains)
    splits.save_to_disk(folder)
    return str(folder)


@pytest.fixture
def row(backbone, colors, tmp_path):
    """Run a row and read its file."""

    def one(*arguments, config=None, dataset=colors, method="simplecil", seeds=("1993",)):
        given = [] if config is None else [str(BENCHMARKS / "configs" / f"{config}.json")]
        given += ["--model", backbone, "--dataset", str(dataset), "--method", method, "--results", str(tmp_path)]
        given += ["--settings", json.dumps(QUICK.get(method, {})), "--seeds", *seeds]
        run.run([*given, *arguments])
        (file,) = tmp_path.glob(f"*/{method}.json")
        return json.loads(file.read_text())

    return one


@pytest.mark.parametrize("method", methods.METHODS)
def test_every_method_answers_every_image_by_the_same_code(row, method):
    result = row("--increment", "2", method=method, seeds=("1993", "0"))
    assert result["stream"]["tasks"] == [2, 2, 2]
    assert [seed["seed"] for seed in result["seeds"]] == [1993, 0]
    assert result["command"].startswith("python examples/benchmarks/run.py")
    assert {"torch", "peft", "machine"} <= set(result["environment"])
    summary = result["summary"]
    last = [seed["last_accuracy"] for seed in result["seeds"]]
    assert summary["last_accuracy"]["mean"] == pytest.approx(sum(last) / 2, abs=1e-4)
    assert summary["last_accuracy"]["mean"] > 1 / 6
    assert summary["stage_classes"] == [2, 4, 6]
    joint, experts = method.startswith("joint"), method in ("luca", "luca_gaussian", "luca_paper", "probes", "lora")
    assert ("average_accuracy" in summary) == (not joint)
    assert ("routing_accuracy" in summary) == ("task_known_accuracy" in summary) == experts
    if experts:
        assert summary["task_known_accuracy"]["mean"] >= summary["last_accuracy"]["mean"]
    if not joint:
        assert summary["average_accuracy"]["mean"] == pytest.approx(np.mean(summary["stage_accuracies"]), abs=2e-4)
    passes = 0.0 if "lora" in method else 1.0
    assert summary["learning_passes"]["mean"] > passes
    assert summary["answering_passes"]["mean"] > passes
    assert summary["parameters_per_task"]["mean"] > 0
    assert summary["bytes_per_task"]["mean"] >= 4 * summary["parameters_per_task"]["mean"]


def test_what_has_one_head_for_all_forgets(row):
    head = row("--increment", "2", method="sequential_head")["summary"]
    means = row("--increment", "2", method="simplecil")["summary"]
    assert head["forgetting"]["mean"] > 0.5 > means["forgetting"]["mean"]


def test_a_luca_task_has_the_parameters_of_the_paper(row):
    found = row("--increment", "2", method="luca")["summary"]["parameters_per_task"]["mean"]
    d, r = 32, 2
    assert found == (2 * d * r + r + d) + 2 * d + 2 * d * r + 2 * d + 1  # adapter, LN, calibrator, rows, σ


def test_class_means_are_what_they_are_by_hand(backbone, colors, row):
    result = row("--increment", "3")
    bench = Bench(run.parse(["--model", backbone, "--dataset", colors]))
    (task,) = bench.whole
    train, test = (bench.part(task, split, bench.classes) for split in ("train", "test"))
    x, z = bench.unit(train.features), bench.unit(test.features)
    means = torch.stack([x[train.labels == k].mean(0) for k in range(6)])
    cosines = torch.nn.functional.cosine_similarity(z[:, None], means[None], dim=2)
    expected = float((cosines.argmax(1) == test.labels).double().mean())
    assert result["seeds"][0]["last_accuracy"] == pytest.approx(expected)


@pytest.mark.parametrize("method", ["luca", "luca_gaussian", "simplecil", "joint_luca", "lora"])
def test_domains_are_learnt_one_after_another(row, method):
    result = row("--domain_column", "domain", "--domain_order", "plain", "loud", method=method)
    assert result["stream"]["tasks"] == [6, 6]
    assert result["stream"]["train_images"] == 48
    assert result["summary"]["stage_classes"] == [6, 6]


def test_all_methods_of_a_seed_see_the_same_tasks(backbone, colors):
    bench = Bench(run.parse(["--model", backbone, "--dataset", colors, "--increment", "2"]))
    one, other = bench.stream(1993), bench.stream(1993)
    assert one.classes == other.classes == tuple(NAMES[i] for i in np.random.RandomState(1993).permutation(6))
    assert bench.stream(0).classes != one.classes
    images = {tuple(z.tolist()) for task in one for z in bench.part(task, "train", one.classes).features}
    assert len(images) == 48


def test_a_row_of_a_config_has_the_configs_arguments(row):
    result = row("--test_size", "0", config="digits")
    assert result["command"].startswith(
        "python examples/benchmarks/run.py examples/benchmarks/configs/digits.json --model "
    )
    assert (result["stream"]["dataset"], result["stream"]["tasks"]) == ("colors", [2, 2, 2])


# ---- the paper's data sets, as small local ones of the same form ----------------------------------------------------


def table(names, columns, per_class, label, split_seed=0):
    """Drawn images of as many classes as there are names, with columns of the types that a Hub data set has."""
    rng = np.random.default_rng(split_seed)
    shades = list(COLORS.values())
    pictures = [draw(shades[k % 6], rng) for k in range(len(names)) for _ in range(per_class)]
    ids = [k for k in range(len(names)) for _ in range(per_class)]
    data, features = {}, {}
    for column, kind in columns.items():
        features[column] = kind if isinstance(kind, Image | Value) else kind(names)
        if isinstance(features[column], Image):
            data[column] = pictures
        elif column == label and isinstance(features[column], Value):
            data[column] = [names[k] for k in ids]
        elif isinstance(features[column], ClassLabel):
            data[column] = [k % features[column].num_classes for k in ids]
        else:
            data[column] = [f"{column} {i}" for i in range(len(ids))]
    return Dataset.from_dict(data, features=Features(features))


def class_label(names):
    return ClassLabel(names=list(names))


def coarse(names):
    return ClassLabel(names=["animals", "things"])


# Columns, and images of a class in each split.
FORMS = {
    "uoft-cs/cifar100": ({"img": Image(), "fine_label": class_label, "coarse_label": coarse}, {"train": 3, "test": 2}),
    "Donghyun99/CUB-200-2011": ({"image": Image(), "label": class_label}, {"train": 3, "test": 2}),
    "axiong/imagenet-r": ({"image": Image(), "wnid": Value("string"), "class_name": Value("string")}, {"test": 5}),
    "barkermrl/imagenet-a": ({"image": Image(), "label": class_label}, {"train": 5}),
    "timm/eurosat-rgb": (
        {"image": Image(), "label": class_label, "image_id": Value("string")},
        {"train": 3, "validation": 1, "test": 2},
    ),
}


def lay_out(config, folder):
    """A small copy of a config's data set: parquet files with its columns, or folders of images."""
    names = [f"n{7 * k + 10:04d}" for k in range(2 * config["increment"])]
    if config["dataset"] in FORMS:
        columns, splits = FORMS[config["dataset"]]
        (folder / "data").mkdir(parents=True)
        for number, (split, per_class) in enumerate(splits.items()):
            label = config.get("label_column", "label")
            table(names, columns, per_class, label, number).to_parquet(
                folder / "data" / f"{split}-00000-of-00001.parquet"
            )
        return names
    for number, (split, per_class) in enumerate({"train": 3, "test": 2}.items()):
        rng = np.random.default_rng(number)
        for k, name in enumerate(names):
            (folder / split / name).mkdir(parents=True)
            for i in range(per_class):
                draw(list(COLORS.values())[k % 6], rng).save(folder / split / name / f"{i}.jpg")
    return names


UNMEASURED = [name for name, config in CONFIGS.items() if not config["offline"]]


@pytest.mark.parametrize("name", UNMEASURED)
def test_a_data_set_of_the_papers_is_loaded_and_cut_as_its_config_says(name, row, backbone, tmp_path):
    config = CONFIGS[name]
    folder = tmp_path / "data" / name
    names = lay_out(config, folder)
    result = row("--image_size", str(SIDE), config=name, dataset=folder)
    assert result["stream"]["tasks"] == [config["increment"]] * 2
    train, test = (4, 1) if "test_size" in config else (3, 2)
    assert result["stream"]["train_images"] == train * len(names)
    assert result["stream"]["test_images"] == test * len(names)
    arguments = run.arguments_of(config)
    bench = Bench(run.parse([*arguments, "--dataset", str(folder), "--model", backbone, "--image_size", str(SIDE)]))
    order = np.random.RandomState(1993).permutation(len(names))
    in_order = names if config.get("class_order") == "dataset" else [names[i] for i in order]
    assert list(bench.stream(1993).classes) == in_order


def test_the_papers_data_sets_have_the_papers_hyperparameters():
    assert {name.split("_inc")[0] for name in UNMEASURED} == {
        "cifar100", "cub200", "imagenet_r", "imagenet_a", "omnibenchmark", "vtab", "eurosat"
    }  # fmt: skip
    for name in UNMEASURED:
        config = CONFIGS[name]
        training = config["rows"]["luca_paper"]["settings"]["training"]
        assert (training["learning_rate"], training["num_train_epochs"]) == (0.025, 20)
        assert (training["per_device_train_batch_size"], training["l1_weight"]) == (48, 5e-4)
        assert training["augmentation"]
        assert config["seeds"] == [1993]
        assert config["source"]
        assert (config["image_size"], f"inc{config['increment']}") == (224, name.rsplit("_", 1)[1])


# ---- other people's data sets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["paths", "bytes"])
def test_a_column_of_paths_or_bytes_becomes_images_when_it_is_named(kind, row, tmp_path):
    folder, pictures = tmp_path / "data", tmp_path / "pictures"
    folder.mkdir()
    pictures.mkdir()
    for split, images in make_splits(NAMES[:4]).items():
        rows = {"label": [NAMES[k] for k in images["label"]]}
        paths = [pictures / f"{split}{i}.png" for i in range(len(images))]
        for path, image in zip(paths, images["image"], strict=True):
            image.save(path)
        rows["picture"] = [
            str(path) if kind == "paths" else {"bytes": path.read_bytes(), "path": None} for path in paths
        ]
        Dataset.from_dict(rows).to_parquet(folder / f"{split}.parquet")
    result = row("--increment", "2", "--image_column", "picture", dataset=folder)
    assert result["stream"]["classes"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "no/such-data", "--increment", "2"], "cannot be loaded.*Needed: a Hub id, a folder"),
        (["--label_column", "labels", "--increment", "2"], "no column 'labels'; pass label_column, one of"),
        (["--image_column", "photo", "--increment", "2"], "no column 'photo'; pass image_column"),
        (["--image_column", "label", "--increment", "2"], "column 'label' holds .*neither images nor paths"),
        (["--increment", "7"], "--increment 7 is more than the 6 classes that there are"),
        (["--increment", "0"], "number of classes of a task, at least 1, not 0"),
        (["--increment", "2", "--settings", "{x"], "--settings is no JSON"),
        (["--increment", "2", "--name", "a/../b"], "--name is the name of a folder"),
        (["--nme", "x"], "there is no argument '--nme'"),
        (["--test_split", "dev", "--increment", "2"], "no split 'dev'; it has"),
        (["--test_size", "0.5", "--increment", "2"], "leave out test_size"),
        (["--increment", "2", "--settings", '{"epoch": 3}'], "simplecil has no epoch to set"),
        (["--method", "probes", "--increment", "1"], "increment of at least 2"),
        ([], "how are the tasks cut"),
        (["--domain_column", "style"], "no column 'style'; pass domain_column"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(row, arguments, message):
    with pytest.raises(SystemExit, match=f"(?s){message}"):
        row(*arguments)


def test_a_data_set_without_test_images_is_refused_with_what_to_do(row, tmp_path):
    make_images().save_to_disk(tmp_path / "train_only")
    with pytest.raises(SystemExit, match=r"no test images. Name their split with --test_split.*--test_size 0.2"):
        row("--increment", "2", dataset=tmp_path / "train_only")
    assert (
        row("--test_size", "0.25", "--increment", "2", dataset=tmp_path / "train_only")["stream"]["test_images"] == 12
    )


def test_a_config_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(SystemExit, match=r"no config none\.json\. There are .*digits.json"):
        run.run(["none.json"])


def test_one_task_whose_classes_have_no_test_images_is_left_out(row, tmp_path):
    splits = make_splits()
    splits["test"] = splits["test"].filter(lambda label: label != 3, input_columns="label")
    DatasetDict(splits).save_to_disk(tmp_path / "part")
    result = row("--increment", "1", dataset=tmp_path / "part", method="luca")
    assert result["stream"]["test_images"] == 20
    assert 0 < result["summary"]["last_accuracy"]["mean"] <= 1


def test_all_that_can_run_offline_is_run(monkeypatch):
    asked = []
    monkeypatch.setattr(run, "Bench", lambda args: None)
    monkeypatch.setattr(
        run, "run_row", lambda args, bench, command: asked.append((args.name, args.method, args.seeds))
    )
    run.run(["--all"])
    offline = {name: config["rows"] for name, config in CONFIGS.items() if config["offline"]}
    assert [(name, method) for name, method, _ in asked] == [(name, m) for name, rows in offline.items() for m in rows]
    seeds = {(name, method): seeds for name, method, seeds in asked}
    assert seeds["digits", "lora"] == [1993, 0, 1, 2, 3]
    assert seeds["emoji_6x9", "lora"] == [1993]


def test_a_row_is_a_command(tmp_path, backbone, colors):
    command = [
        sys.executable,
        str(BENCHMARKS / "run.py"),
        "--model",
        backbone,
        "--dataset",
        colors,
        "--increment",
        "3",
    ]
    command += ["--method", "lda", "--seeds", "5", "--results", str(tmp_path)]
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "colors, lda, seed 5: A_B" in done.stdout
    assert (tmp_path / "colors" / "lda.json").is_file()


# ---- growth, counts, pictures ---------------------------------------------------------------------------------------


def test_what_is_drawn_has_the_data_sets_covariances(backbone, colors):
    bench = Bench(run.parse(["--model", backbone, "--dataset", colors]))
    train = bench.part(bench.whole[0], "train", bench.classes)
    drawn = growth.Drawn(train, seed=0)
    z = drawn.images(0, 4000).double()
    means = torch.stack([train.features[train.labels == k].double().mean(0) for k in range(6)])
    away = train.features.double() - means[train.labels]
    within = away.T @ away / (len(away) - 6)
    assert float((torch.cov(z.T) - within).norm() / within.norm()) < 0.1
    centres = torch.stack([drawn.images(k, 1).double()[0] for k in range(3000)])
    between = torch.cov(means.T)
    assert float((torch.cov(centres.T) - between - within).norm() / (between + within).norm()) < 0.15
    assert torch.equal(drawn.images(3, 5), drawn.images(3, 5))
    assert not torch.equal(drawn.images(3, 5), drawn.images(3, 5, draw=1))


def test_growth_measures_every_stop(monkeypatch, backbone, colors, tmp_path):
    output = tmp_path / "growth.json"
    arguments = ["--model", backbone, "--dataset", colors, "--experts", "2", "4", "--images", "4", "--tests", "20"]
    arguments += ["--epochs", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["growth.py", *arguments])
    growth.grow(growth.parse(arguments))
    first, second = json.loads(output.read_text())["rows"]
    assert (first["experts"], second["experts"], second["classes"]) == (2, 4, 8)
    for name in ("experts in memory, bytes", "experts on disk, bytes", "statistics on disk, bytes"):
        assert second[name] == pytest.approx(2 * first[name], rel=0.02)
    assert 0 <= second["gaussian accuracy"] <= 1
    assert "## " not in report.growth_tables(json.loads(output.read_text()))


def test_parameters_are_counted():
    counts = layerwise.parameters()
    assert counts["LuCA"] == 149_808
    assert counts["adapter of width 64 in 12 blocks"] == 12 * (2 * 64 * 768 + 64 + 768)
    assert counts["LoRA, rank 8, q and v"] == 12 * 2 * 2 * 8 * 768
    assert counts["LoRA, rank 16, q and v"] == 2 * counts["LoRA, rank 8, q and v"]


def test_a_layer_wise_adapter_starts_as_nothing_and_learns():
    vit, z = make_vit(), torch.randn(2, 3, SIDE, SIDE)
    before = vit(z).logits
    adapters = layerwise.add_layer_adapters(vit, 4)
    assert torch.equal(vit(z).logits, before)
    vit(z).logits.sum().backward()
    assert all(adapter.up.weight.grad.abs().sum() > 0 for adapter in adapters)
    assert all(parameter.grad is None for parameter in vit.parameters())


def test_tsne_sees_an_image_by_its_own_tasks_expert(backbone, colors):
    bench = Bench(run.parse(["--model", backbone, "--dataset", colors, "--increment", "3"]))
    raw, labels, ids = tsne.see(None, bench, 1993)
    adapted, same, _ = tsne.see(tsne.AdapterAlone, bench, 1993)
    assert torch.equal(labels, same)
    assert {ids[k] for k in labels.tolist()} == set(bench.stream(1993)[-1].classes)
    assert raw.shape == adapted.shape == (12, 32)
    panel = tsne.place(raw, labels)
    assert len(panel["points"]) == 12
    assert -1 <= panel["silhouette"] <= 1


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_of_results_is_what_the_results_files_make():
    page = report.page(BENCHMARKS / "results", BENCHMARKS / "configs")
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == page, "run examples/benchmarks/report.py"


def test_a_stream_of_ones_own_is_on_the_page(tmp_path):
    results = tmp_path / "results"
    shutil.copytree(BENCHMARKS / "results", results)
    shutil.copytree(results / "digits", results / "mine")
    page = report.page(results, BENCHMARKS / "configs")
    assert page.count("### mine\n") == 1
    assert page.split("### mine\n")[1].count("| LDA | ") == 1


def test_every_result_is_of_its_configs_row_or_named_as_unfinished():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for name, config in CONFIGS.items():
        for method in config["rows"] if config["offline"] else ():
            seeds = config["rows"][method].get("seeds", [1993, 0, 1, 2, 3])
            path = BENCHMARKS / "results" / name / f"{method}.json"
            result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"seeds": []}
            measured = [row["seed"] for row in result["seeds"]]
            assert measured == seeds[: len(measured)]
            label = report.METHODS[method].replace("*", "")
            assert (f"`{name}`, {label}: " in page) == (len(measured) < len(seeds))
            if measured:
                command = f"run.py examples/benchmarks/configs/{name}.json --method {method}"
                assert result["command"] == f"python examples/benchmarks/{command}"


def test_the_pictures_are_drawn(tmp_path):
    results = BENCHMARKS / "results"
    report.draw_accuracy(results, tmp_path / "accuracy.png")
    report.draw_growth(report.read(results / "growth.json"), tmp_path / "growth.png")
    report.draw_tsne(report.read(results / "tsne.json"), tmp_path / "tsne.png")
    for name in ("accuracy", "growth", "tsne"):
        drawn, kept = tmp_path / f"{name}.png", ROOT / "docs" / "images" / f"{name}.png"
        assert f"images/{name}.png" in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
        assert drawn.stat().st_size > 5_000
        assert kept.stat().st_size < 300_000
