"""Reports of an accept and of a reject, and pictures of both on light and on dark pages: `make screenshots`, into build/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
BROWSERS = ("chromium-headless-shell", "chromium")
KERNELS = {"accept": "sdpa-flash", "reject": "oracle.mutants.planted:v_page_rolled"}
SCHEMES = {"dark": 0, "light": 1}  # Chromium's preferredColorScheme
WIDTH, TALLEST = 1100, 9000  # pixels of the window; a picture is cut below the page


def report(name: str, kernel: str) -> Path:
    """The HTML report of a kernel on the short profile; its Markdown lies beside it."""
    html, markdown = (f"{BUILD.name}/{name}.{end}" for end in ("html", "md"))
    oracle = (sys.executable, "-m", "oracle", "accept", kernel, "--profile", "quick", "--seed", "1")
    done = subprocess.run([*oracle, "--html", html, "--markdown", markdown], cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
    if done.returncode != (name == "reject"):
        sys.exit(f"{kernel}: expected the verdict {name}, got exit status {done.returncode}")
    return ROOT / html


def photograph(browser: str, html: Path, scheme: str) -> Path:
    """A picture of the whole page."""
    png = html.with_name(f"{html.stem}-{scheme}.png")
    options = ["--headless", "--hide-scrollbars", "--disable-gpu", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium's sandbox does not start for root
    command = [browser, *options, f"--window-size={WIDTH},{TALLEST}", f"--screenshot={png}", html.as_uri()]
    subprocess.run(command, check=True, timeout=120, stderr=subprocess.DEVNULL)
    _cut(png)
    return png


def _cut(png: Path) -> None:
    """The picture without what lies below the last line that is not plain."""
    pixels = np.asarray(Image.open(png).convert("RGB"))
    busy = np.flatnonzero((pixels != pixels[-1, -1]).any((1, 2)))
    if busy[-1] > TALLEST - 10:
        sys.exit(f"{png}: the page is taller than {TALLEST} pixels; raise TALLEST")
    Image.fromarray(pixels[: busy[-1] + 40]).save(png)


def main() -> None:
    """Two reports, four pictures."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"no {' or '.join(BROWSERS)} on PATH; on Debian: apt-get install chromium-headless-shell fonts-dejavu-core")
    BUILD.mkdir(exist_ok=True)
    for name, kernel in KERNELS.items():
        html = report(name, kernel)
        for scheme in SCHEMES:
            print(photograph(browser, html, scheme).relative_to(ROOT))


if __name__ == "__main__":
    main()
