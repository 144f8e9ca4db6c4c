"""Every command of a results file parses, the harness measures every method, each script writes its figures."""

import copy
import importlib
import json
import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import ablations
import calibration
import cost
import evidence
import growth
import harness
import methods
import numpy as np
import published
import pytest
import report
import routing
import run
import torch
import tsne
from datasets import ClassLabel, Dataset, Features, Value
from helpers import COLORS, NAMES, SIDE, draw, make_processor, make_splits, make_vit

from peft_luca.routing.discriminants import RegularizedDiscriminant
from peft_luca.routing.statistics import ClassStatistics


ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "examples" / "benchmarks" / "results"
CONFIGS = {path.stem: json.loads(path.read_text()) for path in sorted(harness.CONFIGS.glob("*.json"))}
QUICK = {
    **{name: {"training": {"num_train_epochs": 2}} for name in ("luca", "luca_gaussian", "joint_luca")},
    **{name: {"epochs": 1} for name in ("lora", "sequential_lora")},
    "luca_paper": {"training": {"recipe": "paper", "augmentation": False, "num_train_epochs": 2}},
    "sequential_head": {"rate": 0.05},
}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Arguments of a backbone and of six colours, which a column puts into two domains."""
    folder = tmp_path_factory.mktemp("given")
    make_vit().save_pretrained(folder / "backbone")
    make_processor().save_pretrained(folder / "backbone")
    splits = make_splits()
    for split, images in splits.items():
        splits[split] = images.add_column("domain", ["plain", "loud"] * (len(images) // 2), feature=Value("string"))
    splits.save_to_disk(folder / "colors")
    return ["--model", str(folder / "backbone"), "--dataset", str(folder / "colors")]


def bench_of(given, *arguments):
    return harness.Bench(harness.parse(harness.StreamArguments, [*given, *arguments]))


@pytest.fixture(scope="module")
def bench(given, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("features")))
        return bench_of(given, "--increment", "2")


def quick(name):
    return type(name, (methods.METHODS[name],), QUICK.get(name, {}))


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_command_of_a_results_file_parses(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    python, script, *arguments = shlex.split(read(path)["command"])
    assert (python, Path(script).is_file()) == ("python", True)
    if Path(script).parent.name == "benchmarks":
        importlib.import_module(Path(script).stem).parse_arguments(arguments)


def test_every_result_has_the_seeds_and_the_command_of_its_config():
    unfinished = report.unfinished(RESULTS)
    for name, config in CONFIGS.items():
        for method in config["rows"] if config["offline"] else ():
            result = read(RESULTS / name / f"{method}.json")
            seeds = config["rows"][method].get("seeds", [1993, 0, 1, 2, 3])
            measured = [row["seed"] for row in result["seeds"]]
            assert measured == seeds[: len(measured)]
            assert (f"`{name}`, {report.METHODS[method].replace('*', '')}: " in unfinished) == (measured != seeds)
            command = f"run.py examples/benchmarks/configs/{name}.json --method {method}"
            assert result["command"] == f"python examples/benchmarks/{command}"


def test_all_stands_for_every_row_of_every_config_without_network():
    asked = [(args.name, args.method) for found in run.parse_arguments(["--all"]) for args, _ in found]
    assert asked == [(name, m) for name, config in CONFIGS.items() if config["offline"] for m in config["rows"]]


REFUSED = {
    "--increment 0": "--increment must be at least 1, got 0",
    "--increment 2 --settings {x": "--settings must be JSON",
    '--increment 2 --settings {"epoch":3}': "luca has no attribute epoch",
    "--increment 2 --name a/../b": "--name must be the name of a folder",
    "--nme x": "there is no argument '--nme'",
    "": "no tasks. Give --increment",
    "--increment 7": "--increment 7 is more than the 6 classes",
    "--increment 2 --dataset no/such-data": "'no/such-data' cannot be read",
    "--increment 2 --test_split dev": "cannot be read: the dataset has no split 'dev'",
    "--increment 2 --image_column label": "cannot be read",
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.items())
def test_what_does_not_fit_is_refused_in_words(given, arguments, message):
    with pytest.raises(SystemExit, match=f"(?s){message}"):
        harness.Bench(run.parse_arguments([*given, *arguments.split()])[0][0][0])


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_is_measured_by_the_same_code(name, bench):
    figures = harness.measure(quick(name), bench, 0)
    assert (figures["last_accuracy"] > 1 / 7, figures["stage_classes"]) == (True, [2, 4, 6])
    assert (figures["average_accuracy"] is None) == name.startswith("joint")
    has_experts = name in ("luca", "luca_gaussian", "luca_paper", "probes", "lora")
    assert (figures["routing_accuracy"] is not None) == has_experts
    if has_experts:
        assert figures["task_known_accuracy"] >= figures["last_accuracy"]
    passes = 0.0 if "lora" in name else 1.0
    assert min(figures["learning_passes"], figures["answering_passes"]) > passes
    assert figures["bytes_per_task"] >= 4 * figures["parameters_per_task"] > 0
    if name == "luca":
        d, r = 32, 2  # adapter, LN, calibrator, rows, σ
        assert figures["parameters_per_task"] == (2 * d * r + r + d) + 2 * d + 2 * d * r + 2 * d + 1
    if name == "sequential_head":
        assert figures["forgetting"] > 0.4


def test_a_run_writes_its_command_and_what_it_measured_by_hand(given, bench, tmp_path):
    arguments = [*given, *"--increment 3 --method simplecil --seeds 1993 0 --results".split(), str(tmp_path)]
    (((args, command),),) = run.parse_arguments(arguments)
    run.run(args, bench, command)
    result = read(tmp_path / "colors" / "simplecil.json")
    assert shlex.split(result["command"])[2:] == arguments
    assert {"torch", "peft", "machine"} <= set(result["environment"])
    assert [result["stream"][name] for name in ("classes", "train_images", "test_images")] == [6, 48, 24]
    train, test = bench.parts["train"], bench.parts["test"]
    x, z = bench.unit(train.features), bench.unit(test.features)
    means = torch.stack([x[train.labels == k].mean(0) for k in range(6)])
    cosines = torch.nn.functional.cosine_similarity(z[:, None], means[None], dim=2)
    expected = float((cosines.argmax(1) == test.labels).double().mean())
    assert [seed["last_accuracy"] for seed in result["seeds"]] == pytest.approx([expected] * 2)
    assert result["summary"]["last_accuracy"] == {"mean": pytest.approx(expected, abs=1e-4), "deviation": 0.0}


def test_a_method_of_ones_own_is_measured_as_the_page_says(given, bench, tmp_path):
    code, command = re.findall(r"```(?:python|bash)\n(.*?)```", (ROOT / "examples" / "README.md").read_text(), re.S)[
        -2:
    ]
    own = tmp_path / "medians.py"
    own.write_text(code)
    assert "--method medians.py" in command
    arguments = [*given, "--increment", "3", "--method", str(own), "--seeds", "0", "--results", str(tmp_path)]
    (((args, line),),) = run.parse_arguments(arguments)
    run.run(args, bench, line)
    result = read(tmp_path / "colors" / "medians.json")
    train, test = bench.parts["train"], bench.parts["test"]
    x, z = bench.unit(train.features), bench.unit(test.features)
    medians = torch.stack([x[train.labels == k].median(dim=0).values for k in range(6)])
    right = (torch.cdist(z, medians).argmin(1) == test.labels).double().mean()
    assert (result["method"], result["seeds"][0]["last_accuracy"]) == ("medians", pytest.approx(float(right)))
    own.write_text("x = 1")
    with pytest.raises(SystemExit, match=r"medians.py must define one subclass of Method, got 0"):
        run.parse_arguments(arguments)
    with pytest.raises(SystemExit, match=r"--method must be one of luca, .* or a Python file, got 'simplecli'"):
        run.parse_arguments([*given, "--increment", "3", "--method", "simplecli"])


def test_a_seed_decides_the_order_of_classes_and_domains_come_one_after_another(bench, given):
    one = bench.stream(1993)
    assert one.classes == tuple(NAMES[i] for i in np.random.RandomState(1993).permutation(6))
    assert bench.stream(0).classes != one.classes
    images = {tuple(z.tolist()) for task in one for z in bench.part(task, "train", one.classes).features}
    assert len(images) == 48
    domains = bench_of(given, "--domain_column", "domain", "--domain_order", "plain", "loud")
    assert [len(domains.part(task, "train", domains.classes)) for task in domains.stream(0)] == [24, 24]
    for method in ("luca", "simplecil", "joint_probe"):
        assert harness.measure(quick(method), domains, 0)["stage_classes"] == [6, 6]


def test_a_data_set_of_the_paper_is_read_and_cut_as_its_config_says(given, tmp_path):
    """CIFAR-100 by its columns, with images as paths, and with a class that has no test image."""
    names, rng = [f"n{7 * k + 10:04d}" for k in range(10)], np.random.default_rng(0)
    for split, ids in (("train", [*range(10)] * 3), ("test", [*range(9)] * 2)):
        paths = [str(tmp_path / f"{split}{i}.png") for i in range(len(ids))]
        for path, k in zip(paths, ids, strict=True):
            draw(list(COLORS.values())[k % 6], rng).save(path)
        rows = {"img": paths, "fine_label": ids, "coarse_label": ["thing"] * len(ids)}
        columns = {"img": Value("string"), "fine_label": ClassLabel(names=names), "coarse_label": Value("string")}
        (tmp_path / "data").mkdir(exist_ok=True)
        Dataset.from_dict(rows, features=Features(columns)).to_parquet(tmp_path / "data" / f"{split}.parquet")
    config = [str(harness.CONFIGS / "cifar100_inc5.json"), *given[:2], "--dataset", str(tmp_path / "data")]
    bench = harness.Bench(harness.parse(harness.StreamArguments, [*config, "--image_size", str(SIDE)]))
    assert (len(bench.parts["train"]), len(bench.parts["test"])) == (30, 18)
    assert [len(task.classes) for task in bench.stream(1993)] == [5, 5]
    assert list(bench.stream(1993).classes) == [names[i] for i in np.random.RandomState(1993).permutation(10)]
    bench.args.class_order, bench.args.increment = "dataset", 1
    assert list(bench.stream(1993).classes) == names
    assert 0 < harness.measure(methods.SimpleCil, bench, 0)["last_accuracy"] <= 1


def test_configs_of_the_papers_data_sets_have_the_papers_hyperparameters():
    wanted = {"learning_rate": 0.025, "num_train_epochs": 20, "l1_weight": 5e-4, "augmentation": True}
    for name, config in CONFIGS.items():
        if not config["offline"]:
            assert config["rows"]["luca_paper"]["settings"]["training"].items() >= wanted.items()
            assert (config["image_size"], f"inc{config['increment']}") == (224, name.rsplit("_", 1)[1])


@pytest.mark.filterwarnings("ignore:routing_scope")
def test_every_router_is_measured_on_the_same_experts_and_baselines_on_the_same_features(bench, monkeypatch):
    monkeypatch.setattr(methods, "RANPAC_WIDTH", 100)
    kept = read(RESULTS / "routing_digits.json")
    assert set(routing.measure_baselines(bench, [0])) == set(kept["baselines_last_accuracy"])
    found = routing.measure_routers(0, bench, random_features=50)
    assert set(found) == set(routing.ROUTERS)
    for figures in found.values():
        assert {"last_accuracy", "routing_accuracy", "calibration_error", "unknown_auroc"} <= set(figures)
    assert found["entropy"]["task_known_accuracy"] >= found["entropy"]["routing_accuracy"]
    assert set(found["entropy"]) == set(kept["summary"]["entropy"])


def test_the_weight_of_a_mixture_is_chosen_without_test_images(bench, monkeypatch):
    quick = type("Quick", (methods.LucaGaussian,), {"training": {"num_train_epochs": 1}})
    monkeypatch.setattr(routing, "LucaGaussian", quick)
    blind = copy.copy(bench)
    blind.parts = {"train": bench.parts["train"]}
    chosen = routing.chosen_weights(0, blind, folds=2)
    assert set(chosen) == {*(task.name for task in bench.stream(0)), "all"}
    assert set(chosen.values()) <= set(routing.MIXTURE_WEIGHTS)


def test_a_mixture_of_weight_zero_is_auto_alone(bench, monkeypatch):
    quick = type("Quick", (methods.LucaGaussian,), {"training": {"num_train_epochs": 1}})
    monkeypatch.setattr(routing, "LucaGaussian", quick)
    found = routing.measure_mixture(0, bench, folds=2)
    learner = routing.learned(0, bench)
    classes = tuple(learner.model.classes)
    test = bench.select("test", classes, classes)
    auto = routing.accuracy(learner.route(test, "auto").logits, test.labels)
    learner.close()
    assert found["weight 0, routed"] == found["weight 0, tasks by auto"] == auto
    assert found["weight 0, task known"] >= auto
    assert set(found) == set(read(RESULTS / "mixture_emoji_14.json")["summary"])


def test_evidence_is_measured_at_every_number_of_images(given, tmp_path, monkeypatch):
    output = tmp_path / "evidence.json"
    arguments = ["--increment", "2", "--images_per_class", "4", "--seeds", "0", "1", "--random_features", "20"]
    monkeypatch.setattr("sys.argv", ["evidence.py", *given, *arguments, "--output", str(output)])
    monkeypatch.setattr(evidence, "be_quiet", lambda: None)
    evidence.main()
    few, most = read(output)["rows"]
    assert (few["images"], most["images"]) == (4, 8)
    kept = read(RESULTS / "evidence_digits.json")["rows"][0]
    assert set(few) == set(most) == set(kept)
    assert 0 <= few["unknown AUROC"]["mean"] <= 1
    assert few["auto accuracy"]["mean"] > 0.5


def test_a_second_view_that_is_the_first_changes_nothing(bench):
    x, test = (bench.unit(bench.parts[split].features) for split in ("train", "test"))
    assert evidence.mirrored_features(bench).shape == x.shape
    found = evidence.measure_views(bench, 0, 4, {"plain": ([x], test), "mirrored": ([x, x], test)})
    for name in ("test accuracy", "left-out accuracy", "left-out log-loss"):
        assert found[f"mirrored, {name}"] == pytest.approx(found[f"plain, {name}"], rel=0.1)
    assert {"images", *found} == set(read(RESULTS / "views_emoji.json")["rows"][0])


def test_whitened_features_are_those_that_experts_see(bench):
    model = bench.model
    train, test = evidence.whitened_features(bench)
    assert len(test) == len(bench.parts["test"])
    torch.testing.assert_close(train.norm(dim=1), torch.ones(len(train)).double())
    assert not torch.allclose(train, bench.unit(bench.parts["train"].features), atol=1e-3)
    assert bench.model is model


def test_an_ablation_has_figures_of_its_own(bench):
    quick = {"training": {"num_train_epochs": 1, "l1_proximal": True, "l1_weight": 0.1}}
    sparse = harness.measure(type("Quick", (ablations.Sparse,), quick), bench, 0)
    assert 1 > sparse["sparsity"] > 0.1
    assert all(0 <= sparse[name] <= 1.01 for name in ("overlap", "subspace_cosine"))
    others = harness.measure(type("Quick", (ablations.OtherEntropies,), quick), bench, 0)
    assert {*ablations.FIGURES, "entropy_of_own_classes", "temperature 0.25"} <= set(others)


def test_drawn_features_have_the_data_sets_covariances(bench):
    train = bench.parts["train"]
    drawn = growth.Drawn(train, seed=0)
    z = drawn.images(0, 4000).double()
    means = torch.stack([train.features[train.labels == k].double().mean(0) for k in range(6)])
    away = train.features.double() - means[train.labels]
    within = away.T @ away / (len(away) - 6)
    assert float((torch.cov(z.T) - within).norm() / within.norm()) < 0.1
    total = torch.cov(torch.stack([drawn.images(k, 1).double()[0] for k in range(3000)]).T)
    assert float((total - torch.cov(means.T) - within).norm() / total.norm()) < 0.15
    assert torch.equal(drawn.images(3, 5), drawn.images(3, 5))


def test_growth_measures_every_stop(given, tmp_path):
    output = tmp_path / "growth.json"
    arguments = ["--experts", "2", "4", "--images", "4", "--tests", "20", "--epochs", "1", "--output", str(output)]
    growth.grow(growth.parse_arguments([*given, *arguments]))
    first, second = read(output)["rows"]
    assert (first["experts"], second["experts"], second["classes"]) == (2, 4, 8)
    for name in ("experts in memory, bytes", "experts on disk, bytes", "statistics on disk, bytes"):
        assert second[name] == pytest.approx(2 * first[name], rel=0.02)
    assert set(first) == set(read(RESULTS / "growth.json")["rows"][0])


@pytest.mark.filterwarnings("ignore:Adapter first was active")
@pytest.mark.parametrize(
    "arguments",
    [
        "routing --experts 3 --batch 1 --rounds 1 --rank 4 --classes_each 2",
        "learning --train_images 4 --test_images 4 --peer_images 4 --size 32",
        "parameters --images 1 --rounds 1",
        "overhead --images 60 --epochs 1 --rounds 1",
        "images --batch 2 --rounds 1",
        "extraction --images 9 --rounds 1",
        "memory --images 1000 --classes 10 --width 48 --steps 3",
    ],
)
def test_a_cost_is_measured_and_written(arguments, tmp_path, monkeypatch):
    vit = partial(cost.vit, intermediate_size=64)
    monkeypatch.setattr(cost, "vit", lambda **config: vit(**{"num_hidden_layers": 2, **config}))
    monkeypatch.setattr(cost, "be_quiet", lambda: None)
    monkeypatch.setattr(cost, "EPOCHS", 1)
    monkeypatch.setattr(cost, "TASKS", 2)
    cost.main([*arguments.split(), "--output", str(tmp_path / "cost.json")])
    kept = RESULTS / cost.COMMANDS[arguments.split()[0]][1]
    assert set(read(tmp_path / "cost.json")) >= set(read(kept)) - {"note"}


def test_parameters_are_counted():
    counts = cost.count_parameters()
    assert counts["LuCA"] == 149_808
    assert counts["adapter of width 64 in 12 blocks"] == 12 * (2 * 64 * 768 + 64 + 768)
    assert counts["LoRA, rank 16, q and v"] == 2 * counts["LoRA, rank 8, q and v"] == 12 * 2 * 2 * 16 * 768


def test_tsne_sees_the_images_of_the_last_task_after_each_step(bench):
    steps, classes = tsne.see(bench, 1993, quick("luca"))
    assert set(classes) == set(bench.stream(1993)[-1].classes)
    assert all((train.shape, test.shape) == ((16, 32), (8, 32)) for train, _, test, _ in steps.values())
    assert not any(torch.equal(steps["whitened"][2], steps[name][2]) for name in ("standardized", "LuCA"))
    x, y = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 2]]).repeat(2, 1), torch.tensor([3, 3, 5, 5] * 2)
    panel = tsne.place(x, y, x, y)
    assert (panel["cosines"], panel["class means"], len(panel["points"])) == ([[1, 0], [0, 1]], 1.0, 8)


def test_the_choice_follows_from_the_measurements_and_the_package_from_the_choice():
    ranked = calibration.choose([read(RESULTS / f"strengths_{name}.json") for name in ("digits", "emoji", "letters")])
    best = next(row for row in ranked if calibration.may_be_chosen(row))
    choice = read(RESULTS / "strengths_choice.json")
    assert (choice["ranked"], choice["chosen"]) == (ranked, best)
    torch.manual_seed(0)
    y = torch.arange(3).repeat_interleave(20)
    statistics = ClassStatistics.collect(torch.randn(60, 5), y, ["a", "b", "c"], rank=None)
    alpha = float(calibration.shrinkage(best["rule"], best["constant"], torch.tensor([19.0])))
    gaussian = RegularizedDiscriminant(statistics)
    spelled_out = RegularizedDiscriminant(statistics, alpha, volume=best["volume"], temperature=gaussian.temperature)
    x = torch.randn(10, 5)
    torch.testing.assert_close(gaussian.log_posterior(x), spelled_out.log_posterior(x))
    assert gaussian.temperature / 5**0.5 == pytest.approx(best["temperature over the root of the width"], abs=0.005)


def test_a_data_set_is_measured_with_the_grid_that_is_chosen_from(given, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "RULES", {"constant": (0.5,), "images": (0.01,)})
    output = tmp_path / "strengths.json"
    calibration.measure(calibration.parse_arguments(["measure", *given, "--volumes", "0", "--output", str(output)]))
    found = read(output)
    assert set(found["rows"][0]) == set(read(RESULTS / "strengths_digits.json")["rows"][0])
    assert len(calibration.choose([found, found])) == 2
    with pytest.raises(ValueError, match="different grids"):
        calibration.choose([found, read(RESULTS / "strengths_digits.json")])


def test_a_stream_of_your_own_is_in_the_tables_and_a_page_is_filled_between_its_marks(tmp_path):
    for stream, name in (("digits", "mine"), ("emoji_14x4", "emoji_14x4")):
        shutil.copytree(RESULTS / stream, tmp_path / name)
    tables = report.streams(tmp_path)
    assert tables.count("| last accuracy A_B | `emoji_14x4` | `mine` |") == 1
    begin, end = "<!-- streams, made by examples/benchmarks/report.py -->\n", "<!-- end of the streams -->\n"
    page = f"# Results\n{begin}old\n{end}The end.\n"
    assert report.filled(page, tmp_path) == f"# Results\n{begin}\n{tables}\n{end}The end.\n"
    assert report.filled(report.filled(page, tmp_path), tmp_path) == report.filled(page, tmp_path)


def test_published_figures_stand_beside_configs_and_a_run_goes_on_where_it_stopped(tmp_path):
    sets = report.published_figures()
    assert set(sets) <= {name for name, config in CONFIGS.items() if not config["offline"]}
    for name, found in sets.items():
        assert f"Inc{CONFIGS[name]['increment']}" in found["title"]
        assert CONFIGS[name]["seeds"] == [1993]
        assert all(100 > average >= last > 0 for average, last in found["methods"].values())
    options = ["--results", str(tmp_path)]
    left = [args.method for args, _ in published.remaining("cub200_inc10", options)]
    assert left == list(CONFIGS["cub200_inc10"]["rows"])
    measured = read(RESULTS / "digits" / "lda.json")
    for method, seeds in (("lda", [1993]), ("luca", [])):
        (tmp_path / "cub200_inc10").mkdir(exist_ok=True)
        measured["seeds"] = [{"seed": seed} for seed in seeds]
        (tmp_path / "cub200_inc10" / f"{method}.json").write_text(json.dumps(measured))
    left.remove("lda")
    assert [args.method for args, _ in published.remaining("cub200_inc10", options)] == left
    assert f"{100 * measured['summary']['average_accuracy']['mean']:.1f}/" in report.published(tmp_path)


def test_the_pictures_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "IMAGES", tmp_path)
    report.draw_pictures()
    assert all((tmp_path / f"{name}.png").stat().st_size > 5_000 for name in ("accuracy", "growth", "tsne"))
