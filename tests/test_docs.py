"""Every Python block of README and docs runs as it stands, and the pages say nothing that the code does not."""

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
import torch
from peft import get_peft_model
from PIL import Image
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification, ViTImageProcessorPil

import peft_luca
from peft_luca import LucaConfig, save_expert


ROOT = Path(__file__).parent.parent
# docs/hub.md needs a Hub to push to: tests/hub/test_push_pull.py has one. docs/tutorial.md runs as a notebook, in
# tests/test_examples.py.
ELSEWHERE = ("hub.md", "tutorial.md")
PAGES = ["README.md"]
PAGES += [f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in ELSEWHERE]
BACKBONE = "google/vit-base-patch16-224-in21k"
# Imports what takes long once, and runs each page that it is told of in a process of its own.
RUNNER = """
import os, sys, traceback
import accelerate, datasets, evaluate, peft, torch, transformers
torch.set_num_threads(1)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.chdir(line.strip())
        with open("said.txt", "w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            try:
                exec(compile(open("page.py").read(), "page.py", "exec"), {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def blocks(page):
    """A page's Python in order, with what stands in comments since every reader has it already."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```|^<!-- python\n(.*?)^-->", text, re.M | re.S)
    return [shown or hidden for shown, hidden in found]


def tiny_vit():
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=224,
        patch_size=56,
        num_labels=2,
    )
    return ViTForImageClassification(config)


def put_into_cache(cache, repo_id):
    """A repository as the Hub's client would have left it in its cache. Returns the folder to fill."""
    repo = cache / ("models--" + repo_id.replace("/", "--"))
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    folder = repo / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory):
    """The Hub ids that the pages use, with a tiny ViT in place of the real one."""
    cache = tmp_path_factory.mktemp("hub")
    folder = put_into_cache(cache, BACKBONE)
    tiny_vit().save_pretrained(folder)
    ViTImageProcessorPil().save_pretrained(folder)
    for repo_id, classes in (("lab-a/vit-birds", ["owl", "wren"]), ("lab-b/vit-satellite", ["sea", "town"])):
        vit = ViTForImageClassification.from_pretrained(folder)
        model = get_peft_model(vit, LucaConfig(classes=classes))
        save_expert(model, "default", put_into_cache(cache, repo_id))
    return cache


@pytest.fixture
def workplace(tmp_path):
    """The image folder that the pages read."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 3), ("test", 1)):
        for label in ("cat", "dog", "fox", "hen"):
            folder = tmp_path / "path" / "to" / "images" / split / label
            folder.mkdir(parents=True)
            for i in range(count):
                color = tuple(torch.randint(256, (3,), generator=generator).tolist())
                Image.new("RGB", (16, 16), color).save(folder / f"{i}.png")
    return tmp_path


@pytest.fixture(scope="module")
def runner(hub_cache, tmp_path_factory):
    home = str(tmp_path_factory.mktemp("home"))
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub_cache), "HF_HOME": home, "HOME": home}
    environment |= {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", RUNNER], env=environment, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_the_code_of_a_page_runs_as_it_stands(page, runner, workplace):
    (workplace / "examples").symlink_to(ROOT / "examples")  # pages are read in a clone
    code = "\n".join(blocks(page)).replace("increment=10", "increment=2")
    (workplace / "page.py").write_text(code, encoding="utf-8")
    print(workplace, file=runner.stdin, flush=True)
    assert runner.stdout.readline() == "0\n", (workplace / "said.txt").read_text(encoding="utf-8")[-3000:]


def test_all_code_of_the_pages_is_among_the_blocks_that_run():
    """In Python or for the shell: a block of another kind would be checked by nobody."""
    fences = {page: re.findall(r"^```(\S*)", (ROOT / page).read_text(encoding="utf-8"), re.M) for page in PAGES}
    kinds = {kind for found in fences.values() for kind in found}
    assert kinds == {"", "python", "bash"}  # the empty ones close a block, or hold a drawing
    assert sum(len(blocks(page)) for page in PAGES) > 20


def commands():
    for page in [*PAGES, *(f"docs/{name}" for name in ELSEWHERE), "examples/README.md"]:
        text = (ROOT / page).read_text(encoding="utf-8")
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S):
            variables = dict(re.findall(r"^(\w+)=(\S+)$", block, re.M))
            for line in block.replace("\\\n", " ").splitlines():
                if not re.match(r"\w+=", line):
                    yield page, Template(line.split("#")[0].strip()).safe_substitute(variables)


@pytest.mark.parametrize(("page", "command"), sorted(set(commands())))
def test_commands_of_the_pages_are_ones_that_there_are(page, command, monkeypatch, tmp_path):
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M), command
    elif words[0] == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        launched = launch_command_parser().parse_args(words[2:])
        assert (ROOT / launched.training_script).is_file()
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        monkeypatch.setattr(sys, "argv", ["cil.py", *launched.training_script_args])
        import cil

        cil.parse_arguments()  # stops at an argument that there is not
    elif words[0] == "python":
        paths = [word for word in words[1:] if word.startswith("examples/")]
        assert paths[0] == words[1]
        assert all((ROOT / path).exists() for path in paths)
        source = (ROOT / words[1]).read_text(encoding="utf-8") + (ROOT / "examples" / "cil.py").read_text(
            encoding="utf-8"
        )
        for flag in re.findall(r"--(\w+)", command):  # a field of its arguments, or one that is looked for by hand
            assert re.search(rf"^    {flag}: |\"--{flag}\"", source, re.M), f"{page}: {flag}"
    else:
        assert words[:2] == ["pip", "install"], f"{page}: nobody has tried {command!r}"


def test_reference_names_everything_public():
    """In its tables, and among what the site makes of the docstrings."""
    tables = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    made = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.M)
    assert [name for name in peft_luca.__all__ if f"`{name}`" not in tables] == []
    assert [name for name in peft_luca.__all__ if name != "__version__" and f"peft_luca.{name}" not in made] == []
    for module in ("plots", "metrics", "routing", "statistics", "sparsity"):
        assert f"peft_luca.{module}" in made


def test_everything_public_has_a_docstring():
    for name in set(peft_luca.__all__) - {"__version__"}:
        thing = getattr(peft_luca, name)
        assert thing.__doc__
        for method, value in vars(thing).items() if isinstance(thing, type) else ():
            inherited = any(hasattr(base, method) for base in thing.__mro__[1:])
            if callable(value) and not method.startswith("_") and not inherited:
                assert value.__doc__, f"{name}.{method}"


def test_every_argument_of_the_trainer_is_in_its_docstring():
    documented = peft_luca.ContinualTrainingArguments.__doc__
    parent = {field.name for field in fields(TrainingArguments)}
    for field in fields(peft_luca.ContinualTrainingArguments):
        assert field.name in parent or f"{field.name} (`" in documented, field.name


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    """`make docs`, which is also part of what has to pass before anything lands."""
    pytest.importorskip("mkdocs", reason="needs mkdocs-material and mkdocstrings: the extra dev")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    page = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    for name in set(peft_luca.__all__) - {"__version__"}:
        assert f'id="peft_luca.{name}"' in page
    assert "[`" not in re.sub(r"<code>.*?</code>", "", page)  # every reference of a docstring became one
    assert (tmp_path / "SECURITY" / "index.html").is_file()
    assert (tmp_path / "examples" / "cil.py").is_file()


def test_links_between_pages_lead_somewhere():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("nav:")[1]
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in menu] == []
    for page in [ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_paper_page_names_code_that_exists():
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    for owner, name in re.findall(r"`(LucaLayer|LucaModel|ContinualTrainer)\.(\w+)", text):
        assert hasattr(getattr(peft_luca, owner), name), f"{owner}.{name}"
    for name in re.findall(r"`(luca_\w+)`", text):
        assert name in (*peft_luca.LucaLayer.adapter_layer_names, *peft_luca.LucaLayer.other_param_names)


def test_paper_page_has_every_equation_in_the_file_that_it_names():
    table = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8").split("## Equations")[1].split("## Hyper")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 11
    for what, _, files, code in rows:
        content = "".join(
            (ROOT / "peft_luca" / name).read_text(encoding="utf-8") for name in re.findall(r"`(.+?)`", files)
        )
        names = [name.split("(")[0].split(".")[-1] for name in re.findall(r"`(.+?)`", code)]
        assert names
        for name in names:
            if name != "LucaConfig":
                assert re.search(rf"def {name}\b|\b{name}\b.*=|{name}\b: ", content), f"{what}: {name}"


def test_paper_page_has_every_hyperparameter_of_the_recipes():
    table = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8").split("## Hyperparameters")[1].split("##")[0]
    named = set(
        re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines() if row.startswith("| ")))
    )
    recipes = {*peft_luca.training.arguments.RECIPES["paper"], *peft_luca.training.arguments.CONFIG_RECIPES["paper"]}
    assert recipes - {"optim_args"} <= named  # whose momentum is in the row of optim
    known = {field.name for owner in (peft_luca.ContinualTrainingArguments, LucaConfig) for field in fields(owner)}
    assert named <= known


def test_paper_page_has_the_recipes_values():
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    table = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("|")]
    for field in ("learning_rate", "num_train_epochs", "per_device_train_batch_size"):
        row = next(row for row in table if row[0] == f"`{field}`")
        for recipe, cell in (("paper", row[2]), ("own", row[3])):
            assert float(cell) == peft_luca.training.arguments.RECIPES[recipe][field]
    scale = next(row for row in table if row[0].startswith("σ"))
    assert f"from {peft_luca.tuner.config.OWN_RECIPE['scale']:g}" in scale[3]


def results_of(file, *parts):
    content = json.loads((ROOT / "examples" / "benchmarks" / "results" / file).read_text(encoding="utf-8"))
    for part in parts:
        content = content[part]
    return content


def test_the_readmes_figures_of_routers_are_those_of_the_results():
    file = "routing_emoji_14.json"
    text = (ROOT / "README.md").read_text(encoding="utf-8").split(f"`{file}`")[1]
    lines = [[cell.strip(" `*") for cell in line.split("|")[1:-1]] for line in text.split("\n\n")[1].split("\n")]
    said = dict(zip(lines[0], map(float, lines[2]), strict=True))
    summary, baselines = results_of(file, "summary"), results_of(file, "baselines_last_accuracy")
    measured = {name.split()[0]: figures["last_accuracy"] for name, figures in summary.items()}
    assert said.keys() >= measured.keys()
    measured |= {"task known": summary["entropy"]["task_known_accuracy"]}
    measured |= {name.removesuffix(", unit features"): figure for name, figure in baselines.items()}
    assert said == {name: round(measured[name]["mean"], 3) for name in said}


def test_the_readmes_summary_is_that_of_the_results():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = report.summary(ROOT / "examples" / "benchmarks" / "results")
    assert report.with_summary(text, found) == text, "run examples/benchmarks/report.py"
    assert len(found.splitlines()) <= 12
    assert found.count("| `") == 5
    first = re.search(r"^\| `digits` \| (\S+) \| (\S+) ", found, re.M).groups()
    for method, cell in zip(("luca", "luca_gaussian"), first, strict=True):
        assert float(cell) == round(results_of(f"digits/{method}.json", "summary", "last_accuracy", "mean"), 3)


def test_figures_in_the_readmes_text_are_those_of_the_results():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    share = re.search(r"takes (\S+) % of a ViT-B/16's time", text).group(1)
    measured = results_of("routing_cost.json", "summary", "routing as a share of the backbone's time", "mean")
    assert float(share) == round(100 * measured, 2)


def test_figures_of_the_routing_page_are_those_of_its_results():
    """Cell by cell: rows are routers, bounds and baselines, columns the three results files."""
    text = (ROOT / "docs" / "routing.md").read_text(encoding="utf-8")
    table = text.split("## Figures")[1].split("Rejecting classes")[0]
    files = [f"routing_{name}.json" for name in ("digits", "emoji_14", "emoji_29")]
    compared = 0
    for row in re.findall(r"^\| (.+) \|$", table, re.M):
        label, *cells = [cell.strip() for cell in row.split("|")]
        for cell, file in zip(cells, files, strict=True):
            if not re.fullmatch(r"[01]\.\d{3}", cell):
                continue
            summary, baselines = results_of(file, "summary"), results_of(file, "baselines_last_accuracy")
            if label.startswith("*"):
                # The baselines see all classes at once, so that both streams of emoji share them.
                source = baselines or results_of("routing_emoji_14.json", "baselines_last_accuracy")
                measured = source[label.strip("*")]
            elif label.startswith("task known"):
                measured = summary["entropy"]["task_known_accuracy"]
            elif "batch scope" in label:
                measured = summary["entropy"][f"batch_scope_{label.split()[-1]}"]
            else:
                name = re.match(r"`(\w+)`", label).group(1)
                measured = next(value for key, value in summary.items() if key.split()[0] == name)["last_accuracy"]
            assert float(cell) == round(measured["mean"], 3), f"{label}, {file}"
            compared += 1
    assert compared >= 50


def test_figures_of_abstaining_are_those_of_the_results():
    text = (ROOT / "docs" / "routing.md").read_text(encoding="utf-8")
    table = text.split("Rejecting classes")[1].split("## Statistics")[0]
    summaries = [results_of(f"routing_{name}.json", "summary") for name in ("digits", "emoji_14", "emoji_29")]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.M)
    assert len(rows) == len(summaries[0])
    for router, cells in rows:
        found = [next(figures for name, figures in s.items() if name.split()[0] == router) for s in summaries]
        wanted = [figures[key]["mean"] for figures in found for key in ("unknown_auroc", "calibration_error")]
        assert list(map(float, cells.split("|"))) == [round(value, 3) for value in wanted], router


def test_what_was_tried_has_the_figures_of_its_results():
    """In the page's order: which variant, and which figure of it."""
    recipe, none = "the recipe", "linear heads, strangers none of mine, all experts"
    wanted = [
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
        (recipe, "entropy, 8 candidates, same expert as dense"), (recipe, "entropy, 8 candidates"),
        (recipe, "entropy, 4 candidates"), (recipe, "entropy, 2 candidates"),
    ]  # fmt: skip
    tried = (ROOT / "docs" / "routing.md").read_text(encoding="utf-8").split("For `entropy`, on emoji")[1]
    summary = results_of("entropy_paths_emoji.json", "summary")
    measured = [report.share({**summary[name][figure], "deviation": None}) for name, figure in wanted]
    assert re.findall(r"\b0\.\d{3}\b", tried) == measured
    cosine = [figures["entropy"]["mean"] for name, figures in summary.items() if name.startswith("strangers")]
    assert max(cosine) == summary["strangers even, earlier experts"]["entropy"]["mean"]  # "and less"


def test_the_routing_pages_costs_are_those_of_its_results():
    table = (ROOT / "docs" / "routing.md").read_text(encoding="utf-8").split("## Cost")[1].split("\n\n")[2]
    said = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n")[2:]]
    rows = results_of("routing_cost_scale.json", "rows")
    shares = [row["share of the backbone's time, median"] for row in rows]
    assert [line[2].replace("`", "") for line in said] == [row["router"] for row in rows]
    for line, row, share in zip(said, rows, shares, strict=True):
        assert [int(cell) for cell in line[:2]] == [row["experts"], row["classes"]]
        assert line[3:] == [f"{100 * share:.1f} %", f"{row['made ready once, seconds']:.1f} s"]


def test_figures_of_the_cost_page_are_those_of_its_results():
    text = " ".join((ROOT / "docs" / "cost.md").read_text(encoding="utf-8").split())
    speed, overhead, memory = (results_of(f"{name}.json") for name in ("speed", "overhead", "memory"))
    for label, value in speed["passes"].items():
        if label != "one pass of the backbone":
            assert f"| {label} | {value:.2f} |" in text
    assert f"That is {speed['faster_than_released']:.1f} times faster than the released procedure" in text
    assert f"{speed['faster_than_lora']:.1f} times faster than LoRA" in text
    assert f"memory is {speed['peak_of_inference']:.2f} times that of inference" in text
    assert f"takes {overhead['times_of_stock']['continual_train']:.2f} times what a stock" in text
    assert f"saving, {overhead['times_of_stock']['continual_train_task']:.2f} times" in text
    assert f"train in {memory['rss_anon_beyond_gib']:.2f} GiB of anonymous memory" in text


def test_figures_of_the_reliability_page_are_those_of_its_results():
    text = " ".join((ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").split())
    results = results_of("mutation.json")
    assert results["share_killed"] >= 0.9
    assert f"in a sample of {results['mutants']} places" in text
    assert f"The tests notice {results['killed']} of them ({100 * results['share_killed']:.1f} %)" in text
    assert all(mutant["why"] for mutant in results["survivors"])
    run = results_of("reliability.json")
    measured, kills = run["measured"], run["measured"]["kills"]
    assert f"In the last run {run['passed']:,} tests passed and none failed" in text
    assert all(set(counts) <= {"passed", "skipped"} for counts in run["cases"].values())
    assert f"| {sum(kills['killed'].values())}, after which {kills['runs']} runs ended" in text
    assert f"{kills['differing']} differed, {kills['failed']} failed" in text
    mib = {name: f"{value / 2**20:.1f} MiB" for name, value in measured.items() if "grown_bytes" in name}
    assert f"{measured['add_delete_rounds']:,} rounds, memory grown by {mib['add_delete_grown_bytes']} |" in text
    for router in ("entropy", "gaussian"):
        calls, grown = measured[f"route_calls_{router}"], mib[f"route_grown_bytes_{router}"]
        assert f"{calls:,} by `{router}`, grown by {grown}" in text
    wanted = [f"{measured['seconds'][what]:.0f}" for what in ("add", "save", "load", "route", "delete")]
    row = next(line for line in text.split("| ") if line.startswith("added in "))
    assert re.findall(r" (\d+) s", row) == wanted
