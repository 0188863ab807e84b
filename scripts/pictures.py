"""Makes the pictures of page and terminal in docs/images, and those of the site: `make pictures`.

Three simulated engines generate behind a gateway for a minute. A trainer updates their weights; one engine dies and is
replaced. Chromium draws the page, the output of `status` and the site at 1440 and 500 pixels, light and dark. Pictures
that no page shows are in out/pictures alone.
"""

import asyncio
import contextlib
import html
import io
import os
import shutil
import tempfile
from pathlib import Path

from aiohttp import web
from PIL import Image

from engines.config import SimConfig
from engines.engine import Json
from gateway.cli.output import print_fleet
from gateway.config.schema import Config
from tests.rigs.browser import CHROMIUM
from tests.rigs.rig import FAST_WATCH, Rig

ROOT = Path(__file__).parents[1]
LOOKED_AT = ROOT / "out" / "pictures"
SHOWN = (
    "dashboard-light",
    "dashboard-dark",
    "dashboard-narrow-light",
    "dashboard-narrow-dark",
    "status-light",
    "status-dark",
)
WIDTHS = {"": 1440, "-narrow": 500}
COLUMNS = {"": 176, "-narrow": 59}
HEIGHTS = {"": 440, "-narrow": 640}
SCHEMES = {"dark": 0, "light": 1}
COLOURS = 256
MODEL = "Qwen2-7B"
BATCH_S, UPDATE_S, DEATH_S, ABSENCE_S, WHOLE_S = 6.0, 9.0, 26.0, 6.0, 70.0
SIM = {"decode_step_s": 0.02, "decode_step_per_seq_s": 0.0005, "mean_tokens": 250, "kv_tokens": 24_000}
TERMINAL = """<!doctype html><meta name="color-scheme" content="light dark"><style>
body {{ margin: 0; padding: 16px; background: light-dark(#fbfbfc, #12161d); color: light-dark(#1b2330, #e4e9f0); }}
pre {{ margin: 0; font: 13px/1.5 monospace; white-space: pre-wrap; overflow-wrap: anywhere; }}
</style><pre>$ rollout-gateway status
{text}</pre>"""


async def main() -> None:
    LOOKED_AT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        weights = {"store": f"{folder}/store"}
        tree = {
            "engine": {"kind": "sim", "model": MODEL, "num_replicas": 3},
            "fleet": FAST_WATCH,
            "weights": weights,
        }
        rig = await Rig(Config.model_validate(tree), SimConfig.model_validate(SIM)).start()
        try:
            tasks = [asyncio.create_task(work) for work in (batches(rig), updates(rig), death(rig), watch(rig))]
            await asyncio.sleep(WHOLE_S)
            await draw("dashboard", rig.url + "/dashboard", {"": 1520, "-narrow": 2500})
            terminal = Path(folder) / "status.html"
            report = (await rig.get("/status"))[1]
            for kind, columns in COLUMNS.items():
                terminal.write_text(TERMINAL.format(text=html.escape(status(report, columns))), encoding="utf-8")
                await draw("status", terminal.as_uri(), {kind: HEIGHTS[kind]})
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await rig.stop()
        await site(f"{folder}/site")
    for name in SHOWN:
        shutil.copy(LOOKED_AT / f"{name}.png", ROOT / "docs" / "images")


async def batches(rig: Rig) -> None:
    """A trainer's batches: each comes when the one before has ended."""
    while True:
        prompts = [[3 + number, 4] * 20 for number in range(24)]
        await rig.complete(prompts, model=MODEL, n=4, max_tokens=900)
        await asyncio.sleep(BATCH_S / 4)


async def updates(rig: Rig) -> None:
    while True:
        await asyncio.sleep(UPDATE_S)
        with contextlib.suppress(AssertionError):  # a replica is missing, or has joined
            await rig.open_group()
            await rig.update()


async def death(rig: Rig) -> None:
    await asyncio.sleep(DEATH_S)
    await rig.replicas.pop(1).kill()
    await asyncio.sleep(ABSENCE_S)
    await rig.add_replica("engine-4kq8z1", seed=9)


async def watch(rig: Rig) -> None:
    """Have the gateway look at its engines each second."""
    while True:
        await rig.get("/dashboard.json")
        await asyncio.sleep(1.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def status(report: Json, columns: int) -> str:
    """What `rollout-gateway status` prints about the fleet on a terminal."""
    os.environ["COLUMNS"] = str(columns)
    out = Terminal()
    with contextlib.redirect_stdout(out):
        print_fleet(report)
    return out.getvalue()


async def site(folder: str) -> None:
    """Build the site and draw its first page, which searches over HTTP alone."""
    mkdocs = await asyncio.create_subprocess_exec(
        ROOT / ".venv-site/bin/mkdocs", "build", "-q", "-d", folder, cwd=ROOT, stderr=asyncio.subprocess.DEVNULL
    )
    assert await mkdocs.wait() == 0
    runner = web.AppRunner(web.Application())
    runner.app.router.add_static("/", folder)
    await runner.setup()
    server = web.TCPSite(runner, "127.0.0.1", 0)
    await server.start()
    await draw("site", f"http://127.0.0.1:{runner.addresses[0][1]}/index.html", {"": 1000, "-narrow": 1000})
    await runner.cleanup()


async def draw(name: str, url: str, heights: dict[str, int]) -> None:
    """Draw an address at each width, light and dark."""
    assert CHROMIUM is not None, "chromium is not installed: apt-get install chromium"
    for kind, height in heights.items():
        for scheme, number in SCHEMES.items():
            picture = LOOKED_AT / f"{name}{kind}-{scheme}.png"
            with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
                words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
                words += [f"--user-data-dir={profile}", f"--blink-settings=preferredColorScheme={number}"]
                words += [f"--window-size={WIDTHS[kind]},{height}", "--virtual-time-budget=4000"]
                process = await asyncio.create_subprocess_exec(
                    CHROMIUM, *words, f"--screenshot={picture}", url, stderr=asyncio.subprocess.DEVNULL
                )
                await asyncio.wait_for(process.wait(), 120)
            Image.open(picture).convert("RGB").quantize(COLOURS).save(picture, optimize=True)


if __name__ == "__main__":
    asyncio.run(main())
