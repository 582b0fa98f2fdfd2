"""Pages are reachable from the README and on the site; links, paths and make targets exist."""

import re

import yaml

from tests.support.pages import DOCS, FENCE, PAGES, ROOT, find_anchors, find_links
from tools import docs_site, options

README = ROOT / "README.md"
MOST_LINES = 120
"""Line limit for README.md."""


class SiteLoader(yaml.SafeLoader):
    """Loader for mkdocs.yml, which names functions of its extensions."""


SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def list_nav(entries):
    """Return the pages of the site's navigation, in order."""
    pages: list[str] = []
    for entry in entries:
        (target,) = entry.values()
        pages += [target] if isinstance(target, str) else list_nav(target)
    return pages


def test_every_page_is_linked_from_the_readme():
    linked = {path.resolve() for path, _ in find_links(README) if path.suffix == ".md"}
    assert linked == {*DOCS.glob("*.md"), ROOT / "CONTRIBUTING.md"}


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= MOST_LINES


def test_navigation_of_the_site_has_every_page_once():
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=SiteLoader)
    pages = list_nav(site["nav"])
    assert pages[0] == "index.md"  # README.md, by tools/docs_site.py
    assert sorted(pages[1:]) == sorted(path.name for path in DOCS.glob("*.md"))


def test_every_link_leads_to_a_file_and_a_heading():
    num_anchors = 0
    for page in PAGES:
        for path, anchor in find_links(page):
            assert path.exists(), f"{page.name}: {path}"
            if anchor:
                num_anchors += 1
                assert anchor in find_anchors(path), f"{page.name}: {path.name}#{anchor}"
    assert num_anchors > 30


def test_anchors_are_those_of_github(tmp_path):
    page = tmp_path / "page.md"
    headings = "# `--explain`\n## A task in one file\n### [Who](who.md) is trusted?\n"
    page.write_text(f"{headings}```\n# a comment\n```\n")
    assert find_anchors(page) == {"--explain", "a-task-in-one-file", "who-is-trusted"}


def test_first_page_of_the_site_is_the_readme_with_links_from_docs():
    index = docs_site.make_index()
    assert "](own_data.md)" in index
    assert "](images/tiny-seed-0.png)" in index
    assert "](training.md#batch-invariant-mode)" in index
    assert "](docs/" not in index
    assert "](https://github.com/meta-pytorch/monarch)" in index


def test_site_has_no_links_out_of_its_folder():
    for text in (docs_site.make_index(), *(page.read_text() for page in DOCS.glob("*.md"))):
        assert "](../" not in docs_site.on_page_markdown(text)
    changed = docs_site.on_page_markdown("see [`rl/local.py`](../rl/local.py), [run](first_run.md)")
    assert changed == "see `rl/local.py`, [run](first_run.md)"


def test_site_shows_bars_of_code_without_a_backslash():
    row = r"| `lr` | `float \| None` | `None` | a \| b |"
    assert docs_site.on_page_markdown(row) == r"| `lr` | `float | None` | `None` | a \| b |"


def test_pages_have_no_open_fence():
    for page in PAGES:
        assert "```" not in FENCE.sub("", page.read_text()), page.name


def test_every_path_of_the_feature_table_exists():
    paths = re.findall(
        r"`((?:tests|examples|benchmarks)/[^`]*)`", (DOCS / "features.md").read_text()
    )
    assert paths
    assert not [path for path in paths if not any(ROOT.glob(path))]


def test_every_make_target_of_the_pages_exists():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE))
        assert named <= targets, page.name


def test_options_page_is_up_to_date():
    assert options.PAGE.read_text() == options.page(), "run make docs"
    assert "|  |\n" not in options.PAGE.read_text(), "an option has no docstring"
    assert options.NAMES_PAGE.read_text() == options.names_page(), "run make docs"
