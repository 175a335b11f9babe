"""Pages, read strictly."""

from html.parser import HTMLParser

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Checks that tags are closed in order, and keeps what could load or run."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [
            value for name, value in attrs if name in ("src", "href", "xlink:href", "action", "data")
        ]
        self.links += [value for name, value in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader
