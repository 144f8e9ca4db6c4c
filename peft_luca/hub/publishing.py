"""Publishing experts on the Hub: pushing one or a collection of them, each push in one commit, and finding them."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi, ModelInfo
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from peft import PeftModel
from peft.utils import CONFIG_NAME
from transformers.utils import logging

from ..tuner.model import LucaModel, tuner_of
from ..utils import check_classes, list_names, pluralize, write_json
from . import model_card
from .model_card import CARD_NAME, PICTURE_NAME, TAGS, CardFacts
from .saving import EXPERT_FILES, save_expert, save_experts
from .validation import MANIFEST_NAME, read_json, read_manifest


logger = logging.get_logger(__name__)

RESULTS_NAME = "results.json"


def push_expert(
    model: PeftModel,
    name: str,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    datasets: str | Sequence[str] | None = None,
    results: Mapping[str, Any] | None = None,
    card_data: Mapping[str, Any] | None = None,
    statistics: bool = True,
) -> CommitInfo:
    """
    Pushes one expert to a Hub repository of its own: a PEFT adapter at its root, and its card, in one commit. Pushing
    the same again makes no commit.

    Args:
        model ([`~peft.PeftModel`]), name (`str`): The model, and its expert.
        repo_id (`str`): The repository. It is created if it does not exist.
        private (`bool`, *optional*): Whether a new repository is private; by default as the owner's settings say.
        revision (`str`, *optional*): Branch to push to. It is created if it does not exist.
        token (`str` or `bool`, *optional*): Hub token with the right to write.
        commit_message (`str`, *optional*): By default one that says what is pushed.
        base_model (`str`, *optional*):
            Hub id of the backbone, by default where the model was loaded from, if that is on the Hub.
        license (`str`, *optional*): Licence of the expert, for the card.
        datasets (`str` or `Sequence[str]`, *optional*): Hub ids of the training data, for the card.
        results (`dict`, *optional*): What a run's `results.json` holds, for the card.
        card_data (`dict`, *optional*): More metadata for the card, such as `language`, `tags` or `model_name`.
        statistics (`bool`, *optional*, defaults to `True`): Push its statistics too; see [`save_expert`].

    Raises:
        RuntimeError: somebody else pushed to the repository at the same time, twice.
    """
    api, tuner = HfApi(token=token), tuner_of(model)
    with tempfile.TemporaryDirectory() as staging:
        folder = Path(staging)
        save_expert(model, name, folder, statistics=statistics)
        facts = CardFacts(_base_model(api, tuner, base_model), license, datasets, results, card_data)
        _set_base_model(folder, facts.base_model)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        card = model_card.make_card(tuner, repo_id, facts, expert=name)
        (folder / CARD_NAME).write_text(card, encoding="utf-8")
        return _mirror(api, folder, repo_id, revision, commit_message or f"Push expert {name}")


def push_experts(
    model: PeftModel,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    datasets: str | Sequence[str] | None = None,
    results: Mapping[str, Any] | None = None,
    card_data: Mapping[str, Any] | None = None,
    processing_class: Any = None,
    statistics: bool = True,
    blocking: bool = True,
) -> CommitInfo | Future[CommitInfo]:
    """
    Pushes all experts of a model to a Hub repository as a collection: one PEFT adapter per subfolder, `experts.json`
    with their order, classes, fingerprint, metrics and router, and the card, in one commit. Experts from an earlier
    push that the model no longer has are deleted there. Pushing the same again makes no commit.

    Args:
        results (`dict`, *optional*): What a run's `results.json` holds; it is pushed too, and shown in the card.
        processing_class (`BaseImageProcessor`, *optional*): The backbone's image processor, to be pushed too.
        blocking (`bool`, *optional*, defaults to `True`):
            `False` uploads the model as it is now in the background, and returns a future of the commit.
        model, repo_id, private, revision, token, commit_message, base_model, license, datasets, card_data, statistics:
            See [`push_expert`].

    """
    api, tuner = HfApi(token=token), tuner_of(model)
    message = commit_message or f"Push {pluralize(len(tuner.experts), 'expert')}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_experts(model, folder, statistics=statistics)
        facts = CardFacts(_base_model(api, tuner, base_model), license, datasets, results, card_data)
        _set_base_model(folder, facts.base_model)
        if processing_class is not None:
            processing_class.save_pretrained(str(folder))
        if results is not None:
            _add_metrics(folder / MANIFEST_NAME, results)
            write_json(folder / RESULTS_NAME, results)
        picture = model_card.draw_accuracy_matrix(results or {}, folder / PICTURE_NAME)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        card = model_card.make_card(tuner, repo_id, facts, picture=picture)
        (folder / CARD_NAME).write_text(card, encoding="utf-8")
        staging = stack.pop_all()

    def upload() -> CommitInfo:
        with staging:
            return _mirror(api, folder, repo_id, revision, message)

    return upload() if blocking else api.run_as_future(upload)


def list_experts(
    *,
    author: str | None = None,
    base_model: str | None = None,
    classes: Sequence[str] = (),
    token: str | bool | None = None,
) -> list[ModelInfo]:
    """
    Lists experts and collections on the Hub, by the tags of their cards.

    Args:
        author (`str`, *optional*): User or organisation.
        base_model (`str`, *optional*): Hub id of the backbone.
        classes (`Sequence[str]`, *optional*): Class names, all of which the expert or collection must have.
        token (`str` or `bool`, *optional*): Hub token.

    Returns:
        `list` of [`~huggingface_hub.ModelInfo`]: Their `id` is what [`load_experts`] takes.
    """
    tags = [TAGS[0], "peft", *map(model_card.class_tag, check_classes(classes) if classes else ())]
    tags += [f"base_model:{base_model}"] if base_model is not None else []
    return list(HfApi(token=token).list_models(author=author, filter=tags))


def _mirror(
    api: HfApi, folder: Path, repo_id: str, revision: str | None, message: str, *, retry: bool = True
) -> CommitInfo:
    """Mirrors a folder, of one expert or of a collection, to the Hub in one commit."""
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    info = api.model_info(repo_id, revision=revision)
    there = {sibling.rfilename for sibling in info.siblings or ()}
    for file, kind in {CONFIG_NAME: "a single expert", MANIFEST_NAME: "a collection"}.items():
        if file in there and not (folder / file).is_file():
            raise ValueError(f"{repo_id} holds {kind}, and cannot hold this too. Push to another repository.")
    pushed = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    earlier = _pushed_earlier(api, repo_id, info.sha, there, pushed)
    if others := sorted(pushed & there - earlier):
        reason = f"{repo_id} holds {list_names(others)}, which no earlier push of an expert wrote"
        raise ValueError(f"{reason}. Push to another repository, or delete them there first.")
    try:
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=message,
            revision=revision,
            parent_commit=info.sha,
            delete_patterns=sorted(earlier - pushed),
        )
    except HfHubHTTPError as error:
        if error.response.status_code != 412:
            raise
        if not retry:
            message = f"somebody else pushed to {repo_id} at the same time, twice (412). Look at it, and push again."
            raise RuntimeError(message) from error
    logger.warning("Somebody else pushed to %s at the same time (412). Pushing once more.", repo_id)
    return _mirror(api, folder, repo_id, revision, message, retry=False)


def _pushed_earlier(api: HfApi, repo_id: str, commit: str | None, there: set[str], pushed: set[str]) -> set[str]:
    """Files of a repository that an earlier push wrote: those of its experts, and what lies beside them."""
    places = []
    for file in {MANIFEST_NAME, CONFIG_NAME} & there:
        path = Path(api.hf_hub_download(repo_id, file, revision=commit))
        if file == MANIFEST_NAME:
            places = [f"{name}/" for name in read_manifest(path.parent).names]
        elif read_json(path).get("peft_type") == "LUCA":
            places = [""]
    beside = {PICTURE_NAME, RESULTS_NAME, *(file for file in pushed if "/" not in file)} if places else set()
    return there & (beside | {f"{place}{file}" for place in places for file in EXPERT_FILES})


def _base_model(api: HfApi, tuner: LucaModel, given: str | None) -> str | None:
    """Returns the Hub id of the backbone: as given, or where it was loaded from. Never a path."""
    name = str(given or getattr(tuner.model, "name_or_path", None) or "")
    with suppress(HFValidationError):
        if name and not Path(name).exists() and api.repo_exists(name):
            return name
    if given is not None:
        raise ValueError(f"base_model must be the id of a model on the Hub, got {given!r}.")
    if name:
        message = f"the backbone was loaded from {name!r}, which is not on the Hub. Set base_model='owner/name'."
        warnings.warn(message, stacklevel=3)
    return None


def _set_base_model(folder: Path, base_model: str | None) -> None:
    """Names the backbone in the experts' configs by its Hub id, in place of where it was loaded from."""
    for path in folder.rglob(CONFIG_NAME):
        write_json(path, read_json(path) | {"base_model_name_or_path": base_model})


def _add_metrics(path: Path, results: Mapping[str, Any]) -> None:
    manifest = read_json(path)
    for entry in manifest["experts"]:
        entry["metrics"] = model_card.expert_figures(results, entry["name"])
    write_json(path, manifest | {"metrics": model_card.collection_figures(results)})
