"""
The page of results, its pictures and the README's summary, from the results files and the configs alone.

    python examples/benchmarks/report.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt


matplotlib.use("Agg")
HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs"
# In the order of the tables, with the words for them.
METHODS = {
    "luca": "LuCA, `entropy`",
    "luca_gaussian": "LuCA, `gaussian`",
    "luca_paper": "LuCA, paper's recipe, `entropy`",
    "simplecil": "class means (SimpleCIL)",
    "lda": "LDA",
    "ranpac": "RanPAC, 10,000",
    "probes": "linear probe a task, entropy",
    "sequential_head": "one linear head, task after task",
    "lora": "LoRA a task, entropy",
    "sequential_lora": "one LoRA, task after task",
    "joint_probe": "*joint linear probe*",
    "joint_luca": "*joint LuCA*",
}
STREAMS = {
    "digits": "Digits, 5 tasks of 2",
    "emoji_6x9": "Emoji, 6 tasks",
    "emoji_14x4": "Emoji, 14 tasks",
    "emoji_29x2": "Emoji, 29 tasks of 2",
    "emoji_domains": "Emoji by drawing style, 2 domains",
}
FIGURES = {
    "Ā": "average_accuracy",
    "A_B": "last_accuracy",
    "forgetting": "forgetting",
    "right expert": "routing_accuracy",
    "task known": "task_known_accuracy",
}
COSTS = {
    "parameters": "parameters_per_task",
    "bytes": "bytes_per_task",
    "learning": "learning_passes",
    "answering": "answering_passes",
}
ABLATED = {
    "last_accuracy": "A_B, `entropy`",
    "average_accuracy": "Ā",
    "task_known_accuracy": "task known",
    "sparsity": "zeros",
    "overlap": "overlap",
    "cosine": "cosine",
    "subspace_cosine": "subspaces",
}
PATHS = {
    "entropy": "A_B, `entropy`",
    "entropy_of_own_classes": "A_B, entropy over own classes alone",
    "routing_accuracy": "right expert",
    "task_known_accuracy": "task known",
}
TABLE = """| {head} |
|{line}|
{rows}
"""
MIB, GIB = 2**20, 2**30


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def table(head: list[str], rows: list[list[str]]) -> str:
    return TABLE.format(
        head=" | ".join(head), line="|".join("---" for _ in head), rows="\n".join(f"| {' | '.join(r)} |" for r in rows)
    )


def share(figure: dict[str, Any] | None) -> str:
    if figure is None:
        return ""
    deviation = "" if figure["deviation"] is None else f" ± {figure['deviation']:.3f}"
    return f"{figure['mean']:.3f}{deviation}"


def count(figure: float) -> str:
    return f"{figure:,.0f}"


def rows_of(results: Path, stream: str) -> dict[str, dict[str, Any]]:
    """Results of a stream, by method, in the table's order."""
    paths = {method: results / stream / f"{method}.json" for method in METHODS}
    return {method: read(path) for method, path in paths.items() if path.is_file()}


def of_a_stream(stream: str, title: str, rows: dict[str, dict[str, Any]]) -> str:
    first = next(iter(rows.values()))["stream"]
    tasks, lines = first["tasks"], []
    for method, row in rows.items():
        summary = row["summary"]
        cells = [METHODS[method], *(share(summary.get(name)) for name in FIGURES.values())]
        cells += [count(summary[COSTS[name]]["mean"]) for name in ("parameters", "bytes")]
        cells += [f"{summary[COSTS[name]]['mean']:.2f}" for name in ("learning", "answering")]
        lines.append([*cells, str(len(row["seeds"]))])
    sizes = f"{len(tasks)} tasks of {tasks[0]}" if len(set(tasks)) == 1 else f"tasks of {', '.join(map(str, tasks))}"
    return (
        f"### {title}\n\n`{first['model']}`, {first['classes']} classes, {sizes} classes; "
        f"{first['train_images']:,} train and {first['test_images']:,} test images (`results/{stream}/`).\n\n"
        + table(["", *FIGURES, *COSTS, "seeds"], lines)
    )


# ---- growth ------------------------------------------------------------------------------------------------------


def growth_tables(growth: dict[str, Any]) -> str:
    rows = growth["rows"]
    head = ["experts", "classes", "`entropy`", "`gaussian`", "learning one, s", "`entropy`, passes"]
    head += ["`gaussian`, passes", "`gaussian` ready, s", "experts, MiB", "statistics, MiB", "`results.json`, MiB"]
    head += ["process, GiB"]
    lines = [
        [
            count(row["experts"]),
            count(row["classes"]),
            f"{row['entropy accuracy']:.3f}",
            f"{row['gaussian accuracy']:.3f}",
            f"{row['learning the last experts, seconds each']:.2f}",
            f"{row['entropy passes per image']:.3f}",
            f"{row['gaussian passes per image']:.3f}",
            f"{row['gaussian made ready, seconds']:.2f}",
            f"{row['experts on disk, bytes'] / MIB:.1f}",
            f"{row['statistics on disk, bytes'] / MIB:.1f}",
            f"{row['results.json, bytes'] / MIB:.2f}",
            f"{row['process, GiB of anonymous memory']:.2f}",
        ]
        for row in rows
    ]
    last = rows[-1]

    def at(experts: int) -> list[str]:
        times = experts / last["experts"]
        return [
            count(experts),
            count(experts * growth["classes_each"]),
            f"{last['entropy passes per image'] * times**2:,.0f}",
            f"{last['gaussian passes per image'] * times:,.1f}",
            f"{last['gaussian made ready, seconds'] * times / 60:,.1f}",
            f"{last['experts in memory, bytes'] * times / GIB:,.1f}",
            f"{last['statistics in memory, bytes'] * times / GIB:,.1f}",
            f"{last['results.json, bytes'] * times**2 / GIB:,.1f}",
        ]

    paper = ["experts", "classes", "`entropy`, passes", "`gaussian`, passes", "`gaussian` ready, min"]
    paper += ["experts, GiB", "statistics, GiB", "`results.json`, GiB"]
    ends = ends_of(last)
    return f"""\
Experts of {growth["classes_each"]} classes each, taught and saved by `ContinualTrainer` one after another from
{growth["images"]} drawn [CLS] a class, {growth["width"]} wide, in {growth["epochs"]} epochs. A class's mean is drawn
from a Gaussian with the covariance of the class means of {growth["covariances_of"]}, an image from a Gaussian around
it with the covariance within its classes. {growth["tests"]} test images of classes drawn from all; passes of
`{growth["model"]}`; sizes on disk; times are processor time (`results/growth.json`).

{table(head, lines)}
On paper, from the last row: `entropy` scores every class under every expert, and `results.json` holds the accuracy of
every task after every task, so that both grow with the square of the number of experts; all else grows with it.

{table(paper, [at(experts) for experts in (1_000, 10_000, 100_000) if experts > last["experts"]])}
Where each part becomes the bottleneck, by the same reckoning:

- `entropy` takes as long as the backbone itself from about {count(ends["entropy"])} experts on, `gaussian` from about
  {count(ends["gaussian"])}.
- Experts and statistics fill 16 GiB at about {count(ends["memory"])} experts; statistics are
  {ends["statistics"]:.1f} times as large as the experts.
- Making `gaussian` ready, once after loading, takes a minute from about {count(ends["ready"])} experts on.
- `results.json` passes 1 GiB at about {count(ends["results"])} experts, and is written after every task.
- Learning an expert takes {rows[0]["learning the last experts, seconds each"]:.2f} s with {rows[0]["experts"]}
  experts and {last["learning the last experts, seconds each"]:.2f} s with {count(last["experts"])}.
- Accuracy goes from {rows[0]["entropy accuracy"]:.3f} with {rows[0]["experts"]} experts to
  {last["entropy accuracy"]:.3f} with {count(last["experts"])} by `entropy`, and to {last["gaussian accuracy"]:.3f} by
  `gaussian`.
"""


def ends_of(last: dict[str, Any]) -> dict[str, float]:
    """Numbers of experts at which a part takes too much, to two digits; and how much heavier statistics are."""
    experts = last["experts"]
    both = last["experts in memory, bytes"] + last["statistics in memory, bytes"]
    found = {
        "entropy": experts / last["entropy passes per image"] ** 0.5,
        "gaussian": experts / last["gaussian passes per image"],
        "memory": experts * 16 * GIB / both,
        "ready": experts * 60 / last["gaussian made ready, seconds"],
        "results": experts * (GIB / last["results.json, bytes"]) ** 0.5,
    }
    rounded = {name: float(f"{value:.2g}") for name, value in found.items()}
    return rounded | {"statistics": last["statistics in memory, bytes"] / last["experts in memory, bytes"]}


# ---- the other parts -----------------------------------------------------------------------------------------------


def layerwise_tables(layerwise: dict[str, Any]) -> str:
    counts, times = layerwise["parameters"], layerwise["times_lucas"]
    parameters = [[name, count(number), f"{times[name]:.2f}"] for name, number in counts.items()]
    ours = layerwise["passes_of_all_epochs"]
    passes = [[name, f"{value:.2f}", f"{ours[name]:.1f}"] for name, value in layerwise["passes_of_an_epoch"].items()]
    adapter = next(name for name in times if name.startswith("adapter"))
    epochs = layerwise["epochs"]
    return f"""\
Numbers to learn for one task on a ViT-B/16, without the head's {count(768)} a class, counted by code
(`results/layerwise.json`). The paper says about 8 times fewer than layer-wise adapters; an adapter in every block has
{times[adapter]:.1f} times LuCA's.

{table(["", "parameters", "times LuCA's"], parameters)}
Prompt methods are counted, not run. Their pools serve all tasks together and do not grow with them.

Processor time of learning, in passes of the backbone over the train images ({layerwise["images"]} images, median of
{layerwise["rounds"]} rounds). The adapter's epoch takes {layerwise["adapter_over_released"]:.2f} times that of the
released procedure; the paper says about 2.5 times, for the whole run. With [CLS] kept, as here, {epochs} epochs take
one pass and what the tables above add to it.

{table(["", "one epoch", f"{epochs} epochs"], passes)}"""


def ablation_tables(results: Path) -> str:
    """The paper's ablations, one table for each data set that has been measured."""
    parts = []
    for path in sorted(results.glob("ablations_*.json")):
        content = read(path)
        columns = [name for name in ABLATED if name in next(iter(content["summary"].values()))]
        lines = [[name, *(share(row[column]) for column in columns)] for name, row in content["summary"].items()]
        title = path.stem.removeprefix("ablations_").capitalize()
        parts.append(f"{title} (`results/{path.name}`):\n\n{table(['', *(ABLATED[c] for c in columns)], lines)}")
    return "\n".join(parts)


def path_tables(paths: dict[str, Any]) -> str:
    """Ways to better entropy routing: a row for each, and what was measured beside on the recipe's experts."""
    rows, beside = [], []
    for name, figures in paths["summary"].items():
        rows.append([name, *(share(figures[column]) for column in PATHS)])
        beside += [[name, figure, share(value)] for figure, value in figures.items() if figure not in PATHS]
    return (
        table(["", *PATHS.values()], rows)
        + "\nOther ways to choose with the same experts:\n\n"
        + table(["experts of", "", "A_B, or share of images"], beside)
    )


def recipes(configs: list[dict[str, Any]]) -> str:
    lines = []
    for config in configs:
        train, cut = config.get("train_split", "train"), f"{config['increment']} a task"
        splits = f"`{train}`, `{config['test_split']}`" if "test_split" in config else f"`{train}`"
        if "test_size" in config:
            splits += f", {config['test_size']:.0%} held out"
        order = "seed 1993" if config.get("class_order", "seeded") == "seeded" else "of the folders"
        columns = f"`{config['image_column']}`, `{config.get('label_column', 'label')}`"
        name, size = f"`{config['name']}`", str(config["image_size"])
        lines.append([name, f"`{config['dataset']}`", columns, cut, splits, order, size])
    return table(["config", "data set", "columns", "classes", "splits", "class order", "pixels"], lines)


PAGE = """\
# Results, side by side

Made by `examples/benchmarks/report.py` from the files in `examples/benchmarks/results`, each of which has its command,
versions, seeds and kind of machine. Every image is answered by itself, without being told its task. All methods of a
stream see the same images in the same order and, where they learn from [CLS], the same vectors: those of the closed
forms and linear heads are standardised by the [reference](concepts.md) and of length 1.

```bash
B=examples/benchmarks
python $B/run.py $B/configs/digits.json --method luca      # one row
python $B/run.py --all                                     # every row that needs no network
python $B/run.py --method luca --name mine --dataset path/to/images --increment 10
python $B/report.py                                        # this page
```

The emoji and the backbone `dinov2-small` do not come with the package: take others with `--dataset` and `--model`.

## Streams

Mean ± deviation over the seeds, each of which decides the class order and the training.

| | |
|---|---|
| Ā, A_B | average incremental accuracy, and accuracy after the last task, on all classes seen |
| forgetting | how far tasks fell below their best |
| right expert, task known | share of images answered by their own task's expert; accuracy if that expert answers |
| parameters, bytes | numbers learnt, and bytes kept from one task to the next, per task |
| learning, answering | processor time in passes of the backbone over the train and the test images |

*Italics*: all classes at once, a bound. One LoRA seed on emoji; LoRA has the values of PEFT's guide and 3 epochs. The
paper's recipe runs on [CLS] without augmentation here.

{streams}
![Accuracy against the number of classes](images/accuracy.png)

## Against methods that move every layer

{layerwise}
## Growth

{growth}
![Accuracy and time of routing against the number of experts](images/growth.png)

## Ablations

One change at a time from the own recipe, mean ± deviation over 3 class orders (`ablations.py`). Zeros: share of a
LuCA module's parameters that are exactly zero, which the penalty's gradient never makes and its proximal step does.
Overlap, of two experts: numbers that neither has at zero among those that one has not. Cosine: of their weight
matrices. Subspaces: cosine of the principal angles between the row spaces of their first weights, root mean square;
random ones have the root of 1 over the reduction, 0.25 for 16.

{ablations}
## Ways to better `entropy` routing

One change at a time from the own recipe on emoji in 14 tasks, mean ± deviation over {orders} class orders
(`results/entropy_paths_emoji.json`); [routing](routing.md#tried) says what was learnt from it. "Strangers" are
pseudo-features drawn from the statistics of other experts' classes: experts trained on them depend on which others
there are.

{paths}
## What a module does to [CLS]

t-SNE of the test images of the last task of `{tsne_stream}`, each seen by its own task's expert. Silhouette of the
classes, by cosine, before t-SNE: {silhouettes} (`results/tsne.json`).

![t-SNE of [CLS], of the adapter alone, and of LuCA](images/tsne.png)

## Not measured yet

The paper's data sets have their configs, with the paper's hyperparameters and the backbone
`google/vit-base-patch16-224-in21k`; `source` in each says where its id, columns and splits were read. Their loading is
tested on small local data sets of the same columns, label types and folders. **No figure of them has been measured.**

{recipes}{unfinished}"""


# ---- the README's summary ------------------------------------------------------------------------------------------


IN_README = "luca luca_gaussian luca_paper simplecil lda ranpac probes sequential_head lora joint_probe".split()
BEGINS, ENDS = "<!-- summary, made by examples/benchmarks/report.py -->\n", "<!-- end of the summary -->\n"


def summary(results: Path) -> str:
    """At most twelve lines: last accuracy of methods on streams, and what is counted and grown."""
    lines = []
    for stream in STREAMS:
        rows = rows_of(results, stream)
        last = {method: f"{row['summary']['last_accuracy']['mean']:.3f}" for method, row in rows.items()}
        lines.append([f"`{stream}`", *(last.get(method, "") for method in IN_README)])
    times = read(results / "layerwise.json")["times_lucas"]
    adapter = next(value for name, value in times.items() if name.startswith("adapter"))
    grown = read(results / "growth.json")["rows"][-1]
    head = ["last accuracy", "LuCA `entropy`", "LuCA `gaussian`", "paper's recipe", "class means", "LDA", "RanPAC"]
    head += ["probe a task", "one head", "LoRA a task", "*joint probe*"]
    return f"""\
Side by side, with costs, deviations and pictures: [results](docs/results.md). Task by task unless in italics.

{table(head, lines)}
An adapter in every block has {adapter:.1f} times the parameters. With {count(grown["experts"])} drawn experts,
`entropy` reaches {grown["entropy accuracy"]:.3f}, `gaussian` {grown["gaussian accuracy"]:.3f}.
"""


def with_summary(readme: str, text: str) -> str:
    """The README with the summary between its marks."""
    before, rest = readme.split(BEGINS)
    return before + BEGINS + text + ENDS + rest.split(ENDS)[1]


def unfinished(results: Path, configs: list[dict[str, Any]]) -> list[str]:
    """Rows that need no network and whose results are not there, or not of every seed."""
    found = []
    for config in configs:
        for method, changes in config["rows"].items() if config["offline"] else ():
            path = results / config["name"] / f"{method}.json"
            seeds = len(read(path)["seeds"]) if path.is_file() else 0
            if seeds < len(changes.get("seeds", range(5))):
                found.append(f"`{config['name']}`, {METHODS[method].replace('*', '')}: {seeds or 'no'} seeds")
    return found


def page(results: Path, configs: Path) -> str:
    tsne, paths = read(results / "tsne.json"), read(results / "entropy_paths_emoji.json")
    silhouettes = ", ".join(f"{name} {panel['silhouette']:.3f}" for name, panel in tsne["panels"].items())
    known = list(map(read, sorted(configs.glob("*.json"))))
    unmeasured = [config for config in known if not config["offline"]]
    own = {path.name: path.name for path in sorted(results.iterdir()) if path.is_dir() and path.name not in STREAMS}
    streams = {stream: rows_of(results, stream) for stream in STREAMS | own}
    left = unfinished(results, known)
    return PAGE.format(
        streams="\n".join(of_a_stream(s, (STREAMS | own)[s], rows) for s, rows in streams.items() if rows),
        layerwise=layerwise_tables(read(results / "layerwise.json")),
        growth=growth_tables(read(results / "growth.json")),
        ablations=ablation_tables(results),
        orders=len(paths["setting"]["class_order_seeds"]),
        paths=path_tables(paths),
        tsne_stream=tsne["stream"],
        silhouettes=silhouettes,
        recipes=recipes(unmeasured),
        unfinished=f"\nOf the streams above, not measured in full: {'; '.join(left)}.\n" if left else "",
    )


# ---- pictures ------------------------------------------------------------------------------------------------------


def draw_accuracy(results: Path, path: Path) -> None:
    streams = {stream: rows for stream in STREAMS if (rows := rows_of(results, stream)) and stream != "emoji_domains"}
    figure, axes = plt.subplots(1, len(streams), figsize=(3.4 * len(streams), 4), sharey=True, squeeze=False)
    colors = dict(zip(METHODS, plt.get_cmap("tab20").colors, strict=False))
    for axis, (stream, rows) in zip(axes[0], streams.items(), strict=True):
        for method, row in rows.items():
            seen = zip(row["summary"]["stage_classes"], row["summary"]["stage_accuracies"], strict=True)
            x, y = zip(*[(c, a) for c, a in seen if a is not None], strict=True)
            joint = method.startswith("joint")
            label = METHODS[method].replace("`", "").replace("*", "")
            axis.plot(x, y, "*" if joint else "-", color=colors[method], label=label, markersize=9, linewidth=1.4)
        axis.set(title=STREAMS[stream], xlabel="classes", ylim=(0, 1.03))
    axes[0][0].set_ylabel("accuracy on all classes so far")
    handles = {label: h for a in axes[0] for h, label in zip(*a.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.18, 1, 1))
    save(figure, path)


def draw_growth(growth: dict[str, Any], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    experts = [row["experts"] for row in growth["rows"]]
    for router in ("entropy", "gaussian"):
        left.plot(experts, [row[f"{router} accuracy"] for row in growth["rows"]], "o-", label=router)
        right.plot(experts, [row[f"{router} passes per image"] for row in growth["rows"]], "o-", label=router)
    left.set(xscale="log", xlabel="experts", ylabel="accuracy", ylim=(0, 1.03))
    right.set(xscale="log", yscale="log", xlabel="experts", ylabel="routing, passes of the backbone")
    right.axhline(1, color="grey", linewidth=0.8)
    left.legend(frameon=False)
    figure.tight_layout()
    save(figure, path)


def draw_tsne(tsne: dict[str, Any], path: Path) -> None:
    names = list(dict.fromkeys(tsne["classes"]))
    figure, axes = plt.subplots(1, len(tsne["panels"]), figsize=(9, 3.6))
    for axis, (title, panel) in zip(axes, tsne["panels"].items(), strict=True):
        for k, name in enumerate(names):
            points = [p for p, own in zip(panel["points"], tsne["classes"], strict=True) if own == name]
            axis.scatter(*zip(*points, strict=True), s=10, color=plt.get_cmap("tab20")(k % 20), label=name)
        axis.set(title=title, xticks=[], yticks=[])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncol=5, fontsize=7, frameon=False)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--configs", type=Path, default=HERE / "configs")
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--readme", type=Path, default=DOCS.parent / "README.md")
    args = parser.parse_args()
    args.docs.mkdir(parents=True, exist_ok=True)
    (args.docs / "results.md").write_text(page(args.results, args.configs), encoding="utf-8")
    readme = args.readme.read_text(encoding="utf-8")
    args.readme.write_text(with_summary(readme, summary(args.results)), encoding="utf-8")
    draw_accuracy(args.results, args.docs / "images" / "accuracy.png")
    draw_growth(read(args.results / "growth.json"), args.docs / "images" / "growth.png")
    draw_tsne(read(args.results / "tsne.json"), args.docs / "images" / "tsne.png")


if __name__ == "__main__":
    main()
