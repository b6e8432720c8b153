"""The documentation says what the sources say: quoted messages, links, the navigation, and code."""

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PACKAGES = ("commopt", "lightning_commopt", "accelerate_commopt")
QUOTE = re.compile(r"\*\*`([^`]+)`\*\*")  # a message, in troubleshooting.md
FENCE = re.compile(r"^( *)```(\w*).*\n((?:.*\n)*?)\1```$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def strings() -> Iterator[str]:
    """Every text in the sources but docstrings, with the holes of f-strings as they are quoted."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes:
                if isinstance(node, ast.JoinedStr):
                    yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                    yield node.value


def pattern(quote: str) -> re.Pattern[str]:
    """A hole of a quote stands for anything, a hole of a source for the … that is there."""
    return re.compile(".*".join(re.escape(part) for part in quote.split("…")), re.DOTALL)


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def test_quoted_messages_are_in_the_sources() -> None:
    quotes = QUOTE.findall((DOCS / "troubleshooting.md").read_text(encoding="utf-8"))
    assert len(quotes) > 100
    texts = set(strings())
    assert [quote for quote in quotes if not any(pattern(quote).search(text) for text in texts)] == []
    # A quote has words of its own: another message is not found by it.
    assert [quote for quote in quotes if len(re.sub(r"\W", "", quote)) < 8] == []


def test_a_message_that_has_changed_is_noticed() -> None:
    source = "option … of … must be …, got …."
    assert pattern("option … of … must be …, got …").search(source)
    assert pattern("must be …, got").search(source)
    assert not pattern("option … of … has to be").search(source)
    assert not pattern("option 'rank' of … must be").search(source)


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        name, _, _ = target.partition("#")
        assert "://" in target or (page.parent / (name or page.name)).exists(), target


def test_navigation_names_every_page_once() -> None:
    def files(entry: Any) -> Iterator[str]:
        for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            yield from files(inner)
        if isinstance(entry, str):
            yield entry

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(files(site["nav"])) == sorted(str(path.relative_to(DOCS)) for path in PAGES[1:])


@pages
def test_code_compiles_and_examples_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        language, body = match[2], match[3]
        if language == "python":
            compile(body, f"{page.name}, line {text[: match.start()].count(chr(10)) + 2}", "exec")
        elif language == "pycon":
            example = doctest.DocTestParser().get_doctest(body, {}, page.name, str(page), 0)
            assert doctest.DocTestRunner().run(example).failed == 0
