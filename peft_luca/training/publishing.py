"""Pushing to the Hub and model cards, with the arguments of `Trainer`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, Trainer
from transformers.utils import logging

from ..hub.model_card import CARD_NAME, CardFacts, make_card
from ..tuner.model import LucaModel, tuner_of
from ..utils import atomic_write, explain_write_errors
from .batches import ExpertProgressCallback
from .metrics import Accuracy


logger = logging.get_logger(__name__)


class PublishingTrainer(Trainer):
    """
    A `Trainer` that measures accuracy, shows the expert's progress, and whose `push_to_hub` and `create_model_card`
    publish experts. A subclass defines `_push`, and the one `expert` that it publishes, or the `_results` of its run.
    """

    # What Trainer declares for every kind of model and data, and what this one has.
    model: Any
    args: Any
    data_collator: Any
    processing_class: Any
    expert: str | None = None
    _push: Callable[..., Any]
    _pushing: Future[Any] | None = None  # in the background

    @property
    def tuner(self) -> LucaModel:
        """The model's LuCA tuner, once there is an expert."""
        return tuner_of(self.model)

    def _results(self) -> dict[str, Any] | None:
        return None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"compute_metrics": Accuracy(), **kwargs})
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(ExpertProgressCallback)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a search over one task makes an [`ExpertTrainer`] for each trial (see the training page)."""
        reason = "a trial needs an expert of its own, whose reduction and scale are of LucaConfig"
        raise ValueError(f"hyperparameter_search cannot be used: {reason}. Make a model and an ExpertTrainer in each.")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        Pushes the trained experts, with their card, to `args.hub_model_id`, by default a repository named as the
        output folder. Takes the arguments of [`~transformers.Trainer.push_to_hub`] and `create_model_card`. Returns
        [`~huggingface_hub.CommitInfo`] or, with `blocking=False`, a future of it.
        """
        tuner_of(self.model)  # raises before anything is sent if there is no expert
        card = _card_facts(**kwargs)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        if not self.is_world_process_zero():
            return None
        card |= {"revision": revision or self.args.hub_revision, "token": token or self.args.hub_token}
        private = self.args.hub_private_repo if private is None else private
        return self._push(str(self.hub_model_id), blocking, private=private, commit_message=commit_message, **card)

    def _push_in_background(self, commit_message: str) -> None:
        """Pushes unless an earlier push is still running: the next one carries what is pushed here too."""
        if self._pushing is not None and not self._pushing.done():
            return
        error = None if self._pushing is None else self._pushing.exception()
        try:
            self._pushing = self.push_to_hub(commit_message, blocking=False)
        except Exception as failure:  # whatever the network does, the run goes on
            error = failure
        if error is not None:
            logger.warning(f"Pushing to the Hub failed, and is tried again after the next task: {error!r}")

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """
        Writes the card of the experts into the output folder; `push_to_hub` makes its own. Takes the arguments of
        [`~transformers.Trainer.create_model_card`], and `base_model` and `datasets`. The card has no place for `tasks`
        and `dataset_args`.
        """
        facts = CardFacts(results=self._results(), **_card_facts(*args, **kwargs))
        if self.is_world_process_zero():
            name = self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            path = Path(self.args.output_dir) / CARD_NAME
            with explain_write_errors(path), atomic_write(path) as temporary:
                temporary.write_text(make_card(self.tuner, name, facts, expert=self.expert), encoding="utf-8")


def _card_facts(*args: Any, base_model: Any = None, datasets: Any = None, **kwargs: Any) -> dict[str, Any]:
    """The arguments of [`~transformers.Trainer.create_model_card`], as [`CardFacts`] takes them."""
    given = inspect.signature(Trainer.create_model_card).bind(None, *args, **kwargs).arguments
    data = {name: given[name] for name in ("language", "tags", "model_name") if given.get(name)}
    if isinstance(data.get("tags"), str):
        data["tags"] = [data["tags"]]
    datasets = datasets or given.get("dataset_tags") or given.get("dataset")
    base_model = base_model or given.get("finetuned_from")
    return {"license": given.get("license"), "base_model": base_model, "datasets": datasets, "card_data": data or None}
