"""Hook of mkdocs.yml: pages may link to files outside docs/, which become part of the site, and load nothing remote.

The pages are also read in the repository, where `../bench/results/reduce.json` is a good link. Here `../` is removed, the file
is copied to the same path below the site, and Markdown files at the top (ARCHITECTURE.md, ...) become pages. A link to a folder
has nothing to open in a site, so only its text stays.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")  # not https:, not an anchor of the same page
REMOTE = re.compile(r"""<(?:script|img|link|iframe)[^>]+(?:src|href)=["']?(?:https?:)?//[^>]*>""")
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")


def on_files(files: Files, config: Any) -> Files:
    """Add the top-level pages, and every file that a page links to."""
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for page in list(files.documentation_pages()):
        for target in _targets(page):
            if target.is_file() and not (uri := _uri(target)).endswith(".md") and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links to what they are called in the site."""

    def rewrite(match: re.Match[str]) -> str:
        text, target, anchor = match[1], _resolve(page.file, match[2]), match[3] or ""
        return text if target.is_dir() else f"[{text}]({_uri(target)}{anchor})"

    return LINK.sub(rewrite, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Fail if the page loads anything from another site: pages must work offline."""
    if remote := REMOTE.search(output):
        raise PluginError(f"{page.file.src_uri} loads a remote file: {remote[0]}")
    return output


def _targets(page: File) -> list[Path]:
    return [_resolve(page, match[2]) for match in LINK.finditer(page.content_string)]


def _resolve(page: File, link: str) -> Path:
    return (Path(str(page.abs_src_path)).parent / link).resolve()


def _uri(path: Path) -> str:
    """The path in the site: docs/ is its top, and its home page stands in for README.md."""
    name = path.relative_to(ROOT).as_posix()
    return "index.md" if name == "README.md" else name.removeprefix("docs/")
