"""Checks docs/_build as readers meet it: `make site-test`. Each page, in Chromium, in light and dark, on a phone.

No link within the site is dead, nothing is asked of another server, no page is wider than a phone, a search for
BatchNorm finds the page that explains it, and texts have the contrast that WCAG 2.1 AA asks for.
"""

import functools
import html.parser
import http.server
import pathlib
import shutil
import sys
import threading
import urllib.parse

from playwright import sync_api

SITE = pathlib.Path(__file__).resolve().parent / "_build"
PHONE = {"width": 390, "height": 844}
# Contrast of each visible text with the nearest opaque ground behind it, as WCAG computes it; large texts need less.
CONTRAST = """() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const bad = new Set();
  for (const e of document.querySelectorAll('article *, .sidebar-tree *, .toc-tree *')) {
    const own = [...e.childNodes].filter(n => n.nodeType == 3).map(n => n.textContent).join('').trim();
    const style = getComputedStyle(e);
    if (!own || !e.getClientRects().length || style.visibility == 'hidden') continue;
    if (e.closest('.headerlink, button')) continue;
    let ground = [255, 255, 255];
    for (let p = e; p; p = p.parentElement) {
      const c = parse(getComputedStyle(p).backgroundColor);
      if (c.length < 4 || c[3] == 1) { ground = c; break; }
    }
    const [a, b] = [light(parse(style.color)), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05), large = parseFloat(style.fontSize) >= 24;
    if (ratio < (large ? 3 : 4.5)) bad.add(`${ratio.toFixed(2)} ${style.color} on ${ground}: ${own.slice(0, 40)}`);
  }
  return [...bad].slice(0, 3);
}"""

# What reaches over the edge of the screen without a bar to scroll it by.
TOO_WIDE = """() => [...document.querySelectorAll('article *')].filter(e => {
  if (e.getBoundingClientRect().right <= innerWidth + 1) return false;
  for (let p = e; p.tagName != 'ARTICLE'; p = p.parentElement)
    if (/auto|scroll|hidden/.test(getComputedStyle(p).overflowX)) return false;
  return true;
}).slice(0, 3).map(e => e.tagName + ': ' + e.textContent.trim().slice(0, 40))"""


class Page(html.parser.HTMLParser):
    """Collects the anchors of a page and what it leads to."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links = set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.anchors.add(named.get("id"))
        self.links += [named[key] for key in ("href", "src") if named.get(key) and tag != "form"]


def dead_links():
    """Yields the links of all pages that lead to a file or an anchor that is not there."""
    pages = {path: Page(path) for path in SITE.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                yield f"{path.relative_to(SITE)}: no file {link}"
            elif (
                parts.fragment and target in pages and urllib.parse.unquote(parts.fragment) not in pages[target].anchors
            ):
                yield f"{path.relative_to(SITE)}: no anchor {link}"


def in_browser(browser, url):
    """Yields what is wrong with the pages as Chromium shows them."""
    asked_for, errors = [], []
    for scheme in ("light", "dark"):
        page = browser.new_page(viewport=PHONE, color_scheme=scheme)
        page.on("request", lambda asked: asked_for.append(asked.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        for path in sorted(SITE.rglob("*.html")):
            name = path.relative_to(SITE).as_posix()
            page.goto(f"{url}/{name}")
            yield from (f"{name}: wider than a phone: {wide}" for wide in page.evaluate(TOO_WIDE))
            yield from (f"{name}, {scheme}: contrast {bad}" for bad in page.evaluate(CONTRAST))
        page.close()
    yield from (f"asks another server: {asked}" for asked in asked_for if not asked.startswith((url, "data:")))
    yield from (f"error in a page: {error}" for error in errors)
    page = browser.new_page()
    page.goto(f"{url}/index.html")
    page.keyboard.press("/")
    page.fill("input[name=q]", "BatchNorm")
    page.keyboard.press("Enter")
    page.wait_for_function("/found \\d+/.test(document.querySelector('#search-results .search-summary')?.textContent)")
    hits = page.locator("#search-results ul.search li a").all_inner_texts()
    print(f"search for BatchNorm: {len(hits)} hits: {', '.join(hits[:4])}")
    if not any("Equivalence" in hit for hit in hits):
        yield "a search for BatchNorm does not find the page on equivalence"


def main():
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    wrong = list(dead_links())
    with sync_api.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        wrong += in_browser(browser, f"http://127.0.0.1:{server.server_port}")
        browser.close()
    server.shutdown()
    print("\n".join(wrong) or "all pages are fine")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
