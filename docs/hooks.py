"""Pages of the site that lie elsewhere in the repository, and links to them; read by mkdocs."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
ELSEWHERE = {"chart.md": "helm/holdfast/README.md", "changelog.md": "CHANGELOG.md"}
UNLINKED = ("../../docker",)  # folders, which are no pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, path in ELSEWHERE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    for name, path in ELSEWHERE.items():
        markdown = markdown.replace(f"](../{path})", f"]({name})").replace(f"](../{path}#", f"]({name}#")
    markdown = markdown.replace("](../../docs/", "](").replace("](docs/", "](")  # of the chart and of the change log
    for folder in UNLINKED:
        markdown = markdown.replace(f"]({folder})", "](quickstart.md#on-a-kubernetes-cluster)")
    return markdown
