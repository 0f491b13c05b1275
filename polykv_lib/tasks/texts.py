"""Documents: real encyclopaedia articles that install with a wheel, and WikiText-2 when online.

No text is committed. The `gensim` wheel carries a slice of an English Wikipedia dump; it is read as
a file (gensim itself is never imported) and its wiki markup is removed with mwparserfromhell.
Cleaning costs about 20 ms an article and happens one article at a time, as they are asked for.
"""

import bz2
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import mwparserfromhell
from mwparserfromhell.nodes import Node, Tag, Template, Text, Wikilink
from mwparserfromhell.wikicode import Wikicode

ARTICLES_FILE: Final = "enwiki-latest-pages-articles1*shortened.bz2"
WIKITEXT_CHARS: Final = 8_000  # paper A reads this many characters of the joined rows

# Templates that carry words of the sentence, and which of their arguments those words are.
_SPOKEN_TEMPLATES: Final[dict[str, tuple[str, ...]]] = {
    "convert": ("1", "2"),
    "flag": ("1",),
    "lang": ("2",),
    "nowrap": ("1",),
    "quote": ("1",),
    "small": ("1",),
    "transl": ("2",),
}
_SILENT_TAGS: Final = frozenset({"gallery", "math", "references", "source", "table"})
_COMMENT: Final = re.compile(r"<!--.*?-->", re.DOTALL)
_REFERENCE: Final = re.compile(r"<ref\b[^>]*/\s*>|<ref\b.*?</ref\s*>", re.DOTALL | re.IGNORECASE)
_TABLE_LINE: Final = re.compile(r"^\s*[|!{].*$", re.MULTILINE)  # of tables that were never closed
_SILENT_LINKS: Final = ("category:", "file:", "image:")
_LAST_HEADINGS: Final = frozenset(
    {
        "bibliography",
        "external links",
        "footnotes",
        "further reading",
        "notes",
        "references",
        "see also",
    }
)


@dataclass(frozen=True, kw_only=True)
class Article:
    """One document: its title, its plain text, and where the text came from."""

    title: str
    text: str
    source: str


def articles(*, min_chars: int = 0) -> Iterator[Article]:
    """Wikipedia articles as plain text, in the order of the dump, cleaned as they are taken.

    Args:
        min_chars: Articles with fewer characters of plain text are passed over (a disambiguation
            page has a few hundred; 4 characters are about one token).

    Raises:
        FileNotFoundError: The wheel that carries the dump is not installed.
    """
    for title, markup in _pages(_articles_file()):
        if len(markup) >= min_chars and len(text := plain_text(markup)) >= min_chars:
            yield Article(title=title, text=text, source="wikipedia (gensim wheel)")


def wikitext2(n_chars: int = WIKITEXT_CHARS) -> Article:
    """The start of WikiText-2 as paper A reads it: test rows joined by a space, then cut.

    Raises:
        ConnectionError: The data set is neither cached nor reachable.
    """
    from datasets import load_dataset

    try:
        rows = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")["text"]
    except Exception as error:  # the hub client has no common base class for "no network"
        raise ConnectionError(
            f"WikiText-2 is neither cached nor reachable ({type(error).__name__}). "
            "Connect to a hub once, or use tasks.texts.articles(), which needs no network."
        ) from error
    return Article(
        title="WikiText-2 test", text=" ".join(rows)[:n_chars], source="wikitext-2-raw-v1"
    )


def plain_text(markup: str) -> str:
    """What a reader sees of wiki markup: no references, tables, pictures, categories or end matter.

    Templates vanish, except those that stand for words of the sentence (a converted quantity, a
    foreign word, a quotation).
    """
    # References go before parsing: in half-broken markup the parser does not see them as tags.
    markup = _REFERENCE.sub("", _COMMENT.sub("", markup))
    code = _before_end_matter(mwparserfromhell.parse(markup))
    text = _TABLE_LINE.sub("", _heard(code).strip_code())
    text = re.sub(r"\(\s*[;,]?\s*\)", "", text)  # brackets whose only content was a template
    text = re.sub(r"[^\S\n]+", " ", text)
    text = re.sub(r" ([,.;:)])", r"\1", text)
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", text).strip()


def _heard(code: Wikicode) -> Wikicode:
    """The same wikicode without its silent parts, at every depth."""
    heard: list[Node] = []
    for node in code.nodes:
        if isinstance(node, Template):
            heard.extend(_spoken(node))
        elif not _is_silent(node):
            if isinstance(node, Tag) and node.contents is not None:
                node.contents = _heard(node.contents)
            elif isinstance(node, Wikilink) and node.text is not None:
                node.text = _heard(node.text)
            heard.append(node)
    return Wikicode(heard)


def _spoken(template: Template) -> Iterator[Node]:
    for name in _SPOKEN_TEMPLATES.get(str(template.name).strip().lower(), ()):
        if template.has(name):
            yield from _heard(template.get(name).value).nodes
            yield Text(" ")


def _is_silent(node: Node) -> bool:
    if isinstance(node, Tag):
        return str(node.tag).strip().lower() in _SILENT_TAGS
    return isinstance(node, Wikilink) and (
        str(node.title).strip().lower().startswith(_SILENT_LINKS)
    )


def _before_end_matter(code: Wikicode) -> Wikicode:
    for heading in code.filter_headings(recursive=False):
        if str(heading.title).strip().lower() in _LAST_HEADINGS:
            return Wikicode(code.nodes[: code.index(heading)])
    return code


def _articles_file() -> Path:
    package = find_spec("gensim")
    if package is None or package.origin is None:
        raise FileNotFoundError(
            "the Wikipedia articles come with the wheel gensim 4.4.0, which is not installed: "
            "pip install --no-deps gensim==4.4.0"
        )
    folder = Path(package.origin).parent / "test" / "test_data"
    files = sorted(folder.glob(ARTICLES_FILE))
    if not files:
        raise FileNotFoundError(
            f"the installed gensim has no {ARTICLES_FILE}: "
            "pip install --no-deps --force-reinstall gensim==4.4.0"
        )
    return files[0]


def _pages(path: Path) -> Iterator[tuple[str, str]]:
    """Title and markup of every article of a dump that is not a redirect."""
    with bz2.open(path) as file:
        for _, page in ElementTree.iterparse(file):
            if not page.tag.endswith("}page"):
                continue
            is_article = page.findtext("{*}ns") == "0" and page.find("{*}redirect") is None
            if is_article:
                yield page.findtext("{*}title") or "", page.findtext("{*}revision/{*}text") or ""
            page.clear()
