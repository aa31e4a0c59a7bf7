"""A headless Chromium by its debugging pipe: what a page shows, asks of the network and tells its console."""

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def installed() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser with one page; every command waits for its answer, and events are kept."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={folder}"]
        command = [str(installed()), *flags, "--remote-debugging-pipe", "about:blank"]
        launch = "import os, sys; a, b = map(os.dup, map(int, sys.argv[1:3])); os.dup2(a, 3); os.dup2(b, 4); "
        launch += "[os.set_inheritable(fd, True) for fd in (3, 4)]; os.execv(sys.argv[3], sys.argv[3:])"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", launch, str(ours[0]), str(theirs[1]), *command],
            pass_fds=(ours[0], theirs[1]), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(ours[0])
        os.close(theirs[1])
        self._to, self._from = os.fdopen(ours[1], "wb", 0), os.fdopen(theirs[0], "rb", 0)
        self._left, self._sent, self._page = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        try:
            target = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
            self._page = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Log", "Runtime"):
                self.ask(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if self._page:
            message["sessionId"] = self._page
        self._to.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._sent:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            more = self._from.read(1 << 16)
            assert more, "the browser ended"
            self._left += more
        found, _, self._left = self._left.partition(b"\0")
        return json.loads(found)

    def open(self, file: Path, width: int, scheme: str) -> None:
        """Show a file at a width, in ``light`` or ``dark``; events begin anew."""
        self.events.clear()
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Page.navigate", url=file.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, file: Path) -> None:
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def requests(self) -> list[str]:
        """Return the addresses that were asked for."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[str]:
        """Return what the console was told, and what was thrown."""
        methods = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in methods]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._to.close()
        self._from.close()
