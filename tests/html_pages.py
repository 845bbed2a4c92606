"""An HTML report, read back."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser


class Read(HTMLParser):
    """The tags with their attributes, and the text by the tag it is in."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[tuple[str, str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append((self.tags[-1][0] if self.tags else "", data))

    def attributes(self, *names: str) -> list[str]:
        return [value or "" for _, attrs in self.tags for name, value in attrs.items() if name in names]

    def headings(self) -> list[str]:
        return [text.strip() for tag, text in self.text if tag == "h2" and text.strip()]

    def whole(self) -> str:
        return "".join(text for tag, text in self.text if tag != "style")


def pictures(html: str) -> list[str]:
    """The SVG of every picture, light and dark."""
    found = re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", html)
    return [base64.b64decode(data).decode() for data in found]
