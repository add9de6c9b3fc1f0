"""What the site has beyond docs/: pages that lie elsewhere in the repository, a reference page per module, links.

MkDocs loads this file for its hooks, and griffe, which reads the docstrings, for `PlainRoles`.
"""

import ast
import html
import json
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ELSEWHERE = ("*.md", "cohorts/**/*.md", "docker/*.md", "benchmarks/*.md")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for pattern in ELSEWHERE:
        for path in sorted(ROOT.glob(pattern)):
            name = _site_name(path.relative_to(ROOT).as_posix())
            files.append(File.generated(config, name, abs_src_path=str(path)))
    for notebook in sorted((ROOT / "docs").glob("*.ipynb")):
        files.append(File.generated(config, f"{notebook.stem}.md", content=_notebook(notebook)))
    package = ROOT / "mri_alm"
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(package.rglob("*.py"))
        if path not in (package / "__init__.py", package / "moved.py")
    }
    for module in modules:
        content = f"---\nsearch:\n  boost: 0.2\n---\n# {module}\n\n::: {module}\n"  # guides are found first
        files.append(File.generated(config, f"reference/{module}.md", content=content))
    files.append(File.generated(config, "reference/index.md", content=_reference(modules)))
    return files


def on_page_markdown(markdown: str, *, page: Any, files: Files, **_: Any) -> str:
    """Let links and names in backticks that are meant from the repository's root lead to their page."""
    here = posixpath.dirname(page.file.src_uri)

    def page_of(name: str) -> Any:
        return files.get_file_from_path(_site_name(name))

    def from_here(name: str) -> str:
        return posixpath.relpath(_site_name(name), here or ".")

    def link(match: re.Match[str]) -> str:
        name = posixpath.normpath(posixpath.join("docs", here, match[1]))
        inside = posixpath.normpath(posixpath.join(here, match[1]))
        for candidate in (name.removeprefix("docs/"), inside.removeprefix("docs/"), name.removeprefix("../")):
            if page_of(candidate):
                return f"]({from_here(candidate)}{match[2] or ''})"
        return match[0]

    def name(match: re.Match[str]) -> str:
        target = match[1].removeprefix("docs/")
        found = target if page_of(target) else f"{target.rstrip('/')}/index.md"
        known = page_of(found) and _site_name(found) != page.file.src_uri
        return f"[`{match[1]}`]({from_here(found)})" if known else match[0]

    def public(match: re.Match[str]) -> str:
        room, _, thing = match[1].rpartition(".")
        target = f"reference/{room}.md"
        return f"[{match[0]}]({posixpath.relpath(target, here or '.')}#{room}.{thing})" if page_of(target) else match[0]

    if page.file.src_uri == "api.md":
        markdown = re.sub(r"`(mri_alm\.\w+\.\w+)`", public, markdown)
    markdown = re.sub(r"\]\(((?!https?:)[^)#\s]+)\.ipynb\)", r"](\1.md)", markdown)
    markdown = re.sub(
        r"(!\[[^\]]*\])\(docs/([^)\s]+)\)", lambda m: f"{m[1]}({posixpath.relpath(m[2], here or '.')})", markdown
    )
    markdown = re.sub(r"\]\(((?!https?:)[^)#\s]+\.md)(#[^)\s]*)?\)", link, markdown)
    return re.sub(r"(?<!\[)`((?:docs/|cohorts/|docker/|benchmarks/)[\w/.-]*(?:\.md|/)|[A-Z]+\.md)`", name, markdown)


def on_page_content(text: str, **_: Any) -> str:
    """Turn the formulas that ``pymdownx.arithmatex`` has found into MathML, which browsers draw without a script.

    Raises:
        latex2mathml.exceptions: If a formula is not LaTeX; the build stops.
    """

    def inline(match: re.Match[str]) -> str:
        return convert(html.unescape(match[1]))

    def block(match: re.Match[str]) -> str:
        return f'<div class="formula">{convert(html.unescape(match[1]), display="block")}</div>'

    text = re.sub(r'<span class="arithmatex">\\\((.*?)\\\)</span>', inline, text, flags=re.DOTALL)
    return re.sub(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', block, text, flags=re.DOTALL)


def _site_name(name: str) -> str:
    """A page's name on the site: MkDocs would take the README for the front page, which is docs/index.md."""
    return "overview.md" if name == "README.md" else name


def _notebook(path: Path) -> str:
    """A notebook as a page: its texts, its code, and the text that the code has printed."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join(line for output in cell["outputs"] for line in output["text"])
        parts += [f"```text\n{printed.rstrip()}\n```"] if printed else []
    return "\n\n".join(parts)


def _reference(modules: dict[str, Path]) -> str:
    rows = []
    for module, path in modules.items():
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        first = " ".join(docstring.split()).partition(". ")[0].rstrip(".")
        rows.append(f"| [`{module}`]({module}.md) | {PlainRoles.plain(first)}. |")
    return (
        "# Reference\n\nOf every public class and function, from the docstrings. [Use it from Python](../api.md) has "
        "the names to begin with, and samples.\n\n| module | what it is for |\n|---|---|\n" + "\n".join(rows) + "\n"
    )


class PlainRoles(griffe.Extension):
    """Docstrings use Sphinx's roles (``:func:`name```), ``::`` and ``.. math::`` here and there; Markdown has none."""

    @staticmethod
    def plain(text: str) -> str:
        """The text with Markdown's code and formulas in place of roles."""
        text = re.sub(r":(?:func|class|meth|mod|data|attr|exc):`~?([^`]+)`", r"`\1`", text)
        text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
        text = re.sub(r"^( *)\.\. math::\s+(.*)$", r"\1$$\2$$", text, flags=re.MULTILINE)
        return re.sub(r"::$", ":", text, flags=re.MULTILINE)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite an object's docstring before it is parsed."""
        if obj.docstring:
            obj.docstring.value = self.plain(obj.docstring.value)
