"""The global label space, and where the rows of the experts land in it."""

import pytest
import torch

from peft_luca.routing import LabelSpace


STREAMS = {
    "one expert": {"t": ["a", "b", "c"]},
    "new classes": {"t": ["a", "b"], "u": ["c", "d", "e"], "v": ["f"]},
    "shared classes": {"t": ["a", "b"], "u": ["c", "b", "a"], "v": ["d", "a"]},
    "the same classes in another order": {"t": ["a", "b"], "u": ["b", "a"]},
    "one class in all": {"t": ["a"], "u": ["a"]},
    "unequal": {"t": [f"x{i}" for i in range(11)], "u": ["b"], "v": ["c", "x3"]},
}


@pytest.mark.parametrize("stream", STREAMS)
def test_a_class_is_scored_by_the_experts_own_row_or_by_the_best_of_the_others(stream):
    experts = STREAMS[stream]
    space = LabelSpace(experts)
    rows = [(expert, name) for expert, classes in experts.items() for name in classes]
    assert space.classes == tuple(dict.fromkeys(name for _, name in rows))
    assert space.rows == len(rows)
    assert [space.classes[i] for i in space.row_class] == [name for _, name in rows]
    cosines = torch.rand(5, len(rows), generator=torch.Generator().manual_seed(0)) * 2 - 1
    for expert, classes in experts.items():
        assert [space.classes[i] for i in space.own[expert]] == classes
        assert [rows[i] for i in space.own_rows[expert]] == [(expert, name) for name in classes]
        wanted = []
        for name in space.classes:
            having = [i for i, row in enumerate(rows) if row == (expert, name)]
            having = having or [i for i, row in enumerate(rows) if row[1] == name]
            wanted.append(cosines[:, having].amax(dim=1))
        combined = space.combine_rows(cosines, expert)
        assert torch.equal(combined, torch.stack(wanted, dim=1))
        assert space.combine_rows(cosines[:0], expert).shape == (0, len(space.classes))


def test_gradients_reach_the_rows_that_were_taken():
    space = LabelSpace({"t": ["a"], "u": ["a"], "v": ["b"]})
    cosines = torch.tensor([[0.1, 0.9, 0.5]], requires_grad=True)
    space.combine_rows(cosines, "v").sum().backward()
    assert cosines.grad.tolist() == [[0.0, 1.0, 1.0]]
    cosines.grad = None
    space.combine_rows(cosines, "t").sum().backward()
    assert cosines.grad.tolist() == [[1.0, 0.0, 1.0]]
