"""Pictures: drawn from what they claim to show, and readable without colour."""

import json
import re
import sys

import numpy as np
import pytest
import torch
from helpers import NAMES, files_in, make_model, make_splits, make_stream, make_trainer

from peft_luca import FeatureDataset, LucaConfig, TaskStream


plots = pytest.importorskip("peft_luca.visualization")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

RESULTS = {
    "accuracy_matrix": [[0.9, None, None], [0.8, 0.7, None], [0.5, 0.7, 0.6]],
    "tasks": [{"name": f"task_{t}", "test_images": 10} for t in range(3)],
}
PICTURES = {
    "accuracy_matrix", "accuracy_over_stream", "calibrator_gates", "entropy_histograms", "expert_overlap",
    "misrouted_images", "routing_confusion", "tsne",
}  # fmt: skip


@pytest.fixture(scope="module")
def looked_at():
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


# ---- of results -----------------------------------------------------------------------------------------------------


def test_the_accuracy_matrix_is_that_of_the_results():
    figure = plots.accuracy_matrix(RESULTS)
    drawn = np.ma.filled(heat(figure), np.nan)
    np.testing.assert_allclose(drawn, 100 * np.array(RESULTS["accuracy_matrix"], dtype=float))
    assert {"90", "50", "60"} <= set(texts(figure))
    assert "nan" not in texts(figure)


def test_accuracy_and_forgetting_over_the_stream():
    accuracy, forgetting = plots.accuracy_over_stream(RESULTS).axes[0].lines
    np.testing.assert_allclose(accuracy.get_ydata(), [90, 75, 60])
    np.testing.assert_allclose(forgetting.get_ydata(), [0, 10, 20])
    assert accuracy.get_marker() != forgetting.get_marker()
    assert accuracy.get_linestyle() != forgetting.get_linestyle()


@pytest.mark.parametrize("results", [{}, {"accuracy_matrix": []}, {"accuracy_matrix": [[None]], "tasks": []}])
def test_nothing_measured_is_said(results):
    for draw in (plots.accuracy_matrix, plots.accuracy_over_stream):
        with pytest.raises(ValueError, match="no accuracy to draw"):
            draw(results)


def test_a_forgotten_task_leaves_a_gap():
    matrix = [[0.9, None], [None, 0.7]]
    results = {"accuracy_matrix": matrix, "tasks": RESULTS["tasks"][:2]}
    np.testing.assert_allclose(plots.accuracy_over_stream(results).axes[0].lines[0].get_ydata(), [90, 70])


# ---- of a model -----------------------------------------------------------------------------------------------------


def test_who_answered_whom_is_what_the_router_says(looked_at):
    model, features = looked_at
    drawn = heat(plots.routing_confusion(model, features))
    np.testing.assert_allclose(drawn.sum(axis=1), 100)
    for row, given in zip(drawn, features.values(), strict=True):
        chosen = model.base_model.layer.route(given.features).expert
        np.testing.assert_allclose(row, 100 * torch.bincount(chosen, minlength=3).numpy() / 8)


@pytest.mark.parametrize("router", ["entropy", "max_prob"])
def test_entropies_of_right_and_wrong_experts(looked_at, router):
    model, features = looked_at
    model.set_router(router)
    figure = plots.entropy_histograms(model, features)
    heights = [sum(bar.get_height() for bar in container) for container in figure.axes[0].containers]
    np.testing.assert_allclose(heights, [100, 100])
    hatches = {container[0].get_hatch() for container in figure.axes[0].containers}
    assert len(hatches) == 2
    model.set_router("entropy")


def test_gates_are_means_of_each_class(looked_at):
    model, features = looked_at
    drawn = heat(plots.calibrator_gates(model, features))
    assert drawn.shape == (5, 32)
    gates = model.base_model.layer.gates(features["cold"].features, "cold").detach()
    expected = gates[features["cold"].labels == 1].mean(dim=0)
    np.testing.assert_allclose(np.sort(drawn[3]), np.sort(expected.numpy()), rtol=1e-5)


def test_gates_times_the_adapted_features_are_luca(looked_at):
    model, features = looked_at
    layer, z = model.base_model.layer, features["warm"].features
    adapted = layer._adapt(layer.standardise(z, "warm"), "warm")
    torch.testing.assert_close(layer.gates(z, "warm") * adapted, layer.luca(z, "warm"))


def test_experts_without_a_calibrator_have_no_gates():
    model = make_model({"warm": LucaConfig(classes=["red"], arrangement="adapter")})
    features = {"warm": FeatureDataset(torch.randn(4, 32), torch.zeros(4, dtype=torch.long))}
    with pytest.raises(ValueError, match="no expert has a calibrator"):
        plots.calibrator_gates(model, features)
    drawn = dict(plots.of_a_run({"accuracy_matrix": [[1.0]], "tasks": RESULTS["tasks"][:1]}, model, features, {}))
    assert "calibrator_gates" not in drawn


def test_sparsity_and_overlap_are_those_of_the_report(looked_at):
    from peft_luca.training.sparsity import overlap_report

    model, _ = looked_at
    figure = plots.expert_overlap(model, tolerance=0.3)
    report = overlap_report(model.base_model.layer, tolerance=0.3)
    bars = [bar.get_width() for bar in figure.axes[0].patches]
    np.testing.assert_allclose(bars, [100 * value for value in report["sparsity"].values()])
    overlap = figure.axes[1].images[0].get_array()
    np.testing.assert_allclose(overlap[np.tril_indices(3, -1)].mean(), 100 * report["overlap"])


def test_experts_of_other_shapes_share_nothing_that_could_be_drawn():
    model = make_model({"one": LucaConfig(classes=["x"]), "two": LucaConfig(classes=["y"], adapter_width=5)})
    overlap = plots.expert_overlap(model).axes[1].images[0].get_array()
    assert np.isnan(np.ma.filled(overlap, np.nan)[0, 1])


def test_tsne_has_a_point_for_every_image(looked_at):
    model, features = looked_at
    points = plots.tsne(model, features).axes[0].collections
    assert [len(part.get_offsets()) for part in points[:3]] == [8, 8, 8]
    shapes = {str(part.get_paths()[0].vertices.round(3).tolist()) for part in points[:3]}
    assert len(shapes) == 3
    # A ring around each image that another expert answered.
    wrong = sum(
        int((model.base_model.layer.route(given.features).expert != t).sum())
        for t, given in enumerate(features.values())
    )
    assert len(points[3].get_offsets()) == wrong > 0


def test_misrouted_images_say_what_every_expert_said(looked_at):
    from PIL import Image

    model, features = looked_at
    images = {name: [Image.new("RGB", (8, 8), (10 * i, 0, 0)) for i in range(8)] for name in features}
    figure = plots.misrouted_images(model, features, images, limit=2)
    pictures, bars = figure.axes[::2], figure.axes[1::2]
    assert len(pictures) == len(bars) == 2
    assert all(len(axes.patches) == 3 for axes in bars)
    # The first row is the surest wrong answer, its picture the image that was answered.
    label, own, answer = re.fullmatch(r"(\w+) \((\w+)\), answered (\w+)", pictures[0].get_title()).groups()
    row = int(pictures[0].images[0].get_array()[0, 0, 0]) // 10
    routed = model.base_model.layer.route(features[own].features[row : row + 1])
    assert list(model.experts)[int(routed.expert[0])] != own
    assert label in model.experts[own]
    assert answer == model.classes[int(routed.logits.argmax())] != label
    entropies = routed.entropies[0].detach().numpy()
    np.testing.assert_allclose([bar.get_width() for bar in bars[0].patches], entropies, rtol=1e-4)
    colors = [bar.get_facecolor() for bar in bars[0].patches]
    assert [colors.count(color) for color in colors].index(1) == int(routed.expert[0])


def test_nothing_misrouted_is_said():
    model = make_model({"warm": ["red", "blue"]})
    features = {"warm": FeatureDataset(torch.randn(4, 32), torch.zeros(4, dtype=torch.long))}
    assert "every image was answered" in " ".join(texts(plots.misrouted_images(model, features, {})))


def test_features_of_strangers_are_refused(looked_at):
    model, features = looked_at
    for wrong in ({}, {"nobody": features["warm"]}, {"warm": FeatureDataset(torch.zeros(0, 32), torch.zeros(0))}):
        with pytest.raises(ValueError, match="features must hold images of the model's experts"):
            plots.routing_confusion(model, wrong)


# ---- readable -------------------------------------------------------------------------------------------------------


def test_categories_differ_in_grey_and_not_by_colour_alone():
    lightness = [luminance(color) for color in plots.COLORS]
    assert (np.diff(lightness) > 12).all()
    assert len(set(plots.MARKERS)) == len(plots.MARKERS) > len(plots.COLORS)
    pairs = {(i % len(plots.COLORS), i % len(plots.MARKERS)) for i in range(42)}
    assert len(pairs) == 42


def test_heat_maps_rise_evenly_in_grey():
    from matplotlib import colormaps

    lightness = np.array([luminance(colormaps[plots.HEAT](value)) for value in np.linspace(0, 1, 21)])
    assert (np.diff(lightness) > 2).all()


def test_numbers_stand_out_from_their_cells():
    figure = plots.accuracy_matrix(RESULTS)
    colors = heat(figure), figure.axes[0].images[0]
    for text in figure.axes[0].texts:
        column, row = text.get_position()
        cell = colors[1].cmap(colors[1].norm(colors[0][int(row), int(column)]))
        assert abs(luminance(text.get_color()) - luminance(cell)) > 40


def test_many_tasks_are_drawn_without_numbers():
    tasks = [{"name": f"t{t}", "test_images": 1} for t in range(40)]
    figure = plots.accuracy_matrix({"accuracy_matrix": [[0.5] * 40] * 40, "tasks": tasks})
    assert not figure.axes[0].texts


# ---- by the trainer -------------------------------------------------------------------------------------------------


def test_the_trainer_writes_them_when_asked(out):
    trainer = make_trainer(out, plots=True, report_to="tensorboard", num_train_epochs=1)
    trainer.train()
    assert files_in(out / "plots") == sorted(f"{name}.png" for name in PICTURES)
    assert all((out / "plots" / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in PICTURES)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = set()
    for folder in (out / "runs").iterdir():
        events = EventAccumulator(str(folder))
        events.Reload()
        tags |= set(events.Tags()["images"])
    assert tags == {f"plots/{name}" for name in PICTURES}


def test_the_trainer_writes_none_when_not_asked(out):
    trainer = make_trainer(out, stream=make_stream(NAMES[:2], names=NAMES[:2]), num_train_epochs=1)
    trainer.train()
    assert not (out / "plots").exists()
    assert {file.stem for file in trainer.save_plots()} == PICTURES


def test_pictures_leave_the_run_as_it_was(out):
    trainer = make_trainer(out, stream=make_stream(NAMES[:4], names=NAMES[:4]), num_train_epochs=1)
    trainer.train()
    before = json.dumps(trainer.results()), {k: v.clone() for k, v in trainer.model.state_dict().items()}
    trainer.save_plots()
    assert json.dumps(trainer.results()) == before[0]
    assert all(torch.equal(v, before[1][k]) for k, v in trainer.model.state_dict().items())


def test_without_test_images_there_is_only_the_overlap(out):
    stream = TaskStream.from_tasks([make_splits(NAMES[:2])["train"]])
    trainer = make_trainer(out, stream=stream, num_train_epochs=1, plots=True)
    trainer.train()
    assert files_in(out / "plots") == ["expert_overlap.png"]


def test_a_task_of_that_name_is_refused(out):
    stream = TaskStream.from_tasks({"plots": make_splits(NAMES[:2])})
    with pytest.raises(ValueError, match="a task cannot be called 'plots'"):
        make_trainer(out, stream=stream, plots=True)


@pytest.mark.parametrize("module", ["matplotlib.figure", "sklearn.manifold"])
def test_without_what_they_are_drawn_with_nothing_begins(out, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'peft-luca\[plots\]'"):
        make_trainer(out, plots=True)
    assert not out.exists()
