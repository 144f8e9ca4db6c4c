"""
Hooks of the site: adds files outside docs/ that pages link to, and turns names in docstrings into links.

On GitHub a page links to a file outside docs/ by `../`. On the site that file is added under its name, one level up.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File


ROOT = Path(__file__).parent.parent
OUTSIDE = (
    "CHANGELOG.md",
    "SECURITY.md",
    "examples/*.py",
    "examples/*.ipynb",
    "examples/README.md",
    "examples/space/*",
)


def on_files(files: Any, config: Any) -> Any:
    for path in sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern) if path.is_file()):
        name = path.relative_to(ROOT).as_posix()
        if path.name == "README.md" and path.parent.name == "space":
            continue  # the front matter of a Hub Space, not a page
        if path.suffix == ".md":
            depth = name.count("/")
            content = path.read_text(encoding="utf-8").replace(f"]({'../' * depth}docs/", f"]({'../' * depth}")
            files.append(File.generated(config, name, content=content))
        else:
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    if "/" in page.file.src_uri or page.file.src_uri in OUTSIDE:
        return markdown
    return markdown.replace("](../", "](")


class References(griffe.Extension):
    """Links names in docstrings, written as in Hugging Face libraries: [`LucaModel`], [`~LucaModel.route`]."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"\[`~?([\w.]+)`\]", _link, obj.docstring.value)


def _link(found: re.Match[str]) -> str:
    name = found[1].removeprefix("peft_luca.")
    public = re.findall(r"^::: peft_luca\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.M)
    if name.split(".")[0] not in public:
        return f"`{name}`"
    return f"[`{name}`][peft_luca.{name}]"
