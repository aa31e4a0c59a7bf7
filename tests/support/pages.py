"""HTML that is read back: its tags, the cells of its rows, its text, and what it refers to."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """A page or a part of one, in which what is opened is closed."""

    void = ("meta", "br", "link", "img", "input", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str | None] = []
        self.addresses: list[str | None] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.addresses += [v for name, v in attrs if name in ("src", "href", "xlink:href", "action", "srcset")]
        if tag not in self.void:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.void:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
