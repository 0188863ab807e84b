"""Hooks of mkdocs.yml: README.md is the site's first page, and links to files beside docs/ name these files.

A link that leaves docs/ becomes the path in the checkout. The link to the repository is there once pyproject.toml has
its address, in `project.urls`.
"""

import re
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[([^\[\]]+)\]\(([^()\s]+)\)")
_IMAGE = re.compile(r'(src|srcset)="docs/')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the version, and link the repository."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.site_name = f"{project['name']} {project['version']}"
    config.repo_url = project["urls"].get("Repository")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the first page."""
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=_LINK.sub(_into_docs, _IMAGE.sub(r'\1="', readme))))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name the files that the site does not have."""
    folder = Path(page.file.src_uri).parent

    def named(found: "re.Match[str]") -> str:
        words, target = found[1], found[2].partition("#")[0]
        if not target or "://" in target:
            return found[0]
        path = (_ROOT / "docs" / folder / target).resolve()
        if path.is_relative_to(_ROOT / "docs") and path.suffix in (".md", ".png"):
            return found[0]
        where = path.relative_to(_ROOT)
        return f"`{where}`" if words.strip("`").endswith(path.name) else f"{words} (`{where}`)"

    return _LINK.sub(named, markdown)


def _into_docs(found: "re.Match[str]") -> str:
    target = found[2]
    if "://" in target or target.startswith("#"):
        return found[0]
    inside = target.removeprefix("docs/")
    return f"[{found[1]}]({inside if inside != target else '../' + target})"
