"""`LabelSpace`: the class names of all experts in one global order, and where each expert's rows land in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class LabelSpace:
    """
    The classes of a set of experts, given by name in the order of their rows. Experts that share a class name share
    the class.

    Attributes:
        classes (`tuple[str, ...]`): The C class names, in order of first appearance.
        own (`dict[str, torch.Tensor]`): Expert → global ids of its classes, `(K,)`.
        own_rows (`dict[str, torch.Tensor]`): Expert → positions of its rows among the rows of all experts, `(K,)`.
        row_class (`torch.Tensor` of shape `(rows,)`): Global id of each row.
        part_class, part_expert (`torch.Tensor` of shape `(rows,)`):
            The rows in the order of the experts' names: global id of the class, and position of its expert.
    """

    def __init__(self, experts: Mapping[str, Sequence[str]], device: torch.device | None = None) -> None:
        ids: dict[str, int] = {}
        for classes in experts.values():
            for name in classes:
                ids.setdefault(name, len(ids))
        sizes = {expert: len(classes) for expert, classes in experts.items()}
        row_class = torch.tensor([ids[name] for classes in experts.values() for name in classes])
        self.device = device
        self.classes = tuple(ids)
        self.rows = len(row_class)
        self.row_class = row_class.to(device)
        self.own = dict(zip(sizes, self.row_class.split(list(sizes.values())), strict=True))
        rows = torch.arange(self.rows, device=device).split(list(sizes.values()))
        self.own_rows = dict(zip(sizes, rows, strict=True))
        names, place = sorted(sizes), {name: i for i, name in enumerate(sizes)}
        self.part_class = torch.cat([self.own[name] for name in names])
        places, counts = torch.tensor([place[name] for name in names]), torch.tensor([sizes[name] for name in names])
        self.part_expert = places.repeat_interleave(counts).to(device)

    def combine_rows(self, cosines: Tensor, expert: str) -> Tensor:
        """
        One expert's cosines with the rows of all experts, `(batch, rows)` → with all classes, `(batch, C)`: its own
        row for a class that it has, otherwise the best over the experts that have the class.
        """
        if self.rows == len(self.classes):  # no class is shared, and classes are in the order of the rows
            return cosines
        row_class = self.row_class.expand(cosines.shape[0], -1)
        best = cosines.new_full((cosines.shape[0], len(self.classes)), -2.0)  # below every cosine
        best = best.scatter_reduce(1, row_class, cosines, reduce="amax")
        return best.index_copy(1, self.own[expert], cosines.index_select(1, self.own_rows[expert]))
