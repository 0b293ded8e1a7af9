"""Every page of the built site as an image, light and dark, in build/screenshots/docs: ``make docs``, then this.

``python docs/screenshots.py [PAGE ...]`` takes the named pages only, like ``install gpu``. It also names pages that are
wider than the window, and images that are missing.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
SITE, OUT = ROOT / "build" / "site", ROOT / "build" / "screenshots" / "docs"
WIDTH, HEIGHT = 1280, 1600
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main(wanted: list[str]) -> int:
    found = (path for path in sorted(SITE.rglob("*.html")) if path.name != "404.html")
    pages = [path for path in found if not wanted or path.stem in wanted]
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not pages or browser is None:
        print("nothing to take: run `make docs browser` first", file=sys.stderr)
        return 1
    OUT.mkdir(parents=True, exist_ok=True)
    flags = ["--no-sandbox"] if os.getuid() == 0 else []
    complaints: list[str] = []
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=browser, args=flags)
        for theme in ("light", "dark"):
            size = {"width": WIDTH, "height": HEIGHT}
            page = running.new_page(viewport=size, color_scheme=theme)  # type: ignore[arg-type]
            for path in pages:
                complaints += taken(page, path, theme)
        running.close()
    print("\n".join(complaints) or f"{2 * len(pages)} images in {OUT.relative_to(ROOT)}, nothing to complain of")
    return bool(complaints)


def taken(page: Page, path: Path, theme: str) -> list[str]:
    name = path.relative_to(SITE).with_suffix("").as_posix().replace("/", "-")
    page.goto(path.as_uri())
    page.screenshot(path=OUT / f"{name}-{theme}.png")
    wide = page.evaluate("document.documentElement.scrollWidth") > WIDTH
    missing = page.evaluate(
        "[...document.images].filter((image) => image.complete && !image.naturalWidth).map((image) => image.src)"
    )
    return [
        *([f"{name} ({theme}) is wider than the window"] if wide else []),
        *(f"{name}: no image {src}" for src in missing),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
