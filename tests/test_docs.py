"""Every Python block of README and docs runs as it stands, and the pages say nothing that the code does not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import report
import torch
from peft import get_peft_model
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

import peft_luca
from peft_luca import LucaConfig, save_expert


ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/quickstart.md", "docs/concepts.md", "docs/routing.md"]
BACKBONE = "google/vit-base-patch16-224-in21k"
HEADER = "import os, warnings\nos.chdir({folder!r})\nimport torch\ntorch.set_num_threads(1)\n"


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


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


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_as_it_stands(page, hub_cache, workplace):
    code = HEADER.format(folder=str(workplace)) + "\n".join(blocks(page)).replace("increment=10", "increment=2")
    script = workplace / "page.py"
    script.write_text(code, encoding="utf-8")
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub_cache), "HF_HOME": str(workplace / "home")}
    environment |= {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(workplace)}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]


def test_pages_have_code():
    assert all(blocks(page) for page in PAGES)


def test_reference_names_everything_public():
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    missing = [name for name in peft_luca.__all__ if f"`{name}`" not in text]
    assert not missing


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_paper_page_names_code_that_exists():
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    for owner, name in re.findall(r"`(LucaLayer|LucaModel|ContinualTrainer)\.(\w+)", text):
        assert hasattr(getattr(peft_luca, owner), name), f"{owner}.{name}"
    for name in re.findall(r"`(luca_\w+)`", text):
        assert name in (*peft_luca.LucaLayer.adapter_layer_names, *peft_luca.LucaLayer.other_param_names)


def test_paper_page_has_the_recipes_values():
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    table = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("|")]
    for field in ("learning_rate", "num_train_epochs", "per_device_train_batch_size"):
        row = next(row for row in table if row[0] == f"`{field}`")
        for recipe, cell in (("paper", row[2]), ("own", row[3])):
            assert float(cell) == peft_luca.training_args.RECIPES[recipe][field]
    scale = next(row for row in table if row[0].startswith("σ"))
    assert f"from {peft_luca.config.OWN_RECIPE['scale']:g}" in scale[3]


def results_of(file, *parts):
    content = json.loads((ROOT / "examples" / "benchmarks" / "results" / file).read_text(encoding="utf-8"))
    for part in parts:
        content = content[part]
    return content


def test_figures_in_the_readme_are_those_of_the_results():
    """Each row of the README's table names its results file."""
    rows = re.findall(r"^\|(.+?)\| `(\w+\.json)` \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert len(rows) == 3
    for cells, file in rows:
        entropy, gaussian, *baselines, known = [cell.strip(" *") for cell in cells.split("|")[2:]]
        summary, measured = results_of(file, "summary"), results_of(file, "baselines_last_accuracy")
        assert float(entropy) == round(summary["entropy"]["last_accuracy"]["mean"], 3)
        assert float(gaussian) == round(summary["gaussian"]["last_accuracy"]["mean"], 3)
        assert float(known) == round(summary["entropy"]["task_known_accuracy"]["mean"], 3)
        for name, cell in zip(("SimpleCIL", "LDA", "RanPAC 10,000"), baselines, strict=True):
            assert not cell or float(cell) == round(measured[f"{name}, unit features"]["mean"], 3)


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
    paper, own = re.search(r"recipe reaches (\S+) on emoji where the own reaches (\S+) ", text).groups()
    assert float(paper) == round(results_of("entropy_emoji.json", "summary", "paper last_accuracy", "mean"), 3)
    assert float(own) == round(results_of("entropy_emoji.json", "summary", "own last_accuracy", "mean"), 3)
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
