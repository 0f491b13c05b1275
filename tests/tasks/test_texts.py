import builtins
from itertools import islice

import pytest

from polykv_lib.tasks import texts
from polykv_lib.tasks.texts import articles, plain_text, wikitext2


def test_articles_are_long_real_prose_in_the_order_of_the_dump() -> None:
    taken = list(islice(articles(min_chars=20_000), 3))
    assert [article.title for article in taken] == ["Anarchism", "Autism", "Alabama"]
    assert all(len(article.text) >= 20_000 for article in taken)
    assert taken[1].text.startswith("Autism is a neurodevelopmental disorder")
    for article in taken:
        assert not any(mark in article.text for mark in ("{{", "}}", "[[", "<ref", "Category:"))


def test_articles_are_cleaned_as_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned: list[str] = []
    monkeypatch.setattr(texts, "plain_text", lambda markup: cleaned.append(markup) or markup)
    next(articles())
    assert len(cleaned) == 1


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("A '''bold''' [[Moon|lunar]] word.<ref>{{cite|x}} 1999</ref>", "A bold lunar word."),
        ("They took {{convert|47.5|lb|kg}} of it.", "They took 47.5 lb of it."),
        ("'''Apollo''' ({{IPA|x}}) is ''{{lang|la|deus}}''.", "Apollo is deus."),
        ("{{Infobox|a=1}}\n{| class=x\n| cell\n|}\nBody.", "Body."),
        ("[[File:A.jpg|thumb|A [[cat]]]]Body [[Category:X]]", "Body"),
        ("Body.\n\n== History ==\nOld.\n\n== See also ==\n* [[B]]", "Body.\n\n History \nOld."),
        ("x <math>a^2</math> y", "x y"),
    ],
)
def test_markup_leaves_only_what_a_reader_sees(markup: str, text: str) -> None:
    assert " ".join(plain_text(markup).split()) == " ".join(text.split())


def test_a_missing_wheel_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(texts, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps gensim==4\.4\.0"):
        next(articles())


def test_wikitext_without_a_network_says_what_else_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Offline:
        @staticmethod
        def load_dataset(*args: object, **kwargs: object) -> object:
            raise OSError("Couldn't reach the Hub")

    real_import = builtins.__import__
    monkeypatch.setattr(
        builtins,
        "__import__",
        lambda name, *args: Offline if name == "datasets" else real_import(name, *args),
    )
    with pytest.raises(ConnectionError, match=r"neither cached nor reachable \(OSError\)"):
        wikitext2()
