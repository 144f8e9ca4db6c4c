"""Plots: drawn from what they claim to show, and readable without colour."""

import io
import itertools
import sys

import numpy as np
import pytest
import torch
from helpers import make_model

from peft_luca import FeatureDataset


plots = pytest.importorskip("peft_luca.visualization")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

RESULTS = {
    "accuracy_matrix": [[0.9, None, None], [0.8, 0.7, None], [0.5, 0.7, 0.6]],
    "stage_accuracies": [0.9, None, 0.6],
    "stage_forgetting": [0.0, 0.1, 0.2],
}
REPORT = {
    "classes": [],
    "confused": [
        {"class": f"c{i} $x$ $", "predicted": "b", "images": 9 - i, "share": 0.9 - 0.1 * i, "examples": []}
        for i in range(5)
    ],
}
PLOTS = [
    "accuracy_matrix", "accuracy_over_stream", "routing_confusion", "entropy_histograms", "tsne", "class_confusion",
]  # fmt: skip


@pytest.fixture(scope="module")
def model_and_features():
    """A model of three experts, and [CLS] of images for each."""
    experts = {"warm": ["red", "yellow"], "cold": ["blue", "green"], "plain": ["white"]}
    generator = torch.Generator().manual_seed(0)
    features = {
        name: FeatureDataset(torch.randn(8, 32, generator=generator), torch.arange(8) % len(classes))
        for name, classes in experts.items()
    }
    model = make_model(experts)
    model.set_router("entropy")
    return model, features


def texts(figure):
    """Everything that is written in a figure."""
    found = figure.findobj(lambda artist: hasattr(artist, "get_text"))
    return [text for text in (artist.get_text() for artist in found) if text]


def heat(figure):
    return figure.axes[0].images[0].get_array()


def luminance(color):
    """CIE lightness of a colour, 0 to 100."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    y = float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
    return 116 * np.cbrt(y) - 16 if y > 0.008856 else 903.3 * y


# --- of results ---


def test_the_accuracy_matrix_is_that_of_the_results():
    figure = plots.accuracy_matrix(RESULTS)
    drawn = np.ma.filled(heat(figure), np.nan)
    np.testing.assert_allclose(drawn, 100 * np.array(RESULTS["accuracy_matrix"], dtype=float))
    assert {"90", "50", "60"} <= set(texts(figure))
    assert "nan" not in texts(figure)
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["1", "2", "3"]


def test_accuracy_and_forgetting_over_the_stream_are_those_of_the_results():
    accuracy, forgetting = plots.accuracy_over_stream(RESULTS).axes[0].lines
    np.testing.assert_allclose(accuracy.get_ydata(), [90, np.nan, 60])
    np.testing.assert_allclose(forgetting.get_ydata(), [0, 10, 20])
    np.testing.assert_allclose(accuracy.get_xdata(), [1, 2, 3])
    assert accuracy.get_marker() != forgetting.get_marker()
    assert accuracy.get_linestyle() != forgetting.get_linestyle()
    figure = plots.accuracy_over_stream({**RESULTS, "stage_forgetting": [None, -0.3, 0.2]})
    assert figure.axes[0].get_ylim() == (-32, 102)  # backward transfer is negative forgetting
    older = {"stage_accuracies": [0.9, 0.75]}
    assert [line.get_label() for line in plots.accuracy_over_stream(older).axes[0].lines] == [accuracy.get_label()]


def test_results_without_an_accuracy_are_refused():
    for draw in (plots.accuracy_matrix, plots.accuracy_over_stream):
        for results in ({}, {"accuracy_matrix": [[None]], "stage_accuracies": [None]}):
            with pytest.raises(ValueError, match="no accuracy to draw"):
                draw(results)


def test_tasks_are_named_in_the_accuracy_matrix():
    names = ["birds", "trains", "trees"]
    axes = plots.accuracy_matrix({**RESULTS, "tasks": [{"name": name} for name in names]}).axes[0]
    for ticks in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert [tick.get_text() for tick in ticks] == names
    tasks = [{"name": name, "deleted": True} if name == "trains" else {"name": name} for name in names]
    assert "trains" not in texts(plots.accuracy_matrix({**RESULTS, "tasks": tasks}))


def test_the_most_confused_classes_are_named_as_they_are_written():
    figure = plots.class_confusion(REPORT, limit=3)
    figure.savefig(io.BytesIO())  # a class's name is no formula
    axes = figure.axes[0]
    np.testing.assert_allclose([bar.get_width() for bar in axes.patches], [90, 80, 70])
    assert [tick.get_text().replace("\\", "") for tick in axes.get_yticklabels()] == [
        f"c{i} $x$ $ → b" for i in range(3)
    ]
    assert "no class is taken for another" in texts(plots.class_confusion({"confused": []}))


# --- of a model ---


def test_routing_confusion_is_that_of_the_router(model_and_features):
    model, features = model_and_features
    given = {name: features[name] for name in ("plain", "warm")}
    drawn = heat(plots.routing_confusion(model, given))
    np.testing.assert_allclose(drawn.sum(axis=1), 100)
    for row, task in zip(drawn, given.values(), strict=True):
        chosen = model.route_features(task.features).expert
        np.testing.assert_allclose(row, 100 * torch.bincount(chosen, minlength=3).numpy() / 8)


def test_entropy_histograms_are_of_the_right_expert_and_of_the_others(model_and_features):
    model, features = model_and_features
    figure = plots.entropy_histograms(model, features)
    right, others = figure.axes[0].containers
    np.testing.assert_allclose([sum(bar.get_height() for bar in part) for part in (right, others)], [100, 100])
    entropies = torch.cat([model.route_features(given.features).entropies for given in features.values()])
    own = entropies[torch.arange(24), torch.arange(3).repeat_interleave(8)].numpy()
    edges = [bar.get_x() for bar in right] + [right[-1].get_x() + right[-1].get_width()]
    expected = np.histogram(own, bins=edges, weights=np.full(24, 100 / 24))[0]
    np.testing.assert_allclose([bar.get_height() for bar in right], expected)
    assert right[0].get_hatch() != others[0].get_hatch()


def test_tsne_has_a_point_for_every_image_and_a_ring_around_each_misrouted_one(model_and_features, monkeypatch):
    model, features = model_and_features
    points = plots.tsne(model, features).axes[0].collections
    assert [len(part.get_offsets()) for part in points[:3]] == [8, 8, 8]
    shapes = {str(part.get_paths()[0].vertices.round(3).tolist()) for part in points[:3]}
    assert len(shapes) == 3
    wrong = sum(int((model.route_features(f.features).expert != t).sum()) for t, f in enumerate(features.values()))
    assert len(points[3].get_offsets()) == wrong > 0
    monkeypatch.setattr(plots, "IMAGES", 12)  # at most so many, evenly spaced: four of each of the three tasks
    assert [len(part.get_offsets()) for part in plots.tsne(model, features).axes[0].collections[:3]] == [4, 4, 4]


def test_features_of_other_experts_are_refused(model_and_features):
    model, features = model_and_features
    for wrong in ({}, {"nobody": features["warm"]}, {"warm": FeatureDataset(torch.zeros(0, 32), torch.zeros(0))}):
        with pytest.raises(ValueError, match="features must hold images of the model's experts"):
            plots.routing_confusion(model, wrong)


def test_all_plots_of_a_run(model_and_features):
    model, features = model_and_features
    assert [name for name, _ in plots.of_a_run(RESULTS, model, features, REPORT)] == PLOTS
    few = {"plain": FeatureDataset(torch.zeros(3, 32), torch.zeros(3, dtype=torch.long))}
    assert "tsne" not in dict(plots.of_a_run(RESULTS, model, few, REPORT))
    assert not list(plots.of_a_run(RESULTS, model, {}, REPORT))


@pytest.mark.parametrize("module", ["matplotlib.figure", "sklearn.manifold"])
def test_what_the_plots_are_drawn_with_is_named_if_it_is_missing(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'peft-luca\[plots\]'"):
        plots.check_installed()


# --- readable ---


def lab(color):
    """A colour in CIELAB (D65), in which distances are as seen."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.array(to_xyz) @ linear / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_a_dozen_tasks_have_colours_that_can_be_told_apart():
    colors = [lab(color) for color in plots.CATEGORIES]
    assert len(colors) == 12
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(colors, 2)) > 25
    # Those with the same marker differ in grey too.
    count = len(plots.MARKERS)
    assert all(abs(colors[i][0] - colors[i + count][0]) > 9 for i in range(12 - count))
    pairs = {(i % 12, i % count) for i in range(84)}
    assert len(pairs) == 84


def test_categories_differ_in_grey_and_not_by_colour_alone():
    lightness = [luminance(color) for color in plots.COLORS]
    assert (np.diff(lightness) > 12).all()
    assert len(set(plots.MARKERS)) == len(plots.MARKERS) > len(plots.COLORS)


def test_heat_maps_rise_evenly_in_grey_and_numbers_stand_out():
    from matplotlib import colormaps

    lightness = np.array([luminance(colormaps[plots.HEAT](value)) for value in np.linspace(0, 1, 21)])
    assert (np.diff(lightness) > 2).all()
    figure = plots.accuracy_matrix(RESULTS)
    colors = heat(figure), figure.axes[0].images[0]
    for text in figure.axes[0].texts:
        column, row = text.get_position()
        cell = colors[1].cmap(colors[1].norm(colors[0][int(row), int(column)]))
        assert abs(luminance(text.get_color()) - luminance(cell)) > 40


def test_many_tasks_are_drawn_without_numbers():
    figure = plots.accuracy_matrix({"accuracy_matrix": [[0.5] * 40] * 40})
    assert not figure.axes[0].texts
    stages = plots.accuracy_over_stream({"stage_accuracies": [0.5] * 40}).axes[0].get_xticks()
    assert list(stages) == list(range(1, 41, 4))
