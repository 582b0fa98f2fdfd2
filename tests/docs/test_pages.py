"""Pages are reachable from the README; links, paths and make targets exist."""

import re
from pathlib import Path

from tools import options

DOCS = Path(__file__).parents[2] / "docs"


def test_every_page_is_linked_from_the_readme():
    readme = (DOCS.parent / "README.md").read_text()
    linked = {path.name for path in DOCS.glob("*.md") if f"(docs/{path.name})" in readme}
    assert linked == {path.name for path in DOCS.glob("*.md")}


def test_every_link_leads_to_a_file():
    for page in (DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md", *DOCS.glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_path_of_the_feature_table_exists():
    paths = re.findall(
        r"`((?:tests|examples|benchmarks)/[^`]*)`", (DOCS / "features.md").read_text()
    )
    assert paths
    assert not [path for path in paths if not any(DOCS.parent.glob(path))]


def test_every_make_target_of_the_pages_exists():
    targets = set(
        re.findall(r"^([a-z-]+):", (DOCS.parent / "Makefile").read_text(), flags=re.MULTILINE)
    )
    for page in (DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md", *DOCS.glob("*.md")):
        assert (
            set(re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE))
            <= targets
        ), page.name


def test_options_page_is_up_to_date():
    assert options.PAGE.read_text() == options.page(), "run make docs"
    assert "|  |\n" not in options.PAGE.read_text(), "an option has no docstring"
    assert options.NAMES_PAGE.read_text() == options.names_page(), "run make docs"
