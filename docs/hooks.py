"""Pages of the site that lie elsewhere in the repository, and links to them; read by mkdocs."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
ELSEWHERE = {"chart.md": "helm/holdfast/README.md", "changelog.md": "CHANGELOG.md"}
UNLINKED = ("../../docker",)  # folders, which are no pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The pages about GPU kernels, one for each, are in the menu by themselves."""
    pages = sorted(path.relative_to(config.docs_dir).as_posix() for path in Path(config.docs_dir).glob("gpu/*.md"))
    if pages and config.nav is not None:
        config.nav.append({"On a GPU": pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, path in ELSEWHERE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    for name, path in ELSEWHERE.items():
        markdown = markdown.replace(f"](../{path})", f"]({name})").replace(f"](../{path}#", f"]({name}#")
    markdown = markdown.replace("](../../docs/", "](")  # from the chart's page
    for folder in UNLINKED:
        markdown = markdown.replace(f"]({folder})", "](quickstart.md#on-a-kubernetes-cluster)")
    return markdown
