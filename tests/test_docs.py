"""README and docs: code and commands run, links lead to a heading, figures are those of the results files."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from string import Template

import pytest
import report
import routing
import torch
from peft import PeftModel, get_peft_model
from PIL import Image
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification, ViTImageProcessorPil

import peft_luca
from peft_luca import ContinualTrainingArguments, LucaConfig, LucaLayer, cli, save_expert
from peft_luca.training.arguments import CONFIG_RECIPES, RECIPES
from peft_luca.tuner.backbone import processor_facts


ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "examples" / "benchmarks" / "results"
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
OTHERS = ["CONTRIBUTING.md", "examples/README.md"]  # neither counted nor run
# The Hub page needs a Hub and runs in tests/hub; the tutorial runs as a notebook in tests/test_examples.py.
RUN_ELSEWHERE = ("docs/hub.md", "docs/tutorial.md")
BACKBONE = "google/vit-base-patch16-224-in21k"
PUBLIC = sorted(set(peft_luca.__all__) - {"__version__"})
# Imports the slow libraries once, and runs each page in a forked process.
RUNNER = """
import os, sys, traceback
import accelerate, datasets, evaluate, peft, torch, transformers
torch.set_num_threads(1)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.chdir(line.strip())
        with open("output.txt", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            try:
                exec(compile(open("page.py").read(), "page.py", "exec"), {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def flat(page):
    return " ".join(read(page).split())


def results_of(file, *keys):
    content = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    for key in keys:
        content = content[key]
    return content


def rows_of(text):
    """The rows of all tables of a text, as lists of cells, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = {i + offset for i, line in enumerate(lines) if line.startswith("|---") for offset in (-1, 0)}
    split = [re.split(r"(?<!\\)\|", line)[1:-1] for i, line in enumerate(lines) if i not in heads]
    return [[cell.strip() for cell in row] for row in split]


# ---- code and commands ----------------------------------------------------------------------------------------------


def blocks(page):
    """A page's Python in order, with the set-up that stands in HTML comments."""
    return [a or b for a, b in re.findall(r"^```python\n(.*?)^```|^<!-- python\n(.*?)^-->", read(page), re.M | re.S)]


def put_into_cache(cache, repo_id):
    """Make the folder of a repository in the Hub's cache, and return it."""
    repo = cache / ("models--" + repo_id.replace("/", "--"))
    folder = repo / "snapshots" / ("0" * 40)
    for path in (repo / "refs", folder):
        path.mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    return folder


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """A process that runs pages, with a tiny ViT and two experts under the Hub ids that the pages use."""
    cache, home = tmp_path_factory.mktemp("hub"), str(tmp_path_factory.mktemp("home"))
    folder = put_into_cache(cache, BACKBONE)
    torch.manual_seed(0)
    config = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, patch_size=56)
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessorPil().save_pretrained(folder)
    for repo_id, classes in (("lab-a/vit-birds", ["owl", "wren"]), ("lab-b/vit-satellite", ["sea", "town"])):
        vit = ViTForImageClassification.from_pretrained(folder)
        config = LucaConfig(classes=classes, processor=processor_facts(ViTImageProcessorPil()))
        save_expert(get_peft_model(vit, config), "default", put_into_cache(cache, repo_id))
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache), "HF_HOME": home, "HOME": home}
    environment |= {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", RUNNER], env=environment, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page not in RUN_ELSEWHERE])
def test_the_code_of_a_page_runs_as_it_stands(page, runner, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # pages are read in a clone
    for split, count in (("train", 3), ("test", 1)):
        for shade, label in enumerate(("cat", "dog", "fox", "hen")):
            folder = tmp_path / "path" / "to" / "images" / split / label
            folder.mkdir(parents=True)
            for i in range(count):
                color = (60 * shade, 80 * i, 90 if split == "train" else 10)  # no image is in both splits
                Image.new("RGB", (16, 16), color).save(folder / f"{i}.png")
    code = "\n".join(blocks(page)).replace("increment=10", "increment=2")
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    print(tmp_path, file=runner.stdin, flush=True)
    assert runner.stdout.readline() == "0\n", (tmp_path / "output.txt").read_text(encoding="utf-8")[-3000:]


def commands():
    for page in [*PAGES, *OTHERS]:
        for block in re.findall(r"^```bash\n(.*?)^```", read(page), re.M | re.S):
            variables = dict(re.findall(r"^(\w+)=(\S+)$", block, re.M))
            for line in block.replace("\\\n", " ").splitlines():
                if not re.match(r"\w+=", line):
                    yield page, Template(line.split("#")[0].strip()).safe_substitute(variables)


@pytest.mark.parametrize(("page", "command"), sorted(set(commands())))
def test_every_command_exists(page, command, monkeypatch, tmp_path):
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", read("Makefile"), re.M)
    elif words[0] == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        launched = launch_command_parser().parse_args(words[2:])
        if launched.module:
            assert launched.training_script == "peft_luca.cli"
            return cli.make_parser().parse_args(launched.training_script_args)
        assert (ROOT / launched.training_script).is_file()
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        monkeypatch.setattr(sys, "argv", ["cil.py", *launched.training_script_args])
        import cil

        cil.parse_arguments()  # stops at an argument that does not exist
    elif words[0] == "peft-luca":
        if words[1] == "train":
            monkeypatch.chdir(tmp_path)
            cli.parse_stream(cli.StreamArguments, words[2:], "peft-luca train")
        elif words[1] != "--help":
            cli.make_parser().parse_args(words[1:])
    elif words[1:3] == ["-m", "pytest"]:
        assert words[-1] in read(words[3])
    elif words[0] == "python":
        assert all((ROOT / word).exists() for word in words[1:] if word.startswith("examples/"))
        source = read(words[1]) + read("examples/benchmarks/harness.py")
        for flag in re.findall(r"--(\w+)", command):  # a field of its arguments, or one that is looked for by hand
            assert re.search(rf"^    {flag}: |\"--{flag}\"", source, re.M), f"{page}: {flag}"
    else:
        assert words[:2] == ["pip", "install"], f"{page}: {command!r} is of no kind that this test knows"


# ---- links, names and size ------------------------------------------------------------------------------------------


def test_readme_and_docs_have_at_most_12000_words():
    words = {page: len(read(page).split()) for page in PAGES}
    assert words["README.md"] <= 700
    assert sum(words.values()) <= 12_000, words


def anchors(path):
    """The ids that GitHub and the site give to a page's headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in re.findall(r"^#+ (.*)", text, re.M)}


def test_every_code_block_is_of_a_kind_that_is_checked():
    assert {kind for page in PAGES for kind in re.findall(r"^```(\S*)", read(page), re.M)} == {
        "",
        "text",
        "python",
        "bash",
    }


def test_every_link_leads_to_a_page_and_a_heading():
    menu = read("mkdocs.yml").split("nav:")[1]
    assert [page for page in PAGES[1:] if page.removeprefix("docs/") not in menu] == []
    for page in [*PAGES, *OTHERS]:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", read(page)):
            path = (ROOT / page).parent / target if target else ROOT / page
            assert path.exists(), f"{page} links to {target}"
            assert not anchor or anchor in anchors(path), f"{page} links to {target}#{anchor}"


def test_every_public_name_is_in_the_reference_and_has_a_docstring():
    assert [name for name in PUBLIC if f"::: peft_luca.{name}\n" not in read("docs/reference.md")] == []
    for name in PUBLIC:
        thing = getattr(peft_luca, name)
        assert thing.__doc__
        if thing is PeftModel:  # LucaPeftModel, which is a class of its own for type checkers alone
            continue
        for method, value in vars(thing).items() if isinstance(thing, type) else ():
            inherited = any(hasattr(base, method) for base in thing.__mro__[1:])
            own = getattr(value, "__module__", "").startswith("peft_luca")  # LucaPeftModel has methods of PEFT
            if own and callable(value) and not method.startswith("_") and not inherited:
                assert value.__doc__, f"{name}.{method}"
    arguments, parent = ContinualTrainingArguments, {field.name for field in fields(TrainingArguments)}
    own = [field.name for field in fields(arguments) if field.name not in parent]
    assert [name for name in own if f"{name} (`" not in arguments.__doc__] == []


def test_every_file_and_folder_of_the_architecture_page_exists():
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|md)|\w+/)`", read("docs/architecture.md"))
    assert len(named) > 30
    assert [name for name in named if not (ROOT / "peft_luca" / name).exists() and not (ROOT / name).exists()] == []
    top = {path.name for path in (ROOT / "peft_luca").iterdir() if not path.name.startswith(("_", "."))}
    assert top - {"py.typed"} <= {name.rstrip("/") for name in named}


def test_every_file_that_a_page_names_exists():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")]
    named = {
        (page.name, path)
        for page in pages
        for path in re.findall(r"\b(?:tests|examples)/[\w/.-]*\w", page.read_text())
    }
    assert len(named) > 20
    assert sorted((page, path) for page, path in named if not (ROOT / path).exists()) == []


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    pytest.importorskip("zensical", reason="needs zensical and mkdocstrings: the extra docs")
    site = tmp_path / "site"
    run = subprocess.run(
        [sys.executable, "docs/_site.py", site], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    page = (site / "reference" / "index.html").read_text(encoding="utf-8")
    assert [name for name in PUBLIC if f'id="peft_luca.{name}"' not in page] == []
    assert "[`" not in re.sub(r"<code>.*?</code>", "", page)  # every reference in a docstring became a link
    home = (site / "index.html").read_text(encoding="utf-8")
    assert all(part in home for part in ("pip install", 'src="images/accuracy.png"', 'href="quickstart/"'))
    assert all((site / name).is_file() for name in ("SECURITY/index.html", "CONTRIBUTING/index.html"))
    assert all((site / name).is_file() for name in ("examples/cil.py", "data/streams.csv", "search.json"))


def test_a_page_has_one_title_which_is_its_name_in_the_menu():
    for page in PAGES:
        assert len(re.findall(r"^# ", re.sub(r"^```.*?^```", "", read(page), flags=re.M | re.S), re.M)) == 1, page
    assert set(re.findall(r"^ +- (\S+): ", read("mkdocs.yml").split("nav:")[1], re.M)) == {"Home"}


# ---- the paper page -------------------------------------------------------------------------------------------------


def test_paper_page_has_every_equation_in_the_file_that_it_names():
    rows = rows_of(read("docs/paper.md").split("## Equations")[1].split("## Hyper")[0])
    assert len(rows) == 11
    for what, _, files, code in rows:
        content = "".join(read(f"peft_luca/{name}") for name in re.findall(r"`(.+?)`", files))
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", code):
            assert re.search(rf"(def|class) {name}\b|\b{name}\b.*=|{name}\b: ", content), f"{what}: {name}"
            if name.startswith("luca_"):
                assert name in (*LucaLayer.adapter_layer_names, *LucaLayer.other_param_names)


def test_paper_page_has_every_hyperparameter_of_the_recipes_with_its_value():
    rows = rows_of(read("docs/paper.md").split("## Hyperparameters")[1].split("## Diff")[0])
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    recipes = {*RECIPES["paper"], *CONFIG_RECIPES["paper"]} - {"optim_args"}  # momentum is in the row of optim
    assert recipes <= named
    assert named <= {field.name for owner in (ContinualTrainingArguments, LucaConfig) for field in fields(owner)}
    cells = {name: row[2:] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    for recipe, column in (("paper", 0), ("own", 1)):
        values = {**RECIPES[recipe], **CONFIG_RECIPES[recipe]}
        for name in ("learning_rate", "num_train_epochs", "per_device_train_batch_size", "l1_weight", "scale"):
            assert float(re.search(r"\d[\d.e-]*", cells[name][column])[0]) == values[name], name


# ---- figures --------------------------------------------------------------------------------------------------------


def router_figures(file="routing_emoji_14.json"):
    """Router → its figures on emoji in 14 tasks, by the name that it has now."""
    summary = results_of(file, "summary")
    return {name.split()[0].replace("prototype", "lda"): figures for name, figures in summary.items()}


def mean(figure):
    return round(figure["mean"], 3)


def figures_in(text):
    return list(map(float, re.findall(r"\b0\.\d{3}\b", text)))


@pytest.mark.parametrize("page", [page for page in PAGES if report.MARKS.search(read(page))])
def test_the_generated_parts_of_a_page_are_up_to_date(page):
    assert report.filled(read(page)) == read(page), "run examples/benchmarks/report.py"


def test_the_long_tables_are_up_to_date():
    assert {path.name for path in report.DATA.iterdir()} == set(report.TABLES)
    for name, rows in report.TABLES.items():
        written = (report.DATA / name).read_text(encoding="utf-8")
        assert written == report.csv_of(rows(RESULTS)), "run examples/benchmarks/report.py"


def test_auto_was_measured_as_gaussian_where_the_two_are_the_same():
    for name in ("digits", "emoji_14"):
        routers = results_of(f"routing_{name}.json", "summary")
        assert routers["auto"] == routers["gaussian"]
    for stream in report.SHOWN:
        measured = results_of(f"{stream}/luca_gaussian.json", "stream")
        assert measured["train_images"] / measured["classes"] < 200
        for method in report.IN_SUMMARY:
            content = results_of(f"{stream}/{method}.json")
            assert report.is_current(content)
            assert len(content["seeds"]) in ((1,) if method == "joint_probe" else (3, 4, 5))


def test_the_text_about_routers_has_the_figures_of_the_results():
    measured = router_figures()
    known = re.search(r"with the task known, emoji in 14 tasks have (0\.\d+)\.", flat("README.md"))
    assert float(known[1]) == mean(measured["entropy"]["task_known_accuracy"])
    unknown, cost = flat("docs/routing.md").split("## Unknown")[1].split("## Cost")
    three = [measured[name] for name in ("entropy", "lda", "gaussian")]
    expected = [mean(figures[key]) for key in ("unknown_auroc", "calibration_error") for figures in three]
    assert figures_in(unknown.split("##")[0]) == expected
    rows = [row for name in ("scale", "10000") for row in results_of(f"routing_cost_{name}.json", "rows")]
    for row in rows[1:]:
        line = cost.split(f"- {row['experts']:,} experts, {row['classes']:,} classes, ")[1].split(" - ")[0]
        assert line.startswith(f"loaded in {row['loaded, seconds']:.0f} s: ")
        for router, found in row["routers"].items():
            share, seconds = found["share of the backbone's time, median"], found["made ready once, seconds"]
            assert f"`{router}` {100 * share:.1f} %, {seconds:.1f} s" in line


def test_the_page_about_the_method_has_the_figures_of_the_results():
    entropy, growth = router_figures()["entropy"], results_of("growth.json", "rows")
    cls, digits = results_of("tsne.json", "panels", "[CLS]"), router_figures("routing_digits.json")["entropy"]
    why, can, protocol = re.split("## What can entropy do|## Routing per sample", read("docs/concepts.md"))
    why = why.split("## Why whiten?")[1].split("<!--")[0]
    assert figures_in(why) == [cls["cosine between classes"], cls["cosine within classes"]]
    names = ("routing_accuracy", "last_accuracy", "task_known_accuracy")
    expected = [mean(digits["last_accuracy"]), *(mean(entropy[name]) for name in names)]
    expected += [growth[0]["entropy accuracy"], growth[-1]["entropy accuracy"], growth[-1]["gaussian accuracy"]]
    assert figures_in(can) == expected
    names = ("last_accuracy", "batch_scope_sorted", "batch_scope_shuffled")
    assert figures_in(protocol.split("## ")[0]) == [mean(entropy[name]) for name in names]


def test_the_page_about_several_processes_has_the_figure_of_the_results():
    one, two = (results_of(f"extraction_{n}.json") for n in (1, 2))
    assert (one["processes"], two["processes"], one["images"]) == (1, 2, two["images"])
    assert f"two processes take {two['seconds'] / one['seconds']:.2f} of one's time" in flat("docs/distributed.md")


def test_appendix_has_the_figures_of_the_results():
    """In the page's order: which variant, and which figure of it."""
    recipe, none = "the recipe", "linear heads, strangers none of mine, all experts"
    expected = [
        (recipe, "entropy"), ("60 epochs", "entropy"), ("100 epochs", "entropy"),
        ("negatives: all seen rows", "entropy"), ("reference: 24 drawings", "entropy"),
        ("reference: 96 drawings", "entropy"), (recipe, "entropy"), ("reference: 768 drawings", "entropy"),
        ("reference: 192 of blurred noise", "entropy"), ("reference: 192 of noise", "entropy"),
        ("reference: nothing", "entropy"), ("reference: the first task", "entropy"),
        ("reference: the own task", "entropy"), (recipe, "a temperature per expert, own images"),
        (recipe, "a temperature per expert, all images"), ("strangers even, earlier experts", "entropy"),
        (none, "entropy"), (none, "lowest probability of none"), ("linear heads", "entropy"),
        ("correction of the closed form", "hybrid"), ("correction of the closed form", "entropy"),
        (recipe, "entropy of the closed form and 0.25 of the scores"), (recipe, "gaussian"),
    ]  # fmt: skip
    sections = re.split("## Better entropy routing|## Ablations|## Experts or views", read("docs/appendix.md"))
    removed, tried, ablations, beside = sections
    summary = results_of("entropy_paths_emoji.json", "summary")
    assert figures_in(tried) == [mean(summary[variant][figure]) for variant, figure in expected]
    for name, figure in re.findall(r"`(\w+)` (?:has )?\(?(0\.\d{3})", removed):
        assert float(figure) == mean(router_figures("routing_removed_emoji_14.json")[name]["last_accuracy"]), name
    expected = [
        ("emoji", "arrangement parallel", "last_accuracy"), ("emoji", "λ 0.0005", "last_accuracy"),
        ("emoji", "λ 0.001, proximal", "sparsity"), ("emoji", "λ 0.001, proximal", "last_accuracy"),
        ("digits", "λ 0.0001, proximal", "last_accuracy"), ("digits", "λ 0.0005", "last_accuracy"),
    ]  # fmt: skip
    measured = [mean(results_of(f"ablations_{name}.json", "summary", *keys)) for name, *keys in expected]
    assert figures_in(ablations.replace("λ = 0.001", "")) == measured
    mixture = results_of("mixture_emoji_14.json", "summary")
    assert mean(mixture["chosen weight of all"]) == 0
    expected = [mean(mixture[f"weight {weight}, routed"]) for weight in ("0", "0.5")]
    within = [mean(mixture[f"weight {weight:g}, task known"]) for weight in routing.MIXTURE_WEIGHTS]
    expected += [max(within), within[0]]
    for name in ("emoji", "digits"):
        of_all = results_of(f"views_{name}.json", "rows")[-1]
        expected += [mean(of_all[f"{view}, test accuracy"]) for view in ("plain", "mirrored")]
    whitened = results_of("whitened_statistics_emoji.json", "rows")[-1]
    expected += [mean(whitened[f"{view}, test accuracy"]) for view in ("plain", "whitened")]
    assert figures_in(beside) == [value for value in expected if value < 1]


def test_cost_and_reliability_pages_have_the_figures_of_the_results():
    speed, stock = results_of("speed.json"), results_of("overhead.json", "times_of_stock")
    mutation, run = results_of("mutation.json"), results_of("reliability.json")
    measured, kills = run["measured"], results_of("kills.json")
    images, rates = results_of("images_cost.json"), results_of("images_cost.json", "images per second")
    mib = {name: f"{value / 2**20:.1f} MiB" for name, value in measured.items() if "grown_bytes" in name}
    cost = [
        f"is {speed['faster_than_released']:.1f} times faster than the released",
        f"{speed['faster_than_lora']:.1f} times faster than LoRA",
        f"{speed['bf16_faster_than_released']:.1f} and {speed['bf16_faster_than_lora']:.1f} times faster than both",
        f"takes {stock['continual_train']:.2f} times what a stock",
        f"saving, {stock['continual_train_task']:.2f} times",
        f"train in {results_of('memory.json', 'rss_anon_beyond_gib'):.2f} GiB of anonymous memory",
        f"one core reads {images['ours against Pillow']:.2f} times as many images a second as Pillow",
        f"reads {rates['transformers'] / rates['Pillow']:.2f} times as many. The pixels",
        f"takes {images['bfloat16 against float32']:.2f} times its time for [CLS]",
    ]
    reliability = [
        f"sample of {mutation['mutants']} places, one at a time. "
        f"The tests of version 0.2 notice {mutation['killed']} of them "
        f"({100 * mutation['share_killed']:.1f} %)",
        f"the last run, of version 0.1, {run['passed']:,} tests passed and none failed",
        *(
            f"| {sum(killed['killed'].values())}, after which {killed['runs']} runs ended {how}: "
            f"{killed['differing']} differed, {killed['failed']} failed |"
            for killed, how in ((kills, "bit-identical to an undisturbed one"), (kills["two_processes"], "so"))
        ),
        f"{measured['add_delete_rounds']:,} rounds, memory grown by {mib['add_delete_grown_bytes']} |",
        "added in {add:.0f} s, saved in {save:.0f} s, loaded in {load:.0f} s, three images routed in {route:.0f} s, "
        "deleted in {delete:.0f} s".format(**measured["seconds"]),
    ]
    for router in ("entropy", "gaussian"):
        grown = mib[f"route_grown_bytes_{router}"]
        reliability.append(f"{measured[f'route_calls_{router}']:,} by `{router}`, grown by {grown}")
    for page, sentences in (("docs/cost.md", cost), ("docs/reliability.md", reliability)):
        assert [sentence for sentence in sentences if sentence not in flat(page)] == []
