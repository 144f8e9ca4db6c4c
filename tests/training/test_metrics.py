"""The figures of an accuracy matrix, and the metric of the `evaluate` library that computes them."""

import json
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers import EvalPrediction

from peft_luca import ContinualAccuracy
from peft_luca.training.metrics import (
    COMPARING_STAGES,
    Accuracy,
    average_accuracy,
    backward_transfer,
    forgetting,
    last_accuracy,
    numbers,
    stage_accuracies,
    summarize,
    task_line,
)


NAN = float("nan")

# Three tasks. Task 0: learned at 0.8, best at 0.9, ends at 0.5. Task 1: learned at 0.6, ends at 0.7.
MATRIX = [[0.8, NAN, NAN], [0.9, 0.6, NAN], [0.5, 0.7, 1.0]]
COUNTS = [10, 30, 60]
KEYS = {
    "average_accuracy",
    "last_accuracy",
    "forgetting",
    "backward_transfer",
    "routing_accuracy",
    "task_known_accuracy",
    "stage_accuracies",
    "stage_forgetting",
    "per_task_accuracy",
}


@st.composite
def matrices(draw):
    """Lower triangles of accuracies, some tasks without test images."""
    tasks = draw(st.integers(1, 6))
    matrix = draw(hnp.arrays(float, (tasks, tasks), elements=st.floats(0, 1)))
    counts = draw(hnp.arrays(int, tasks, elements=st.integers(0, 50)))
    matrix[np.triu_indices(tasks, 1)] = np.nan
    matrix[:, counts == 0] = np.nan
    return matrix, counts


def test_stage_accuracies_weigh_tasks_by_their_images():
    # Stage 1: (0.9 * 10 + 0.6 * 30) / 40. Stage 2: (0.5 * 10 + 0.7 * 30 + 1.0 * 60) / 100.
    np.testing.assert_allclose(stage_accuracies(MATRIX, COUNTS), [0.8, 0.675, 0.86])
    assert average_accuracy(MATRIX, COUNTS) == pytest.approx((0.8 + 0.675 + 0.86) / 3)
    assert last_accuracy(MATRIX, COUNTS) == pytest.approx(0.86)


def test_forgetting_is_measured_from_the_best_and_positive_when_forgotten():
    assert forgetting(MATRIX) == pytest.approx(((0.9 - 0.5) + (0.6 - 0.7)) / 2)
    assert forgetting([[1.0, NAN], [0.25, 1.0]]) == 0.75


def test_backward_transfer_is_measured_from_just_learned_and_negative_when_forgotten():
    assert backward_transfer(MATRIX) == pytest.approx(((0.5 - 0.8) + (0.7 - 0.6)) / 2)
    assert backward_transfer([[1.0, NAN], [0.25, 1.0]]) == -0.75


def test_forgetting_after_each_stage():
    figures = summarize(MATRIX, COUNTS)
    assert figures["stage_forgetting"] == pytest.approx([0.0, 0.8 - 0.9, ((0.9 - 0.5) + (0.6 - 0.7)) / 2])
    assert figures["stage_forgetting"][-1] == figures["forgetting"]


def test_a_single_task_forgets_nothing():
    assert forgetting([[0.5]]) == backward_transfer([[0.5]]) == 0.0


def test_task_measured_first_at_a_later_stage():
    # Task 0 got its test images after stage 1: its first measure is its starting point.
    matrix = [[NAN, NAN, NAN], [0.8, 0.5, NAN], [0.6, 0.5, 0.5]]
    assert backward_transfer(matrix) == pytest.approx((-0.2 + 0.0) / 2)
    assert average_accuracy(matrix, [1, 1, 1]) == pytest.approx((0.65 + 1.6 / 3) / 2)


def test_deleted_expert_does_not_count_after_its_deletion():
    matrix = [[0.8, NAN], [NAN, 0.6], [NAN, 0.5]]
    assert last_accuracy(matrix, [10, 10]) == 0.5
    assert forgetting(matrix) == pytest.approx(0.1)


def test_tasks_without_test_images_change_nothing():
    matrix = np.insert(np.array(MATRIX), 1, NAN, axis=1)
    matrix = np.insert(matrix, 1, matrix[0], axis=0)  # the stage that learned the task without test images
    with_gap = summarize(matrix, [10, 0, 30, 60])
    without = summarize(MATRIX, COUNTS)
    for key in ("last_accuracy", "forgetting", "backward_transfer"):
        assert with_gap[key] == pytest.approx(without[key])
    assert with_gap["per_task_accuracy"] == [0.5, None, 0.7, 1.0]
    # A number in a column without images is not a measure.
    assert summarize([[0.5, NAN], [0.5, 0.1]], [10, 0])["per_task_accuracy"] == [0.5, None]


def test_summarize_has_the_fixed_names_and_is_valid_json():
    nothing = summarize([[NAN]], [0])
    assert set(nothing) == set(summarize(MATRIX, COUNTS)) == KEYS
    assert nothing["average_accuracy"] is nothing["last_accuracy"] is nothing["routing_accuracy"] is None
    json.dumps(nothing, allow_nan=False)


def test_summarize_weighs_routing_and_task_known_by_images():
    result = summarize(MATRIX, COUNTS, task_known=[1.0, 0.8, 1.0], routing=[0.5, NAN, 1.0])
    assert result["task_known_accuracy"] == pytest.approx(0.94)
    assert result["routing_accuracy"] == pytest.approx((5 + 60) / 70)


def test_routed_above_task_known_warns_of_a_leak():
    with pytest.warns(UserWarning, match=r"routed accuracy 0\.8600 is above .* task known 0\.5000.*leak"):
        summarize(MATRIX, COUNTS, task_known=[0.5, 0.5, 0.5])


def test_routed_equal_to_task_known_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summarize(MATRIX, COUNTS, task_known=[0.5, 0.7, 1.0])


@pytest.mark.parametrize(
    ("matrix", "counts", "match"),
    [
        ([[85.0]], [1], "fractions .* got 85.0 to 85.0; divide percentages by 100"),
        ([[-0.1]], [1], "fractions"),
        ([0.5], [1], r"shape \(stages, tasks\), got \(1,\)"),
        (np.empty((0, 0)), [], r"got \(0, 0\)"),
        ([[0.5]], [1, 2], "counts must be the test images of 1 tasks"),
        ([[0.5]], [-1], "none negative"),
    ],
)
def test_bad_matrices_are_refused(matrix, counts, match):
    with pytest.raises(ValueError, match=match):
        stage_accuracies(matrix, counts)


def test_bad_task_known_is_refused():
    with pytest.raises(ValueError, match=r"task_known must have one value for each of 3 tasks, got shape \(2,\)"):
        summarize(MATRIX, COUNTS, task_known=[0.5, 0.5])


@given(matrices())
def test_forgetting_after_a_stage_is_that_of_the_stages_so_far(case):
    matrix, counts = case
    measured = np.where(np.array(counts) > 0, matrix, NAN)
    expected = [forgetting(measured[: stage + 1]) for stage in range(len(measured))]
    assert summarize(matrix, counts)["stage_forgetting"] == expected


@given(matrices())
def test_figures_stay_in_bounds(case):
    matrix, counts = case
    result = summarize(matrix, counts)
    for key in ("average_accuracy", "last_accuracy"):
        assert result[key] is None or 0 <= result[key] <= 1 + 1e-12
    # Best-so-far is at least just-learned, so forgetting is at least minus the backward transfer.
    assert -1 <= -result["backward_transfer"] <= result["forgetting"] + 1e-12 <= 1 + 2e-12


@given(matrices(), st.randoms(use_true_random=False))
def test_numbering_of_tasks_does_not_matter(case, random):
    matrix, counts = case
    order = list(range(len(counts)))
    random.shuffle(order)
    assert forgetting(matrix[:, order]) == pytest.approx(forgetting(matrix))
    assert backward_transfer(matrix[:, order]) == pytest.approx(backward_transfer(matrix))
    np.testing.assert_allclose(stage_accuracies(matrix[:, order], counts[order]), stage_accuracies(matrix, counts))


# Two tasks of two test images each, measured after two stages.
ROWS = {
    "predictions": [0, 1, 0, 0, 2, 3],
    "references": [0, 1, 0, 1, 2, 2],
    "task": [0, 0, 0, 0, 1, 1],
    "stage": [0, 0, 1, 1, 1, 1],
}
ROUTING = {"experts": [0, 0, 0, 1, 1, 1], "task_known_predictions": [0, 1, 0, 1, 2, 2]}


def test_metric_in_one_call():
    result = ContinualAccuracy().compute(**ROWS, **ROUTING)
    expected = summarize([[1.0, NAN], [0.5, 0.5]], [2, 2], task_known=[1.0, 1.0], routing=[0.5, 1.0])
    assert result == {**expected, "per_task_known_accuracy": [1.0, 1.0], "per_task_routing_accuracy": [0.5, 1.0]}
    assert result["routing_accuracy"] == 0.75


def test_metric_by_batches_rows_and_arrays_is_the_same():
    expected = ContinualAccuracy().compute(**ROWS, **ROUTING)
    rows = {**ROWS, **ROUTING}
    metric = ContinualAccuracy()
    metric.add_batch(**{name: np.array(column[:3], dtype=np.int32) for name, column in rows.items()})
    metric.add_batch(**{name: column[3:5] for name, column in rows.items()})
    singular = {"predictions": "prediction", "references": "reference"}
    metric.add(**{singular.get(name, name): column[5] for name, column in rows.items()})
    assert metric.compute() == expected


def test_metric_without_optional_columns_and_used_again():
    metric = ContinualAccuracy()
    for _ in range(2):
        result = metric.compute(**ROWS)
        assert result["routing_accuracy"] is result["task_known_accuracy"] is None
        assert result["per_task_known_accuracy"] is None
        assert result["forgetting"] == 0.5


def test_optional_columns_at_the_last_stage_are_enough():
    metric = ContinualAccuracy()
    metric.add_batch(**{name: column[:2] for name, column in ROWS.items()})
    metric.add_batch(**{name: column[2:] for name, column in ROWS.items()}, experts=ROUTING["experts"][2:])
    assert metric.compute()["routing_accuracy"] == 0.75


def test_metric_accepts_tensors():
    torch = pytest.importorskip("torch")
    result = ContinualAccuracy().compute(**{name: torch.tensor(column) for name, column in ROWS.items()})
    assert result["last_accuracy"] == 0.5


def test_metric_writes_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    ContinualAccuracy().compute(**ROWS)
    assert list(tmp_path.iterdir()) == []
    assert ContinualAccuracy().data_dir == ""


def test_metric_on_disk_cleans_up_after_itself(tmp_path):
    result = ContinualAccuracy(keep_in_memory=False, cache_dir=str(tmp_path)).compute(**ROWS)
    assert result["last_accuracy"] == 0.5
    assert not list(tmp_path.rglob("*.arrow"))


def test_metric_is_told_what_is_missing_or_wrong():
    metric = ContinualAccuracy()
    with pytest.raises(ValueError, match="there are no rows"):
        metric.compute()
    with pytest.raises(ValueError, match="stage is missing; every row needs"):
        metric.compute(predictions=[0], references=[0], task=[0])
    with pytest.raises(ValueError, match=r"predictions must be 1 ints.* got float64 .*logits.argmax"):
        metric.add_batch(predictions=[0.7], references=[0], task=[0], stage=[0])
    with pytest.raises(ValueError, match=r"predictions must be .* shape \(1, 2\)"):
        metric.add_batch(predictions=[[0, 1]], references=[0], task=[0], stage=[0])
    with pytest.raises(ValueError, match=r"task must be 2 ints, one per prediction, got int64 of shape \(1,\)"):
        metric.add_batch(predictions=[0, 1], references=[0, 1], task=[0], stage=[0, 0])
    with pytest.raises(ValueError, match="Bad inputs"):
        metric.add_batch(predictions=[0], references=[0], task=[0], stage=[0], expert=[0])
    assert metric.compute(predictions=[0], references=[0], task=[0], stage=[0])["last_accuracy"] == 1.0


def test_metric_refuses_a_stage_that_measured_only_part_of_a_task():
    with pytest.raises(ValueError, match="task 0 has 1 test images at stage 1 but 2 at another"):
        ContinualAccuracy().compute(predictions=[0] * 3, references=[0] * 3, task=[0] * 3, stage=[0, 0, 1])


def test_metric_refuses_half_given_experts():
    metric = ContinualAccuracy()
    metric.add(prediction=0, reference=0, task=0, stage=0, experts=0)
    metric.add(prediction=0, reference=0, task=0, stage=0)
    with pytest.raises(ValueError, match="experts is given for 1 of 2 rows"):
        metric.compute()


def test_optional_columns_are_read_at_the_last_of_three_stages():
    rows = {"predictions": [0] * 6, "references": [0] * 6, "task": [0, 0, 1, 0, 1, 2], "stage": [0, 1, 1, 2, 2, 2]}
    result = ContinualAccuracy().compute(**rows, experts=[9, 9, 9, 0, 1, 0], task_known_predictions=[9, 9, 9, 0, 1, 0])
    assert result["per_task_routing_accuracy"] == [1, 1, 0]
    assert result["per_task_known_accuracy"] == [1, 0, 1]


def test_figures_that_compare_stages_are_among_those_of_a_run():
    of_the_last_stage = {"last_accuracy", "routing_accuracy", "task_known_accuracy", "per_task_accuracy"}
    assert set(COMPARING_STAGES) == (KEYS | {"task_known_forgetting"}) - of_the_last_stage


def test_numbers_are_the_figures_that_logs_can_hold():
    assert numbers({"a": 1, "b": 0.5, "c": None, "d": [1.0], "e": "x"}) == {"a": 1, "b": 0.5}


# --- a line for each task, and the accuracy of one expert ---


def test_the_line_of_a_task():
    record = {"name": "birds", "classes": ["a", "b", "c", "d"], "seconds": 1.25}
    figures = {"tasks": [{}, record], "last_accuracy": None}
    assert task_line(3, figures, 8) == "task 2/3 birds (a, b, c, d), 1.2 s: no test images"
    record["classes"].append("e")
    figures |= {"last_accuracy": 0.5, "entropy_accuracy": 0.25, "task_known_accuracy": 0.75, "routing_accuracy": 0.625}
    assert task_line(3, figures, 8) == (
        "task 2/3 birds (a, b, c, d, …), 1.2 s: accuracy 0.500 over 8 classes (0.250 by entropy), "
        "0.750 with the task known, right expert 0.625"
    )


def test_accuracy_of_logits_of_predictions_and_of_batches():
    logits, labels = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]), np.array([1, 1, 1])
    assert Accuracy()(EvalPrediction((logits, None), labels)) == {"accuracy": 2 / 3}
    assert Accuracy()(EvalPrediction(logits.argmax(1), labels)) == {"accuracy": 2 / 3}
    assert Accuracy()(EvalPrediction(logits[:1], labels[:1])) == {"accuracy": 1.0}
    assert Accuracy()(EvalPrediction(logits[:0], labels[:0])) == {"accuracy": 0.0}
    batches = Accuracy()
    assert batches(EvalPrediction(torch.tensor(logits[:2]), torch.tensor(labels[:2])), compute_result=False) == {}
    assert batches(EvalPrediction(torch.tensor(logits[2:]), torch.tensor(labels[2:]))) == {"accuracy": 2 / 3}
    assert batches(EvalPrediction(logits[:1], labels[:1])) == {"accuracy": 1.0}  # it begins anew
