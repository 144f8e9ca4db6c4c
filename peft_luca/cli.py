"""The command `peft-luca`: learn a stream, ask the experts, and manage collections of them."""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoImageProcessor, AutoModelForImageClassification, HfArgumentParser
from transformers.utils import logging

from .data.feature_cache import digest_images
from .data.sources import image_files, load_splits
from .data.task_stream import TaskStream
from .hub.model_card import FIGURES, collection_figures
from .hub.publishing import RESULTS_NAME, push_experts
from .hub.saving import EXPERT_FILES, load_experts, local_folder, save_experts
from .hub.validation import MANIFEST_NAME, read_config, read_json, read_manifest
from .preprocessing import find_image_column
from .training.arguments import ContinualTrainingArguments
from .training.continual_trainer import ContinualTrainer
from .training.run_folder import JOURNAL_NAME, RunFolder
from .tuner.config import LucaConfig
from .utils import atomic_write, list_names, pluralize


CHUNK = 512  # images between two writes of predictions
DTYPES = ("float32", "float16", "bfloat16", "float64")
EXAMPLES = """examples:
  peft-luca train --model google/vit-base-patch16-224-in21k --dataset path/to/images --increment 10 --output_dir out
  peft-luca predict out photo.jpg more/photos --top_k 3 --out answers.csv
  accelerate launch -m peft_luca.cli predict out --dataset path/to/dataset --out answers.jsonl
  peft-luca evaluate out --dataset path/to/other/images
  peft-luca show out
  peft-luca delete out task_0
  peft-luca push out me/my-run
  peft-luca compose both mine=out theirs=lab-a/their-run"""


@dataclass
class StreamArguments:
    """What to learn, and on which backbone."""

    model: str = field(metadata={"help": "An image classifier: Hub id or folder."})
    dataset: str = field(metadata={"help": "Hub id, or folder of images or of data files."})
    image_column: str | None = field(default=None, metadata={"help": "Column of the images; found if there is one."})
    label_column: str = field(default="label", metadata={"help": "Column of the labels."})
    domain_column: str | None = field(
        default=None, metadata={"help": "Learn one domain after another, by this column, and not class after class."}
    )
    increment: int = field(default=2, metadata={"help": "Classes per task."})
    init_classes: int | None = field(default=None, metadata={"help": "Classes of the first task, if another number."})
    class_order_seed: int = field(default=1993, metadata={"help": "Seed of the class order."})
    test_size: float | None = field(default=None, metadata={"help": "Share held out, if there is no test split."})
    dtype: str = field(default="float32", metadata={"help": "Type of the backbone's weights.", "choices": DTYPES})
    luca_config: str = field(default="{}", metadata={"help": "Fields of LucaConfig, as JSON."})


def make_stream(args: StreamArguments, dataset: Any = None) -> TaskStream:
    """The stream that the arguments name, of another `dataset` if one is given."""
    dataset = args.dataset if dataset is None else dataset
    columns: Any = {"image_column": args.image_column, "label_column": args.label_column}
    if args.domain_column:
        return TaskStream.from_domains(dataset, domain_column=args.domain_column, **columns)
    columns |= {"init_classes": args.init_classes, "seed": args.class_order_seed, "test_size": args.test_size}
    return TaskStream.from_dataset(dataset, increment=args.increment, **columns)


def load_backbone(name: str, dtype: str = "float32") -> Any:
    """An image classifier, whose head the experts take the place of: nothing is said of a head that is new."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        options: Any = {"dtype": getattr(torch, dtype), "output_loading_info": True}
        model, found = AutoModelForImageClassification.from_pretrained(name, **options)
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
    if lacking := sorted(key for key in found["missing_keys"] if not key.startswith("classifier.")):
        sys.stderr.write(f"warning: {name} has no weights for {', '.join(lacking[:5])}, which are random now\n")
    return model


def parse_stream(kind: Any, given: Sequence[str], name: str) -> tuple[Any, ContinualTrainingArguments, LucaConfig]:
    """The arguments of a run, from the command line or from a JSON file that it names."""
    usage = f"{name} [ARGUMENTS.json] [--ARGUMENT VALUE ...]   ({name} --help-all lists all arguments)"
    kinds: Any = (kind, ContinualTrainingArguments)
    parser = HfArgumentParser(kinds, prog=name, usage=usage)
    if given in (["--help"], ["-h"]):
        shown = "--output_dir, --num_train_epochs, --learning_rate, --router, --recipe, --push_to_hub, --bf16"
        more = f"Takes ContinualTrainingArguments too, such as {shown}. A run in the same folder is resumed."
        HfArgumentParser((kind,), prog=name, usage=usage, epilog=more).parse_args(given)
    file = given[0] if len(given) == 1 and given[0].endswith(".json") else None
    try:
        if file is not None:
            stream, args = parser.parse_dict(json.loads(Path(file).read_text(encoding="utf-8")))
        else:
            given = ["--help" if argument == "--help-all" else argument for argument in given]
            stream, args = parser.parse_args_into_dataclasses(given)
    except OSError as error:
        parser.error(f"{file} cannot be read: {error.strerror}")
    except (ValueError, TypeError, AttributeError) as error:
        parser.error(f"{file} does not hold arguments as one JSON object: {error}" if file else str(error))
    if stream.dtype not in DTYPES:  # a file is not checked by the parser
        parser.error(f"dtype must be one of {', '.join(DTYPES)}, got {stream.dtype!r}")
    try:
        config = LucaConfig(**json.loads(stream.luca_config))
    except (ValueError, TypeError) as error:
        needed = "--luca_config must hold fields of LucaConfig as one JSON object"
        parser.error(f"{needed}, got {stream.luca_config}: {error}")
    if Path(args.output_dir).name == "trainer_output":  # what Trainer takes when none is given
        args.output_dir = str(Path("out") / Path(stream.dataset).name)
    return stream, args, config


def train(stream: StreamArguments, args: Any, config: LucaConfig, dataset: Any = None) -> ContinualTrainer:
    """Learns the stream, or resumes it in `args.output_dir`. Returns the trainer."""
    tasks = make_stream(stream, dataset)
    model, processor = load_backbone(stream.model, stream.dtype), AutoImageProcessor.from_pretrained(stream.model)
    trainer = ContinualTrainer(model, args, tasks, config, processor)
    if trainer.is_world_process_zero():
        _print(repr(tasks))
    trainer.train()
    trainer.save_model()
    return trainer


def _train(given: Sequence[str]) -> None:
    trainer = train(*parse_stream(StreamArguments, given, "peft-luca train"))
    if trainer.is_world_process_zero():
        _print_collection(trainer.args.output_dir)


def _predict(args: Any) -> None:
    """Each process answers its share of the images, into a file of its own if there are several."""
    images: Any = [
        file for path in map(Path, args.images) for file in (image_files(path) if path.is_dir() else [path])
    ]
    if args.dataset:
        images = load_splits(args.dataset, args.split)[0]
    if bool(args.dataset) == bool(args.images):
        raise ValueError("name images, or a --dataset, one of both.")
    if not len(images):
        raise ValueError(f"there are no images in {args.dataset or ', '.join(args.images)}.")
    state, out = PartialState(cpu=not torch.accelerator.is_available()), Path(args.out) if args.out else None
    if state.num_processes > 1:
        if out is None:
            raise ValueError("several processes write files: name one with --out.")
        out = out.with_name(f"{out.stem}.{state.process_index}-of-{state.num_processes}{out.suffix}")
    own, as_json = range(state.process_index, len(images), state.num_processes), args.json
    as_json |= out is not None and out.suffix in (".json", ".jsonl")
    partial = None
    if out and args.dataset and as_json:  # until they are whole, answers lie under a name that tells what decides them
        partial = out.with_name(f"{out.name}.{_digest(args, images)}.partial")
    done = _count_answers(partial) if partial else 0
    model = _load(args)
    if done:
        sys.stderr.write(f"{partial} has the answers for the first {done} of {len(own)} images; the others follow\n")
    writing: Any = atomic_write(out) if out and not partial else nullcontext(partial)
    with (
        writing as place,
        open(place, "a" if done else "w", encoding="utf-8", newline="") if place else nullcontext(sys.stdout) as file,
    ):
        for start in range(done, len(own), CHUNK):
            rows = own[start : start + CHUNK]
            asked = images.select(rows) if args.dataset else [images[row] for row in rows]
            names = [{"row": row} if args.dataset else {"image": str(images[row])} for row in rows]
            found = [name | one.to_dict() for name, one in zip(names, model.predict(asked, args.top_k), strict=True)]
            _write_answers(file, found, as_json, header=not start)
            file.flush()
    if partial and out:
        os.replace(partial, out)


def _digest(args: Any, images: Any) -> str:
    """A digest of what decides the answers: the experts' files, the arguments, and a hundred of the images."""
    folder = local_folder(args.experts)
    names = read_manifest(folder).names if (folder / MANIFEST_NAME).is_file() else [""]
    files = [folder / MANIFEST_NAME, *(folder / name / file for name in names for file in EXPERT_FILES)]
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()]
    sample = images.select(range(0, len(images), len(images) // 100 + 1))
    digests += [digest_images(sample, find_image_column(images, "name one")), args.model, args.dtype]
    text = json.dumps([*digests, args.top_k, args.split, len(images)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _count_answers(file: Path) -> int:
    """Lines that an earlier run has written. One that is cut off is removed."""
    if not file.is_file():
        return 0
    content = file.read_bytes()
    with open(file, "r+b") as lines:
        lines.truncate(content.rfind(b"\n") + 1)
    return content.count(b"\n")


def _write_answers(file: Any, found: list[dict[str, Any]], as_json: bool, header: bool) -> None:
    if as_json:
        return file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in found)
    table = csv.DictWriter(file, list(found[0]))
    if header:
        table.writeheader()
    table.writerows(row | {"top": "; ".join(f"{c} {p:.4f}" for c, p in row["top"].items())} for row in found)


def _evaluate(args: Any) -> None:
    train, test = load_splits(args.dataset, label_column=args.label_column)
    task = TaskStream.from_dataset(train if test is None else test, label_column=args.label_column)[0]
    found, right = _load(args).predict(task.train), dict[str, list[bool]]()
    for one, label in zip(found, task.train["labels"], strict=True):
        right.setdefault(task.classes[label], []).append(one.label == task.classes[label])
    report: dict[str, Any] = {"images": len(found), "accuracy": sum(map(sum, right.values())) / len(found)}
    report |= {"unknown": sum(one.unknown for one in found) / len(found)}
    report |= {"classes": {name: sum(of) / len(of) for name, of in right.items()}}
    if args.json:
        return _print(json.dumps(report, ensure_ascii=False))
    _print(f"{report['images']} images: accuracy {report['accuracy']:.3f}, taken for unknown {report['unknown']:.3f}")
    for name, accuracy in report["classes"].items():
        _print(f"{accuracy:8.3f}  {name}")


def _push(args: Any) -> None:
    results = RunFolder(args.experts).results()
    _print(str(push_experts(_load(args), args.repo, private=args.private, results=results or None)))


def _pull(args: Any) -> None:
    """Copies the files of a collection: no backbone is needed."""
    source, folder = local_folder(args.experts), _new_folder(args.folder)
    places = [f"{name}/" for name in read_manifest(source).names] if (source / MANIFEST_NAME).is_file() else [""]
    for file in [MANIFEST_NAME, *(f"{place}{file}" for place in places for file in EXPERT_FILES)]:
        if (source / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / file, folder / file)
    _print_collection(folder)


def _compose(args: Any) -> None:
    given = [source.partition("=") for source in args.sources]
    named: Any = {name: source for name, mark, source in given if mark}
    folder, args.experts = _new_folder(args.folder), next(iter(named.values()), args.sources[0])
    if named and len(named) < len(given):
        raise ValueError("give every source a name of its own (name=source), or none.")
    backbone = args.model or _backbone(args.experts)
    save_experts(load_experts(load_backbone(backbone, args.dtype), named or args.sources), folder)
    _print_collection(folder)


def _delete(args: Any) -> None:
    folder = RunFolder(args.experts)
    with folder.lock():
        if args.expert not in (names := folder.experts()):
            raise ValueError(f"there is no expert {args.expert!r} in {folder.path}, only {list_names(names)}.")
        if len(names) == 1:
            raise ValueError(f"{args.expert!r} is the only expert: delete the folder {folder.path} instead.")
        folder.recover((), [args.expert])
        if not (folder.path / RESULTS_NAME).is_file():  # a collection of no run, of which nothing is measured again
            (folder.path / JOURNAL_NAME).unlink()
    _print_collection(folder.path)


def _show(args: Any) -> None:
    _print_collection(args.experts, args.json)


def _print_collection(source: Any, as_json: bool = False) -> None:
    """What can be said of a collection without its backbone."""
    folder = local_folder(source)
    manifest = read_manifest(folder) if (folder / MANIFEST_NAME).is_file() else None
    about: dict[str, Any] = {"router": manifest.router if manifest else None, "experts": []}
    for name in manifest.names if manifest else [""]:
        config, files = read_config(folder / name), [folder / name / file for file in EXPERT_FILES]
        size = sum(file.stat().st_size for file in files if file.exists())
        about["experts"].append({"name": name or folder.name, "classes": config.classes, "bytes": size})
        about |= {"backbone": config.base_model_name_or_path, "fingerprint": config.fingerprint}
    results = read_json(folder / RESULTS_NAME) if (folder / RESULTS_NAME).is_file() else {}
    pending = (folder / JOURNAL_NAME).is_file()  # after a deletion the next start of the run measures the others
    about["figures"] = {} if pending else collection_figures(results)
    if as_json:
        return _print(json.dumps(about, ensure_ascii=False))
    router, experts = (about["router"] or {}).get("name", "none"), pluralize(len(about["experts"]), "expert")
    _print(f"{experts} of {about['backbone'] or 'an unnamed backbone'}, router {router}")
    for expert in about["experts"]:
        classes = f"{pluralize(len(expert['classes']), 'class')}: {list_names(expert['classes'], 5)}"
        _print(f"  {expert['name']:24} {expert['bytes'] / 1e6:7.2f} MB  {classes}")
    for name, value in about["figures"].items():
        _print(f"{FIGURES[name]:34} {value:.3f}")


def _backbone(source: Any) -> str:
    """The backbone that the first expert of a source names."""
    folder = local_folder(source)
    first = read_manifest(folder).names[0] if (folder / MANIFEST_NAME).is_file() else ""
    name = read_config(folder / first).base_model_name_or_path
    if not name:
        raise ValueError(f"{source} does not name its backbone: pass --model.")
    return name


def _load(args: Any) -> Any:
    """The experts of a folder or repository, on their backbone."""
    model: Any = load_experts(load_backbone(args.model or _backbone(args.experts), args.dtype), args.experts)
    return model.to(PartialState(cpu=not torch.accelerator.is_available()).device)


def _new_folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty. Choose another folder.")
    return folder


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


VERBS: dict[str, tuple[Callable[[Any], None], str]] = {
    "train": (_train, "learn a stream of tasks, or resume it"),
    "evaluate": (_evaluate, "accuracy on a labeled dataset, by the names of its classes"),
    "predict": (_predict, "class of each image, as CSV or JSON lines"),
    "push": (_push, "push a collection to the Hub"),
    "pull": (_pull, "copy a collection from the Hub into a folder"),
    "compose": (_compose, "put several collections together"),
    "delete": (_delete, "delete an expert of a run's or a collection's folder"),
    "show": (_show, "experts, classes, sizes and figures"),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "peft-luca", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    made = {name: verbs.add_parser(name, help=text, description=text) for name, (_, text) in VERBS.items()}
    for name in ("evaluate", "predict", "push", "pull", "delete", "show"):
        made[name].add_argument("experts", help="folder of a run or a collection, or Hub id")
    for name in ("evaluate", "predict", "push", "compose"):
        made[name].add_argument("--model", help="the backbone; by default the one that the experts name")
        made[name].add_argument("--dtype", default="float32", choices=DTYPES, help="type of the backbone's weights")
    for name in ("evaluate", "predict", "show"):
        made[name].add_argument("--json", action="store_true", help="print JSON")
    made["predict"].add_argument("images", nargs="*", help="files of images, or folders of them")
    made["predict"].add_argument("--dataset", help="Hub id or folder in their place; accelerate launch shares it out")
    made["predict"].add_argument("--split", default="train", help="split of the dataset")
    made["predict"].add_argument("--top_k", type=int, default=1, help="classes to name for each image")
    made["predict"].add_argument("--out", help="file to write: .csv, or .jsonl for JSON lines; else standard output")
    made["evaluate"].add_argument("--dataset", required=True, help="Hub id, or folder of images or of data files")
    made["evaluate"].add_argument("--label_column", default="label", help="column of the labels")
    made["push"].add_argument("repo", help="Hub id to push to")
    made["push"].add_argument("--private", action="store_true", help="make a new repository private")
    made["pull"].add_argument("folder", help="folder to make")
    made["compose"].add_argument("folder", help="folder to make")
    made["compose"].add_argument("sources", nargs="+", help="folders or Hub ids; name=source prefixes its experts")
    made["delete"].add_argument("expert", help="its name")
    return parser


def main(given: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if given is None else given)
    try:
        if given[:1] == ["train"]:
            _train(given[1:])
        else:
            parser = make_parser()
            args, rest = parser.parse_known_args(given)
            if rest and (args.verb != "predict" or any(argument.startswith("-") for argument in rest)):
                parser.error(f"unrecognized arguments: {' '.join(rest)}")
            if rest:
                args.images += rest  # images that are named after an option
            VERBS[args.verb][0](args)
    except (ValueError, OSError, RuntimeError) as error:  # what was asked for cannot be done
        sys.stderr.write(f"peft-luca: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("peft-luca: interrupted. What was finished is kept; the same command goes on.\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
