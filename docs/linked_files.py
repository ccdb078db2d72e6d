"""Copy into the site what its pages link to beside ``docs/``: tables, pictures and sources of the repository.

A page links to them as a reader of the repository follows it, ``../results/tables/x.md``. The site holds each under the
same path, so that a page's link loses its ``../``.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
OUTSIDE = re.compile(r"\]\(\.\./")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the linked files, and what those of them that are pages link to."""
    pages = list(files.documentation_pages())
    for page in pages:
        folder = posixpath.dirname(page.src_uri)
        for link in LINK.findall(OUTSIDE.sub("](", page.content_string) if _own(page) else page.content_string):
            path = posixpath.normpath(posixpath.join(folder, link))
            if files.get_file_from_path(path) is None and (ROOT / path).is_file():
                added = File.generated(config, path, abs_src_path=str(ROOT / path))
                files.append(added)
                pages += [added] if added.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point the links of a page of ``docs/`` into the site."""
    return OUTSIDE.sub("](", markdown) if _own(page.file) else markdown


def _own(file: File) -> bool:
    return file.generated_by is None
