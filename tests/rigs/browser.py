"""A headless Chromium, where Debian's is installed."""

import asyncio
import shutil
import tempfile

import pytest

CHROMIUM = shutil.which("chromium")
_TIMEOUT_S = 60.0


async def page_of(url: str, *options: str) -> str:
    """The page's document after its scripts have run for some seconds of the page's own clock."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        words += ["--virtual-time-budget=5000", *options, "--dump-dom", url]
        browser = await asyncio.create_subprocess_exec(
            CHROMIUM, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                output, _ = await browser.communicate()
        finally:
            if browser.returncode is None:
                browser.kill()
                await browser.wait()
    return output.decode()
