"""
Fills the generated parts of the README and of the pages in docs from the results files and the configs, and draws the
pictures of docs/images. A generated part stands between two marks, and may stand on any page:

    <!-- NAME, made by examples/benchmarks/report.py -->
    <!-- end of the NAME -->

NAME is one of `PARTS`.

    python examples/benchmarks/report.py
"""

from __future__ import annotations

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
IMAGES = DOCS / "images"
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
FIGURES = {
    "Ā": "average_accuracy",
    "A_B": "last_accuracy",
    "forgetting": "forgetting",
    "right expert": "routing_accuracy",
    "task known": "task_known_accuracy",
}
COSTS = {"parameters": ",.0f", "bytes": ",.0f"}, {"learning": ".2f", "answering": ".2f"}
IN_SUMMARY = {
    "luca": "LuCA `entropy`",
    "luca_gaussian": "LuCA `gaussian`",
    "luca_paper": "paper's recipe",
    "simplecil": "class means",
    "lda": "LDA",
    "ranpac": "RanPAC",
    "probes": "probe per task",
    "sequential_head": "one head",
    "lora": "LoRA per task",
    "joint_probe": "*joint probe*",
}
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
    """A_B and Ā of all methods on all streams, and everything else on one stream."""
    own = {path.name: path.name for path in sorted(results.iterdir()) if path.is_dir() and path.name not in STREAMS}
    found = {stream: rows for stream in STREAMS | own if (rows := rows_of(results, stream))}
    parts = []
    for title, figure in (("A_B", "last_accuracy"), ("Ā", "average_accuracy")):
        lines = []
        for method, words in METHODS.items():
            cells = [share(rows[method]["summary"].get(figure)) if method in rows else "" for rows in found.values()]
            lines += [[words, *cells]] if any(cells) else []
        parts.append(table([title, *(f"`{stream}`" for stream in found)], lines))
    lines = []
    for method, row in found[DETAILED].items():
        summary = row["summary"]
        cells = [share(summary.get(FIGURES[name])) for name in ("forgetting", "right expert", "task known")]
        cells += [f"{summary[f'{name}_per_task']['mean']:{form}}" for name, form in COSTS[0].items()]
        cells += [f"{summary[f'{name}_passes']['mean']:{form}}" for name, form in COSTS[1].items()]
        lines.append([METHODS[method], *cells])
    head = [f"`{DETAILED}`", "forgetting", "right expert", "task known", *COSTS[0], *COSTS[1]]
    return "\n".join([*parts, table(head, lines)])


def summary(results: Path) -> str:
    """At most twelve lines, for the README."""
    lines = []
    for stream in STREAMS:
        rows = rows_of(results, stream)
        last = {method: f"{row['summary']['last_accuracy']['mean']:.3f}" for method, row in rows.items()}
        lines.append([f"`{stream}`", *(last.get(method, "") for method in IN_SUMMARY)])
    grown = read(results / "growth.json")["rows"][-1]
    return f"""\
{table(["last accuracy", *IN_SUMMARY.values()], lines)}
An adapter in every block has {adapter_times(results):.1f} times the parameters. With {grown["experts"]:,} drawn
experts, `entropy` reaches {grown["entropy accuracy"]:.3f}, `gaussian` {grown["gaussian accuracy"]:.3f}.
"""


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


def routing_results(results: Path) -> list[dict[str, Any]]:
    return [read(results / f"routing_{name}.json") for name in ROUTING_SETS]


def of_routers(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures of the routers that there are, by today's names; a results file may have others."""
    named = {ROUTERS.get(name.split()[0]): figures for name, figures in content["summary"].items()}
    return {name: figures for name, figures in named.items() if name is not None}


def routers(results: Path) -> str:
    """Last accuracy of every router on the same experts, and of baselines that see all classes at once."""
    contents = routing_results(results)
    lines = [
        [f"`{name}`", *(mean_of(of_routers(content).get(name, {}).get("last_accuracy")) for content in contents)]
        for name in of_routers(contents[0])
    ]
    entropies = [content["summary"]["entropy"] for content in contents]
    beside = {"task_known_accuracy": "task known", "batch_scope_sorted": "`entropy`, batch scope, sorted by class"}
    beside["batch_scope_shuffled"] = "`entropy`, batch scope, shuffled"
    lines += [[words, *(f"{found[name]['mean']:.3f}" for found in entropies)] for name, words in beside.items()]
    baselines = [content["baselines_last_accuracy"] for content in contents]
    lines += [[f"*{name}*", *(f"{found[name]['mean']:.3f}" for found in baselines)] for name in baselines[0]]
    return table(["last accuracy A_B", *ROUTING_SETS.values()], lines)


def routing_cost(results: Path) -> str:
    rows = [row for name in ("", "_scale") for row in read(results / f"routing_cost{name}.json")["rows"]]
    lines = [
        [
            f"{row['experts']:,}",
            f"{row['classes']:,}",
            f"`{row['router']}`",
            f"{100 * row[SHARE]:.1f} %",
            f"{row['made ready once, seconds']:.1f} s" if "made ready once, seconds" in row else "",
        ]
        for row in rows
        if row["router"] in ROUTERS
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
    found = read(results / "speed.json")["passes"]
    return table(["", "passes"], [[name, f"{value:.2f}"] for name, value in found.items()])


def silhouettes(results: Path) -> str:
    panels = read(results / "tsne.json")["panels"].items()
    return "".join(f"- {name}: {panel['silhouette']:.3f}\n" for name, panel in panels)


def growth(results: Path) -> str:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "experts": lambda row: f"{row['experts']:,}",
        "classes": lambda row: f"{row['classes']:,}",
        "`entropy`": lambda row: f"{row['entropy accuracy']:.3f}",
        "`gaussian`": lambda row: f"{row['gaussian accuracy']:.3f}",
        "learning one, s": lambda row: f"{row['learning the last experts, seconds each']:.2f}",
        "`entropy`, passes": lambda row: f"{row['entropy passes per image']:.3f}",
        "`gaussian`, passes": lambda row: f"{row['gaussian passes per image']:.3f}",
        "`gaussian` ready, s": lambda row: f"{row['gaussian made ready, seconds']:.2f}",
        "experts, MiB": lambda row: f"{row['experts on disk, bytes'] / MIB:.1f}",
        "statistics, MiB": lambda row: f"{row['statistics on disk, bytes'] / MIB:.1f}",
        "`results.json`, MiB": lambda row: f"{row['results.json, bytes'] / MIB:.2f}",
        "process, GiB": lambda row: f"{row['process, GiB of anonymous memory']:.2f}",
    }
    rows = read(results / "growth.json")["rows"]
    return table(list(columns), [[form(row) for form in columns.values()] for row in rows])


MAKERS = summary, streams, unfinished, routers, routing_cost, parameters, passes, learning_cost, silhouettes, growth
# Name of a generated part → what makes it.
PARTS: dict[str, Callable[[Path], str]] = {maker.__name__: maker for maker in MAKERS}


def filled(text: str, results: Path = RESULTS) -> str:
    """A page with its generated parts made anew."""

    def part(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        return f"{begin}\n{content}\n{end}" if (content := PARTS[name](results)) else begin + end

    return MARKS.sub(part, text)


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


def draw_pictures() -> None:
    draw_accuracy(RESULTS, IMAGES / "accuracy.png")
    draw_growth(read(RESULTS / "growth.json"), IMAGES / "growth.png")
    draw_tsne(read(RESULTS / "tsne.json"), IMAGES / "tsne.png")


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if MARKS.search(text):
            page.write_text(filled(text), encoding="utf-8")
    draw_pictures()


if __name__ == "__main__":
    main()
