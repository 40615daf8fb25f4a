"""The report's page: whole in itself, safe with any name, and its charts are there."""

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from directory.analytics.charts import all_charts
from directory.analytics.figures import Figures, figures
from directory.analytics.page import page
from directory.analytics.pictures import NoPictures, draw
from directory.analytics.study import Study
from tests.analytics.forty import frames
from tests.analytics.support import access

CHARTS = ("over-time", "miss-ratio", "reuse-distance", "working-set")
VOID = {"meta", "line", "rect", "path", "circle"}


def of_forty(file: str = "log") -> Figures:
    study = Study(observed=True)
    for frame in frames():
        study.add(frame)
    study.end()
    return figures(study, file=file, format="access log")


class Outline(HTMLParser):
    """Checks that tags nest, and collects ids, texts of attributes and tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_page_nests_and_has_every_chart_and_table_once() -> None:
    outline = Outline(page(of_forty()))
    assert len(outline.ids) == len(set(outline.ids))
    for name in (*CHARTS, "causes", "tenants", "instances"):
        assert name in outline.ids


def test_the_page_asks_nothing_of_anyone() -> None:
    text = page(of_forty())
    outline = Outline(text)
    assert not outline.tags & {"script", "link", "img", "iframe", "object", "image", "use"}
    assert {"src", "href", "xlink:href"}.isdisjoint(name for name, _ in outline.attributes)
    assert not re.search(r"https?:|url\(|@import", text)


def test_every_picture_says_what_it_shows_without_being_seen() -> None:
    text = page(of_forty())
    pictures = re.findall(r"<svg .*?</svg>", text, re.DOTALL)
    assert len(pictures) == 2 * len(CHARTS)
    for picture in pictures:
        labels = re.search(r'aria-labelledby="(\S+) (\S+)"', picture)
        assert 'role="img"' in picture
        assert labels
        assert f'<title id="{labels[1]}">' in picture
        assert f'<desc id="{labels[2]}">' in picture


def test_light_and_dark_define_the_same_colours() -> None:
    text = page(of_forty())
    light, dark = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    names = [set(re.findall(r"(--[a-z-]+):", block)) for block in (light, dark)]
    assert names[0] == names[1]
    assert set(re.findall(r"var\((--[a-z-]+)\)", text)) <= names[0]


def test_names_from_a_file_are_never_taken_for_markup() -> None:
    evil = "<script>alert(1)</script>&\"'"
    study = Study(observed=True)
    for at_us in (0, 5_000_000):
        study.add(access("AB", at_us=at_us, tenant=evil, instance=evil, request=evil))
    study.end()
    text = page(figures(study, file=evil, format="access log"))
    assert "<script" not in text
    Outline(text)


def test_the_same_figures_give_the_same_page() -> None:
    assert page(of_forty()) == page(of_forty())


def test_a_single_request_makes_a_page_without_charts() -> None:
    study = Study(observed=False)
    study.add(access("AB"))
    study.end()
    found = figures(study, file="one", format="mooncake")
    assert all_charts(found) == []
    Outline(page(found))


def test_nothing_at_all_makes_a_page() -> None:
    study = Study(observed=True)
    study.end()
    Outline(page(figures(study, file="empty", format="access log")))


def test_numbers_on_the_axes_never_overlap_on_a_phone() -> None:
    text = page(of_forty())
    for picture in re.findall(r'<svg class="narrow".*?</svg>', text, re.DOTALL):
        by_row: dict[str, list[tuple[float, float]]] = {}
        for x, y, anchor, words in re.findall(
            r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)" class="axis">([^<]*)<', picture
        ):
            if anchor == "middle":
                half = 6.4 * len(words) / 2
                by_row.setdefault(y, []).append((float(x) - half, float(x) + half))
        for spans in by_row.values():
            spans.sort()
            assert all(left[1] <= right[0] for left, right in pairwise(spans))
            assert spans[0][0] >= 0
            assert spans[-1][1] <= 358


def test_a_picture_without_matplotlib_is_one_clear_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(NoPictures, match="pip install 'treecored"):
        draw(of_forty(), tmp_path / "x.png")


def test_a_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `analytics` is not installed")
    draw(of_forty(), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


MEASURE = """
const doc = document.querySelector("iframe").contentDocument, found = {};
found.width = doc.scrollingElement.scrollWidth;
found.charts = {};
for (const section of doc.querySelectorAll("section")) {
  const drawn = [...section.querySelectorAll("svg")].filter(svg => svg.getClientRects().length);
  found.charts[section.id] = drawn.map(svg => {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map(text => text.getBoundingClientRect());
    return {
      kind: svg.getAttribute("class"), left: box.left, right: box.right, height: box.height,
      smallest: Math.min(...texts.map(text => text.height)),
      outside: [...svg.querySelectorAll("text")].filter(text => {
        const at = text.getBoundingClientRect();
        return at.left < box.left - 1 || at.right > box.right + 1;
      }).map(text => text.textContent),
    };
  });
}
document.body.textContent = "found " + JSON.stringify(found) + " end";
"""


def browsed(text: str, folder: Path, width: int) -> dict[str, Any]:
    """What a browser makes of a page that is so many pixels wide."""
    assert BROWSER is not None
    harness = folder / f"{width}.html"
    harness.write_text(
        f"<!doctype html><body><iframe style='border:0' width={width} height=4000 "
        f'srcdoc="{html.escape(text)}"></iframe><script>onload = () => {{{MEASURE}}}</script>',
        encoding="utf-8",
    )
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
            f"--user-data-dir={folder / 'profile'}", harness.as_uri(),
        ],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = re.search(r"found (\{.*\}) end", done.stdout)
    assert said is not None, done.stdout[:2_000]
    found: dict[str, Any] = json.loads(html.unescape(said[1]))
    return found


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize(("width", "kind"), [(390, "narrow"), (1200, "wide")])
def test_a_browser_opens_the_page_and_finds_its_charts(
    width: int, kind: str, tmp_path: Path
) -> None:
    found = browsed(page(of_forty()), tmp_path, width)
    assert found["width"] <= width  # nothing of the page itself has to be scrolled sideways
    for name in CHARTS:
        (chart,) = found["charts"][name]
        assert chart["kind"] == kind
        assert 0 <= chart["left"] < chart["right"] <= width
        assert chart["right"] - chart["left"] > width / 2
        assert chart["height"] > 100
        assert chart["smallest"] >= 11
        assert chart["outside"] == []
