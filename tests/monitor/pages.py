"""Looking into HTML."""

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """The attributes of a page that may load something, and its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if re.search(r"src|href|data$|action|poster|^on", name)]
