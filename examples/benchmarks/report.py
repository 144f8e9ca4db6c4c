"""
Fills the generated parts of the README and of the pages in docs from the results files and the configs, writes the
long tables of docs/data, and draws the pictures of docs/images. A generated part stands between two marks:

    <!-- NAME, made by examples/benchmarks/report.py -->
    <!-- end of the NAME -->

NAME is one of `PARTS`.

    python examples/benchmarks/report.py
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt


matplotlib.use("Agg")
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS, CONFIGS, DOCS = HERE / "results", HERE / "configs", ROOT / "docs"
IMAGES, DATA = DOCS / "images", DOCS / "data"
MARKS = re.compile(
    r"(<!-- (\w+), made by examples/benchmarks/report\.py -->\n).*?(<!-- end of the \2 -->\n)", flags=re.DOTALL
)
# In the order of the tables, with the words for them.
METHODS = {
    "luca": "LuCA, `entropy`",
    "luca_gaussian": "LuCA, `gaussian`",
    "luca_paper": "LuCA, paper's recipe, `entropy`",
    "simplecil": "class means (SimpleCIL)",
    "lda": "LDA",
    "ranpac": "RanPAC, 10,000",
    "probes": "linear probe per task, entropy",
    "sequential_head": "one linear head, task after task",
    "lora": "LoRA per task, entropy",
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
# Columns of docs/data/streams.csv, and the entries of a results file's summary that they have.
FIGURES = {
    "last accuracy": "last_accuracy",
    "average accuracy": "average_accuracy",
    "forgetting": "forgetting",
    "right expert": "routing_accuracy",
    "accuracy, task known": "task_known_accuracy",
    "parameters per task": "parameters_per_task",
    "bytes per task": "bytes_per_task",
    "passes to learn": "learning_passes",
    "passes to answer": "answering_passes",
}
SHOWN = ("digits", "emoji_14x4", "emoji_29x2")
# `auto` was measured by the name of the router that it is there: no class has the 200 images from which it may differ.
IN_SUMMARY = {
    "luca": "`entropy`",
    "luca_gaussian": "`auto`",
    "lda": "LDA",
    "ranpac": "RanPAC",
    "joint_probe": "*joint probe*",
}
PUBLISHED = ("SimpleCIL", "EASE", "RanPAC", "MOS")  # in the table; the others are in docs/data/published.csv
# Routers that there are, with the names that results files of earlier versions have for them.
ROUTERS = {name: name for name in ("entropy", "energy", "nearest", "lda", "gaussian", "auto", "ridge")}
ROUTERS |= {"prototype": "lda"}
ROUTING_SETS = {"digits": "digits, 5 tasks", "emoji_14": "emoji, 14 tasks", "emoji_29": "emoji, 29 tasks"}
DETAILED = "emoji_14x4"  # the stream whose costs are shown
SHARE = "share of the backbone's time, median"
MIB = 2**20


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def is_current(content: dict[str, Any]) -> bool:
    """Experts of version 0.1 have no whitening, and saw transparent pixels by their hidden colours."""
    return not content["environment"]["peft_luca"].startswith("0.1.")


def mean_of(figure: dict[str, Any] | None) -> str:
    return "" if figure is None else f"{figure['mean']:.3f}"


def share(figure: dict[str, Any] | None) -> str:
    """Mean±deviation."""
    if figure is None:
        return ""
    return f"{figure['mean']:.3f}" + (f"±{figure['deviation']:.3f}" if figure["deviation"] else "")


# ---- methods on streams ------------------------------------------------------------------------------------------


def rows_of(results: Path, stream: str) -> dict[str, dict[str, Any]]:
    """Results of a stream, by method, in the table's order."""
    paths = {method: results / stream / f"{method}.json" for method in METHODS}
    return {method: read(path) for method, path in paths.items() if path.is_file()}


def streams(results: Path) -> str:
    """Last accuracy of all methods on the streams whose experts are current, and on those of one's own."""
    own = [path.name for path in sorted(results.iterdir()) if path.is_dir() and path.name not in STREAMS]
    found = {stream: rows for stream in (*STREAMS, *own) if (rows := rows_of(results, stream))}
    found = {stream: rows for stream, rows in found.items() if "luca" not in rows or is_current(rows["luca"])}
    lines = []
    for method, words in METHODS.items():
        cells = [share(rows[method]["summary"]["last_accuracy"]) if method in rows else "" for rows in found.values()]
        lines += [[words, *cells]] if any(cells) else []
    return table(["last accuracy A_B", *(f"`{stream}`" for stream in found)], lines)


def costs(results: Path) -> str:
    """What a method keeps and takes, on one stream."""
    lines = []
    for method, row in rows_of(results, DETAILED).items():
        if method.startswith("joint"):
            continue  # all classes at once
        found = row["summary"]
        cells = [mean_of(found.get(name)) for name in ("average_accuracy", "forgetting")]
        kilobytes = f"{found['bytes_per_task']['mean'] / 1000:,.0f}"
        lines.append([METHODS[method], *cells, kilobytes, f"{found['learning_passes']['mean']:.2f}"])
    head = [f"`{DETAILED}`", "Ā", "forgetting", "kB per task", "passes to learn"]
    return table(head, lines)


def summary(results: Path) -> str:
    """For the README."""
    lines = []
    for stream in SHOWN:
        rows = rows_of(results, stream)
        lines.append([STREAMS[stream], *(mean_of(rows[method]["summary"]["last_accuracy"]) for method in IN_SUMMARY)])
    return table(["last accuracy", *IN_SUMMARY.values()], lines)


def unfinished(results: Path) -> str:
    """Runs that need no network and whose results are not there, or not of every seed."""
    found = []
    for config in map(read, sorted(CONFIGS.glob("*.json"))):
        for method, changes in config["rows"].items() if config["offline"] else ():
            path = results / config["name"] / f"{method}.json"
            seeds = len(read(path)["seeds"]) if path.is_file() else 0
            if seeds < len(changes.get("seeds", range(5))):
                found.append(f"`{config['name']}`, {METHODS[method].replace('*', '')}: {seeds or 'no'} seeds")
    return f"Of the streams above, not measured in full: {'; '.join(found)}.\n" if found else ""


# ---- routers -----------------------------------------------------------------------------------------------------


def routing_results(results: Path) -> dict[str, dict[str, Any]]:
    """By its name in words, each routing study whose experts are current."""
    contents = {words: read(results / f"routing_{name}.json") for name, words in ROUTING_SETS.items()}
    return {words: content for words, content in contents.items() if is_current(content)}


def of_routers(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures of the routers that there are, by today's names; a results file may have others."""
    named = {ROUTERS.get(name.split()[0]): figures for name, figures in content["summary"].items()}
    return {name: figures for name, figures in named.items() if name is not None}


def routers(results: Path) -> str:
    """Last accuracy of every router on the same experts."""
    named = routing_results(results)
    contents = list(named.values())
    lines = [
        [f"`{name}`", *(mean_of(of_routers(content).get(name, {}).get("last_accuracy")) for content in contents)]
        for name in of_routers(contents[0])
    ]
    entropies = [content["summary"]["entropy"] for content in contents]
    beside = {"task_known_accuracy": "task known", "batch_scope_sorted": "`entropy`, one expert per batch, sorted"}
    beside["batch_scope_shuffled"] = "`entropy`, one expert per batch, shuffled"
    lines += [[words, *(f"{found[name]['mean']:.3f}" for found in entropies)] for name, words in beside.items()]
    return table(["last accuracy A_B", *named], lines)


def routing_cost(results: Path) -> str:
    lines = [
        [
            f"{row['experts']:,}",
            f"{row['classes']:,}",
            f"`{router}`",
            f"{100 * found[SHARE]:.1f} %",
            f"{found['made ready once, seconds']:.1f} s",
        ]
        for name in ("scale", "10000")
        for row in read(results / f"routing_cost_{name}.json")["rows"]
        for router, found in row["routers"].items()
    ]
    return table(["experts", "classes", "router", "share of the backbone's time", "made ready once"], lines)


# ---- costs -------------------------------------------------------------------------------------------------------


def adapter_times(results: Path) -> float:
    """How many times LuCA's parameters an adapter in every block has."""
    times: dict[str, float] = read(results / "layerwise.json")["times_lucas"]
    return next(value for name, value in times.items() if name.startswith("adapter"))


def parameters(results: Path) -> str:
    content = read(results / "layerwise.json")
    times = content["times_lucas"]
    lines = [[name, f"{number:,}", f"{times[name]:.2f}"] for name, number in content["parameters"].items()]
    return table(["", "parameters", "times LuCA's"], lines)


def passes(results: Path) -> str:
    content = read(results / "layerwise.json")
    whole = content["passes_of_all_epochs"]
    lines = [[name, f"{value:.2f}", f"{whole[name]:.1f}"] for name, value in content["passes_of_an_epoch"].items()]
    return table(["passes of the backbone", "one epoch", f"{content['epochs']} epochs"], lines)


def learning_cost(results: Path) -> str:
    content = read(results / "speed.json")
    passes, peaks = content["passes"], content["peak_memory_gib"]
    lines = [[name, *(f"{of[name]:.2f}" for of in passes.values()), f"{peaks[name]:.1f} GiB"] for name in peaks]
    return table(["", *passes, "peak memory"], lines)


def steps(results: Path) -> str:
    """How well the classes of a task lie apart after each step of an expert."""
    names = ("class means", "silhouette", "cosine within classes", "cosine between classes", "directions")
    panels = read(results / "tsne.json")["panels"].items()
    return table(["", *names], [[step, *(f"{panel[name]:g}" for name in names)] for step, panel in panels])


def growth(results: Path) -> str:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "experts": lambda row: f"{row['experts']:,}",
        "`entropy`": lambda row: f"{row['entropy accuracy']:.3f}",
        "`gaussian`": lambda row: f"{row['gaussian accuracy']:.3f}",
        "`entropy`, passes": lambda row: f"{row['entropy passes per image']:.3f}",
        "`gaussian`, passes": lambda row: f"{row['gaussian passes per image']:.3f}",
    }
    rows = read(results / "growth.json")["rows"]
    return table(list(columns), [[form(row) for form in columns.values()] for row in rows])


# ---- published figures -------------------------------------------------------------------------------------------


def published_figures() -> dict[str, Any]:
    """By the name of a config, what the literature has measured on its data set, in per cent."""
    sets: dict[str, Any] = read(HERE / "published.json")["sets"]
    return sets


def published(results: Path) -> str:
    """Published figures beside our own, and the passes of the backbone that measuring ours takes."""
    lines = []
    for name, found in published_figures().items():
        line = [f"{found['title']} ({found['source']})"]
        line += ["/".join(map(str, found["methods"].get(method, []))) for method in PUBLISHED]
        for method in ("luca_paper", "luca", "luca_gaussian"):
            row = rows_of(results, name).get(method)
            figures = [row["summary"][key]["mean"] for key in ("average_accuracy", "last_accuracy")] if row else []
            line.append("/".join(f"{100 * figure:.1f}" for figure in figures) or "–")
        train, test = found["images"] or (0, 0)
        lines.append([*line, f"{(21 * train + test) / 1e6:.2f}" if train else ""])
    return table(["", *PUBLISHED, "paper's recipe", "`entropy`", "`gaussian`", "million passes"], lines)


MAKERS = (
    summary,
    streams,
    costs,
    unfinished,
    routers,
    routing_cost,
    parameters,
    passes,
    learning_cost,
    steps,
    growth,
    published,
)
# Name of a generated part → what makes it.
PARTS: dict[str, Callable[[Path], str]] = {maker.__name__: maker for maker in MAKERS}


def filled(text: str, results: Path = RESULTS) -> str:
    """A page with its generated parts made anew."""

    def part(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        return f"{begin}\n{content}\n{end}" if (content := PARTS[name](results)) else begin + end

    return MARKS.sub(part, text)


# ---- long tables -------------------------------------------------------------------------------------------------


def csv_of(rows: list[dict[str, Any]]) -> str:
    """Rows of the same columns as the text of a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def all_streams(results: Path) -> list[dict[str, Any]]:
    """Every figure of every method on every stream, with the version that it was measured with."""
    found = []
    for stream in STREAMS:
        for method, row in rows_of(results, stream).items():
            line = {"stream": stream, "method": method, "version": row["environment"]["peft_luca"]}
            line["seeds"] = str(len(row["seeds"]))
            for words, name in FIGURES.items():
                figure = row["summary"].get(name) or {}
                line |= {words: figure.get("mean"), f"{words}, deviation": figure.get("deviation")}
            found.append(line)
    return found


def all_routers(results: Path) -> list[dict[str, Any]]:
    """Every figure of every router on the same experts, by the name that it had."""
    found = []
    for name in ("digits", "emoji_14", "emoji_29", "removed_emoji_14"):
        content = read(results / f"routing_{name}.json")
        for router, figures in content["summary"].items():
            line = {"file": f"routing_{name}.json", "version": content["environment"]["peft_luca"], "router": router}
            found.append(line | {figure: value["mean"] for figure, value in sorted(figures.items())})
    columns = list(dict.fromkeys(column for line in found for column in line))
    return [{column: line.get(column, "") for column in columns} for line in found]


def all_published(results: Path) -> list[dict[str, Any]]:
    """Every published figure that a config stands beside, in per cent."""
    return [
        {
            "config": name,
            "method": method,
            "source": found["source"],
            "average accuracy": average,
            "last accuracy": last,
        }
        for name, found in published_figures().items()
        for method, (average, last) in found["methods"].items()
    ]


def all_growth(results: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read(results / "growth.json")["rows"]
    return rows


# Name of a file in docs/data → what makes its rows.
TABLES = {"streams.csv": all_streams, "routers.csv": all_routers, "growth.csv": all_growth}
TABLES["published.csv"] = all_published


# ---- pictures ------------------------------------------------------------------------------------------------------


def draw_accuracy(results: Path, path: Path) -> None:
    """The lines of the README's table over the stream, with [CLS] of all classes at once as a mark."""
    figure, axes = plt.subplots(1, len(SHOWN), figsize=(9.6, 3.4), sharey=True)
    colors = ("#d55e00", "#0072b2", "#999999", "#009e73")  # can be told apart without red and green
    style = dict(zip(IN_SUMMARY, zip(colors, "os^D", strict=True), strict=False))
    for axis, stream in zip(axes, SHOWN, strict=True):
        rows = rows_of(results, stream)
        for method, label in IN_SUMMARY.items():
            summary = rows[method]["summary"]
            x, y = summary["stage_classes"], summary["stage_accuracies"]
            label = label.strip("`*")
            if method == "joint_probe":
                axis.plot(x[-1], y[-1], "*", color="black", markersize=12, label=label)
            else:
                color, marker = style[method]
                axis.plot(x, y, color=color, marker=marker, markersize=4, linewidth=1.4, label=label)
        axis.set(title=STREAMS[stream], xlabel="classes learned", ylim=(0.5, 1.02))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy on all of them")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncol=5, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
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
    """Above, mean cosines between the images of two classes; below, the images by t-SNE."""
    names = sorted(set(tsne["classes"]), key=tsne["classes"].index)
    figure, (above, below) = plt.subplots(2, len(tsne["panels"]), figsize=(10, 5.6), layout="constrained")
    for top, axis, (title, panel) in zip(above, below, tsne["panels"].items(), strict=True):
        shown = top.imshow(panel["cosines"], vmin=0, vmax=1, cmap="cividis")
        top.set(title=title, xticks=[], yticks=[])
        for k, name in enumerate(names):
            points = [p for p, own in zip(panel["points"], tsne["classes"], strict=True) if own == name]
            marker = "osD^vP*Xh"[k % 9]
            axis.scatter(*zip(*points, strict=True), s=12, color=plt.get_cmap("tab20")(k), marker=marker, label=name)
        axis.set(xticks=[], yticks=[])
    figure.colorbar(shown, ax=above[-1], label="mean cosine")
    above[0].set_ylabel("classes × classes")
    below[0].set_ylabel("test images, t-SNE")
    figure.legend(*below[0].get_legend_handles_labels(), loc="outside lower center", ncol=5, fontsize=8, frameon=False)
    save(figure, path)


def draw_pictures() -> None:
    draw_accuracy(RESULTS, IMAGES / "accuracy.png")
    draw_growth(read(RESULTS / "growth.json"), IMAGES / "growth.png")
    draw_tsne(read(RESULTS / "tsne.json"), IMAGES / "tsne.png")


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if MARKS.search(text):
            page.write_text(filled(text), encoding="utf-8")
    for name, rows in TABLES.items():
        (DATA / name).write_text(csv_of(rows(RESULTS)), encoding="utf-8")
    draw_pictures()


if __name__ == "__main__":
    main()
