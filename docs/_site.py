"""
Builds the pages of docs/ as a site, offline: `python docs/_site.py`. Needs the extra `docs`.

On GitHub a page links to a file outside docs/ by `../`. For the site all files are laid into one folder, in which
those outside docs/ are one level up and the tutorial has the outputs of its notebook; zensical builds from there.
mkdocs.yml's options are zensical's. It also loads this file as an extension, for links in docstrings.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import griffe
import yaml


ROOT = Path(__file__).parent.parent
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/*.py", "examples/*.ipynb", "examples/README.md")
OUTSIDE += ("examples/assets/README.md", "examples/space/*.py", "examples/space/*.txt")


def lay_out(folder: Path) -> None:
    """Copies all pages and what they link to into one folder, with the links that hold there. README is the home."""
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("_*", "__pycache__"))
    for path in (path for pattern in OUTSIDE for path in ROOT.glob(pattern)):
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    shutil.copyfile(ROOT / "README.md", folder / "index.md")
    for page in folder.rglob("*.md"):
        text = re.sub(r"\]\((\.\./)?docs/", r"](\1", page.read_text(encoding="utf-8"))
        if page.parent == folder:
            text = text.replace("](../", "](")
        text = re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)#]*)[^)]*\)", partial(if_there, page.parent), text)
        page.write_text(with_outputs(text) if page.name == "tutorial.md" else text, encoding="utf-8")


def if_there(folder: Path, link: re.Match[str]) -> str:
    """A link, or its words alone where the site has no such file."""
    return link[0] if (folder / link[2]).is_file() else link[1]


def with_outputs(text: str) -> str:
    """The tutorial with what the cells of its notebook print."""
    notebook = json.loads((ROOT / "examples" / "tutorial.ipynb").read_text(encoding="utf-8"))
    cells = iter(cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")

    def block(found: re.Match[str]) -> str:
        said = "".join("".join(output.get("text", "")) for output in next(cells))
        return f"{found[0]}\n```text\n{said.rstrip()}\n```\n" if said.strip() else found[0]

    return re.sub(r"^```python\n.*?^```\n", block, text, flags=re.M | re.S)


def build(site: Path) -> int:
    """Builds into the folder `site`, which is made anew. Returns zensical's exit code, an error for any warning."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    config |= {"docs_dir": "docs", "site_dir": "site"}
    python = config["plugins"][1]["mkdocstrings"]["handlers"]["python"]
    python["paths"] = [str(ROOT)]
    python["options"]["extensions"] = [str(Path(__file__).resolve())]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        lay_out(work / "docs")
        (work / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        code = subprocess.run(command, cwd=work, check=False).returncode
        if not code:
            page = work / "site" / "reference" / "index.html"
            text = page.read_text(encoding="utf-8")  # the default that a docstring names is not shown twice
            twice = r"(\((?:(?!</li>).)*?defaults to (?:(?!</li>).)*?</code>), default:\s*<code>(?:(?!</li>).)*?\n\)"
            page.write_text(re.sub(twice, r"\1)", text, flags=re.S), encoding="utf-8")
            shutil.rmtree(site, ignore_errors=True)
            shutil.copytree(work / "site", site)
    return code


class Docstrings(griffe.Extension):
    """Links names in docstrings, written as in Hugging Face libraries, and shows types and defaults plainly."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"\[`~?([\w.]+)`\]", _link, obj.docstring.value)
            obj.docstring.value = re.sub(r"^ +[\w, `]+ \([^\n]*?\):", _plain, text, flags=re.M)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        if isinstance(attr.value, griffe.ExprCall) and str(attr.value.function) == "_field":
            attr.value = next(iter(attr.value.arguments))  # the default of a config's field


def _plain(found: re.Match[str]) -> str:
    """``name (`int`, *optional*, defaults to `16`):`` → ``name (int, optional, defaults to 16):``."""
    return found[0] if "](" in found[0] or "][" in found[0] else re.sub(r"[`*]", "", found[0])


def _link(found: re.Match[str]) -> str:
    name = found[1].removeprefix("peft_luca.")
    public = re.findall(r"^::: peft_luca\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.M)
    if name.split(".")[0] not in public or "._" in name:
        return f"`{name}`"
    return f"[`{name}`][peft_luca.{name}]"


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site")))
