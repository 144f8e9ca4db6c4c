"""Pushing to the Hub and model cards, with the arguments of `Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer

from ..hub.model_card import CARD_NAME, CardFacts, make_card
from ..tuner.model import tuner_of
from ..utils import explain_write_errors


TASK = "image-classification"
Names = str | list[str] | None


class PublishingTrainer(Trainer):
    """
    Publishes experts, with their card and no pickled files. A subclass defines `_push`, and the one `expert` that it
    publishes, or the `_results` of its run.
    """

    model: Any
    args: Any
    expert: str | None = None

    def _push(self, repo_id: str, blocking: bool, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _results(self) -> dict[str, Any] | None:
        return None

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
        output folder; see [`push_expert`] and [`push_experts`]. `token`, `revision` (a branch) and `private` are
        those of `args` by default. `kwargs` are arguments of `create_model_card`.

        Returns:
            [`~huggingface_hub.CommitInfo`], or a future of it. `None` on all processes but the first.
        """
        tuner_of(self.model)  # raises before anything is sent if there is no expert
        card = _card_arguments(**kwargs)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        if not self.is_world_process_zero():
            return None
        return self._push(
            str(self.hub_model_id),
            blocking,
            private=self.args.hub_private_repo if private is None else private,
            revision=revision or self.args.hub_revision,
            token=token or self.args.hub_token,
            commit_message=commit_message,
            **card,
        )

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """
        Writes the card of the experts into the output folder. Takes what [`~transformers.Trainer.create_model_card`]
        does; `base_model` and `datasets` are other names of `finetuned_from` and `dataset`.
        """
        card = _card_arguments(*args, **kwargs)
        if self.is_world_process_zero():
            name = self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            path = Path(self.args.output_dir) / CARD_NAME
            with explain_write_errors(path):
                facts = CardFacts(results=self._results(), **card)
                path.write_text(make_card(tuner_of(self.model), name, facts, expert=self.expert), encoding="utf-8")


def _card_arguments(
    language: str | None = None,
    license: str | None = None,
    tags: Names = None,
    model_name: str | None = None,
    finetuned_from: str | None = None,
    tasks: Names = None,
    dataset_tags: Names = None,
    dataset: Names = None,
    dataset_args: Names = None,
    base_model: str | None = None,
    datasets: Names = None,
) -> dict[str, Any]:
    """The arguments of [`~transformers.Trainer.create_model_card`], as [`CardFacts`] takes them."""
    wrong = [task for task in ([tasks] if isinstance(tasks, str) else tasks or ()) if task != TASK]
    if wrong:
        raise ValueError(f"tasks must be {TASK!r}, which is what LuCA experts do, got {wrong[0]!r}.")
    data = {"language": language, "tags": [tags] if isinstance(tags, str) else tags, "model_name": model_name}
    return {
        "license": license,
        "base_model": base_model or finetuned_from,
        "datasets": datasets or dataset_tags or dataset,
        "card_data": {name: value for name, value in data.items() if value} or None,
    }
