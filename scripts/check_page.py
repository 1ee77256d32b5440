#!/usr/bin/env python3
"""Use the page of a server in a headless chromium, as a visitor does, and report its faults.

    specjax serve --port 8000 --api-key secret &
    scripts/check_page.py http://127.0.0.1:8000 --api-key secret --screenshots docs/images

A model with a chat template is spoken to in its chat, other models continue a text. It needs chromium or Chrome, and
nothing else: it speaks the DevTools protocol through a pipe.
"""

import argparse
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = "chromium", "chromium-browser", "google-chrome"
SECONDS = 120.0  # for what should happen
DESKTOP, PHONE = (1280, 900), (390, 844)  # width and height
LEAST_CONTRAST = 4.5  # of text, as WCAG 2.1 AA asks for
CONTRASTS = """
(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = text => {
    const [r, g, b] = parse(text).slice(0, 3).map(x => x / 255).map(
      x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const back = element => {
    for (; element; element = element.parentElement) {
      const color = getComputedStyle(element).backgroundColor;
      if (parse(color).length < 4 || parse(color)[3] > 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const found = {};
  for (const element of document.querySelectorAll(
    "h1, h2, p, label, dt, dd, button:enabled, textarea, .legend, #bars span, #text span")) {
    const [a, b] = [light(getComputedStyle(element).color), light(back(element))].sort((x, y) => y - x);
    const name = element.tagName + "." + element.className;
    found[name] = Math.min(found[name] ?? 99, (a + 0.05) / (b + 0.05));
  }
  return found;
})()
"""
UNNAMED = """
[...document.querySelectorAll("input, textarea, button")].filter(
  x => !(x.labels && x.labels.length) && !x.textContent.trim() && !x.ariaLabel && !x.getAttribute("aria-labelledby")
).map(x => x.id)
"""
OUT_OF_SIGHT = """
["load", "text", "status", "figures", "prompt", "start"].filter(id => {
  const box = $(id).getBoundingClientRect();
  return !(box.width && box.top >= 0 && box.left >= 0 && box.bottom <= innerHeight && box.right <= innerWidth);
})
"""
UNEXPLAINED = """
[...document.querySelectorAll(".term")].filter(x => x.offsetParent).filter(x => {
  x.scrollIntoView({block: "center"});
  explain(null);
  x.focus();
  x.dispatchEvent(new FocusEvent("focusin", {bubbles: true}));
  const box = $("tip").getBoundingClientRect();
  const isSeen = box.width && box.top >= 0 && box.left >= 0 && box.bottom <= innerHeight && box.right <= innerWidth;
  return $("tip").textContent.length < 20 || x.getAttribute("aria-describedby") !== "tip" || !isSeen;
}).map(x => x.textContent)
"""
STOP = """
new Promise(resolve => {
  const timer = setInterval(() => {
    if (document.querySelectorAll("#text .answer span").length < 4) return;
    clearInterval(timer);
    $("stop").click();
    resolve();
  }, 2);
})
"""


class Browser:
    """A headless browser with one page."""

    def __init__(self, program: str):
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read, self._commands = os.pipe()
        self._answers, write = os.pipe()
        flags = ["--headless=new", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={self._profile.name}"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            flags.append("--no-sandbox")  # which chromium needs where root runs it
        line = f'exec "$@" 3<&{read} 4>&{write}'  # the descriptors that chromium expects
        command = ["bash", "-c", line, "browser", program, *flags, "about:blank"]
        options: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "pass_fds": (read, write)}
        self._process = subprocess.Popen(command, **options)
        os.close(read)
        os.close(write)
        self._number, self._rest, self.events = 0, b"", []
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._answers, 2**16)
            if not part:
                raise RuntimeError("the browser has ended")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def run(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Wait until an expression is true, and return it."""
        end = time.monotonic() + SECONDS
        while not (value := self.run(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"it did not become true within {SECONDS:g} seconds: {expression}")
            time.sleep(0.05)
        return value

    def resize(self, size: tuple[int, int], *, is_phone: bool = False, is_dark: bool = False) -> None:
        """Show the page on a screen of a size, in light or dark colours."""
        width, height = size
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self.send("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self) -> bytes:
        """Return the screen as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._profile.cleanup()


def find_browser() -> str | None:
    """Return the path of a browser, None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def check(browser: Browser, url: str, key: str | None, screenshots: Path | None) -> list[str]:
    """Use the page, and return its faults."""
    browser.resize(DESKTOP)
    browser.send("Page.navigate", url=url)
    wrong = [] if key is None else check_key(browser, key)
    num_drafts = len(browser.wait_for('[...document.querySelectorAll("#bars li")].map(x => x.textContent)'))
    is_chat = browser.run("isChat()")
    wrong += check_generation(browser, num_drafts, is_chat)
    wrong += check_looks(browser, screenshots)
    wrong += check_stop_and_errors(browser)
    for event in browser.events:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            wrong.append(f"the page failed: {params['exceptionDetails']}")
        asked = params.get("request", {}).get("url", url) if event["method"] == "Network.requestWillBeSent" else url
        if not asked.startswith((url, "data:")):
            wrong.append(f"the page asks for {asked}")
    return wrong


def check_key(browser: Browser, key: str) -> list[str]:
    """Give a wrong key and then the right one, for which the page asks in words."""
    browser.wait_for('!$("unlock").hidden && $("start").disabled')
    wrong = [] if "asks for a key" in browser.run('$("unlock").innerText') else ["it does not ask for the key in words"]
    if problem := browser.run('$("problem").textContent + $("refused").textContent'):
        wrong.append(f"a server with a key is no error yet, got {problem!r}")
    browser.run('$("key").value = "wrong"; $("unlock").requestSubmit()')
    if "does not know this key" not in (refused := browser.wait_for('$("refused").textContent')):
        wrong.append(f"it should say that the key is wrong, got {refused!r}")
    browser.run(f'$("key").value = {json.dumps(key)}; $("unlock").requestSubmit()')
    browser.wait_for('$("unlock").hidden && !$("start").disabled')
    return wrong


def check_generation(browser: Browser, num_drafts: int, is_chat: bool) -> list[str]:
    """Generate two texts or answers of a chat, and check the figures beside them."""
    browser.run('document.querySelector(".example").click()')
    prompt = browser.run('$("prompt").value')
    wrong = [] if prompt else ["an example should become the prompt"]
    browser.run('$("tokens").value = 120; $("temperature").value = 0')
    for number in (1, 2):
        cleared = browser.run(f"""
            $("prompt").value = {json.dumps(prompt)};
            $("start").click();
            [...FIGURES.map($), ...document.querySelectorAll("#bars span")].map(x => x.textContent)
        """)
        if set(cleared) != {"-"}:
            wrong.append(f"figures and bars should be empty as a text begins, got {cleared}")
        status = browser.wait_for('$("status").textContent.startsWith("Done") && $("status").textContent')
        if not re.fullmatch(r"Done: \d+ tokens in \d+ steps\.", status):
            wrong.append(f"it says {status!r}")
        shown = browser.run('[...document.querySelectorAll("#text .prompt")].map(x => x.textContent)')
        if shown != [prompt] * (number if is_chat else 1):
            wrong.append(f"each prompt should stand above its text, got {shown}")
    kinds = browser.run('[...new Set([...document.querySelectorAll(".answer span")].map(x => x.className))]')
    if not {"accepted", "recovered", "bonus"} <= set(kinds):
        wrong.append(f"tokens of all kinds should be coloured, got {kinds}")
    numbers = browser.run("FIGURES.map(id => $(id).textContent)")
    if "-" in numbers:
        wrong.append(f"numbers are missing: {numbers}")
    widths = browser.run('[...document.querySelectorAll("#bars .track div")].map(x => parseFloat(x.style.width))')
    if len(widths) != num_drafts or not 0 < widths[-1] <= widths[0] <= 100:
        wrong.append(f"the bars of {num_drafts} positions should fall, got {widths}")
    browser.run('$("copy").click()')
    browser.wait_for('$("copy").textContent === "Copied"')
    browser.wait_for('$("copy").textContent === "Copy"')
    return wrong


def check_looks(browser: Browser, screenshots: Path | None) -> list[str]:
    """Look at the page on a desktop and on a phone, in light and dark colours."""
    wrong = []
    pictures = {(DESKTOP, False): "server.png", (PHONE, True): "server-phone.png"}
    for size in (DESKTOP, PHONE):
        for is_dark in (False, True):
            browser.resize(size, is_phone=size is PHONE, is_dark=is_dark)
            browser.run("scrollTo(0, 0); explain(null); document.activeElement.blur()")
            where = f"on a screen {size[0]} wide, {'in the dark' if is_dark else 'in the light'}"
            if screenshots is not None and (size, is_dark) in pictures:
                (screenshots / pictures[size, is_dark]).write_bytes(browser.screenshot())
            wrong += [f"{id} is not in sight {where}" for id in browser.run(OUT_OF_SIGHT)]
            wrong += [
                f"{name} has a contrast of {ratio:.1f} {where}"
                for name, ratio in browser.run(CONTRASTS).items()
                if ratio < LEAST_CONTRAST
            ]
        if (width := browser.run("document.documentElement.scrollWidth")) > size[0]:
            wrong.append(f"on a screen {size[0]} wide the page is {width} wide")
        wrong += [f"{term!r} is not explained on a screen {size[0]} wide" for term in browser.run(UNEXPLAINED)]
        browser.run('document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}))')
        if not browser.run('$("tip").hidden'):
            wrong.append("the key Escape should hide an explanation")
    wrong += [f"{name} has no name for those who do not see it" for name in browser.run(UNNAMED)]
    browser.resize(DESKTOP)
    return wrong


def check_stop_and_errors(browser: Browser) -> list[str]:
    """Stop a request, and make one that the server refuses."""
    browser.run('$("clear").click(); $("prompt").value = "def fibonacci(n):"')
    browser.run('$("tokens").value = $("tokens").max - 112; $("start").click()')
    browser.run(STOP)
    browser.wait_for('$("status").textContent.startsWith("Stopped")')
    browser.wait_for('$("load").textContent === "0 running, 0 waiting"')
    browser.run('$("prompt").value = "def fibonacci(n):"; $("form").noValidate = true')
    browser.run('$("tokens").value = 10000000; $("start").click()')
    problem = browser.wait_for('$("problem").textContent')
    return [] if "max_tokens" in problem else [f"the error of the server should be shown, got {problem!r}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--api-key", metavar="KEY", help="key of the server, which the page must ask for")
    parser.add_argument("--screenshots", type=Path, metavar="DIR", help="write here what the page looks like")
    args = parser.parse_args()
    program = find_browser()
    if program is None:
        print(f"none of {', '.join(NAMES)} is installed", file=sys.stderr)
        return 2
    browser = Browser(program)
    try:
        wrong = check(browser, args.url.rstrip("/"), args.api_key, args.screenshots)
    finally:
        browser.close()
    print("\n".join(wrong) or "the page works")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
