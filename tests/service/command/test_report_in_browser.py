"""The report in a browser: no text is cut or overflows, wide or narrow, light or dark, and no file is fetched."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from raydix.actors import LocalPrefixCache
from raydix.actors.report.page import render
from raydix.schemas import (
    CacheConfig,
    CacheStats,
    DiskPoolStats,
    DiskTierStats,
    GhostConfig,
    PoolConfig,
    PoolExhausted,
    PoolStats,
    TenantConfig,
    TierStats,
)

CONFIG = CacheConfig(
    page_size=4,
    pool=PoolConfig(num_slots=4_096, device="cpu"),
    ghost=GhostConfig(),
    tenants=(TenantConfig(name="a tenant", extra_key="a", floor_slots=1_024, cap_slots=2_048),),
)
LONG_NAME = "a-namespace-of-a-name-without-a-place-to-break-" * 4
# Text beyond its container or the page, or cut by a box.
CUT_TEXTS = """() => {
  const cut = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    if (!text) continue;
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    if (!range.getClientRects().length) continue;  // not shown at this width
    const box = range.getBoundingClientRect();
    if (box.left < -0.5 || box.right > document.documentElement.clientWidth + 0.5) cut.push(text);
    for (let at = walker.currentNode.parentElement; at; at = at.parentElement) {
      const around = at.getBoundingClientRect();
      const sticksOut = box.left < around.left - 1 || box.right > around.right + 1;
      if (getComputedStyle(at).overflow !== 'visible' && sticksOut) cut.push(text);
      if (at.classList.contains('map') && (sticksOut || box.bottom > around.bottom + 1)) cut.push(text);
      if (getComputedStyle(at).userSelect === 'none') cut.push('not selectable: ' + text);
    }
  }
  return cut;
}"""
# Texts with overlapping boxes: one of them cannot be read.
OVERLAPS = """() => {
  const boxes = [...document.querySelectorAll('td, th, dt, dd, h1, h2, p, .x span, .y span, .map span, li')]
    .filter(each => each.textContent.trim() && each.offsetParent)
    .map(each => [each.textContent.trim(), each.getBoundingClientRect()]);
  const pairs = [];
  boxes.forEach(([a, x], place) => boxes.slice(place + 1).forEach(([b, y]) => {
    const wide = Math.min(x.right, y.right) - Math.max(x.left, y.left);
    const high = Math.min(x.bottom, y.bottom) - Math.max(x.top, y.top);
    if (wide > 1 && high > 1) pairs.push(a + ' | ' + b);
  }));
  return pairs;
}"""
LABELS = (
    "() => [...document.querySelectorAll('.map span')].filter(each => each.offsetParent).map(each => each.innerText)"
)
CONTRAST = """() => {
  const light = color => {
    const [r, g, b] = color.match(/[0-9.]+/g).slice(0, 3)
      .map(each => each / 255).map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const page = light(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll('h1, p, td, th, dt, dd, span')].map(each => {
    const text = light(getComputedStyle(each).color);
    return (Math.max(text, page) + 0.05) / (Math.min(text, page) + 0.05);
  }).reduce((a, b) => Math.min(a, b));
}"""


def executable() -> str | None:
    """Return an installed browser, or None for the one that Playwright itself may have."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Any]:
    api = pytest.importorskip("playwright.async_api", reason="needs Playwright: .venv/bin/pip install playwright")
    async with api.async_playwright() as playwright:
        try:
            browser = await playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"needs a browser: .venv/bin/playwright install chromium ({str(error).splitlines()[0]})")
        yield browser
        await browser.close()


def with_tiers(stats: CacheStats) -> CacheStats:
    """Return statistics with a host tier and a disk, of full KV, windows and states, each with large numbers."""
    sizes = dict.fromkeys(("free_slots", "private_slots", "quarantined_slots", "evictable_slots", "protected_slots"), 0)
    host = PoolStats(num_slots=987_654_321, tree_slots=876_543_210, evicted=765_432_109, **sizes)
    disk = DiskPoolStats(**host.model_dump(), dormant_slots=654_321_098)
    return stats.model_copy(
        update={
            "host": TierStats(state="reserving", policy="2q", slots=host, swa=host, states=host),
            "disk": DiskTierStats(
                state="failed: /nvme/raydix is no folder of this node",
                admit="second_use",
                slots=disk,
                swa=disk,
                states=disk,
                uncommitted_s=12.0,
                unbound_namespaces=64,
            ),
        }
    )


@pytest.fixture(scope="module")
async def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the pages of an empty cache, of one with some traffic of every kind, and of one with tiers."""
    folder = tmp_path_factory.mktemp("reports")
    async with LocalPrefixCache(CONFIG) as cache:
        (folder / "empty.html").write_text(render(cache.report(), CONFIG, "kv-0"), encoding="utf-8")
        leases = []
        for number in range(120):
            prompt = [number % 7] * 64 + [number] * 64
            lease = await cache.acquire(prompt, extra_key=(None, "a", LONG_NAME)[number % 3])
            await lease.insert(prompt)
            leases.append(lease)
            if len(leases) > 5:
                await leases.pop(0).release()
        with pytest.raises(PoolExhausted):
            await cache.acquire([1] * 5_000)
        (folder / "busy.html").write_text(render(cache.report(), CONFIG, LONG_NAME), encoding="utf-8")
        counts = dict.fromkeys(("requests", "tokens_requested", "tokens_reused", "tokens_loaded"), 123_456_789)
        namespaces = tuple(name.model_copy(update=counts) for name in cache.report().namespaces)
        large = {"stats": with_tiers(await cache.stats()), "namespaces": namespaces}
        tiered = cache.report().model_copy(update=large)
        (folder / "tiers.html").write_text(render(tiered, CONFIG, LONG_NAME), encoding="utf-8")
        for lease in leases:
            await lease.release()
    return {path.stem: path for path in folder.glob("*.html")}


@pytest.mark.parametrize("width", [320, 400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("state", ["empty", "busy", "tiers"])
async def test_everything_can_be_read(
    browser: Any, pages: dict[str, Path], state: str, scheme: str, width: int
) -> None:
    context = await browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = await context.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))

    await page.goto(pages[state].as_uri())

    assert requests == [pages[state].as_uri()]
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    assert await page.evaluate(CUT_TEXTS) == []
    assert await page.evaluate(OVERLAPS) == []
    assert await page.evaluate(CONTRAST) >= 4.5
    assert await page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
    await context.close()


@pytest.mark.parametrize("width", [320, 1280])
async def test_boxes_of_the_tree_map_have_the_longest_label_that_fits(
    browser: Any, pages: dict[str, Path], width: int
) -> None:
    page = await browser.new_page(viewport={"width": width, "height": 800})
    await page.goto(pages["busy"].as_uri())

    labels = await page.evaluate(LABELS)

    namespace = f"extra_key={LONG_NAME[:10]}…{LONG_NAME[-20:]}: 1.4k tokens"
    assert (namespace in labels, "#1" in labels) == ((True, False) if width > 320 else (False, True))
    assert ("2 2 2 …: 192 tokens" in labels, "192" in labels) == ((True, False) if width > 320 else (False, True))
    await page.close()


async def test_a_text_that_is_cut_would_be_found(browser: Any, pages: dict[str, Path]) -> None:
    page = await browser.new_page(viewport={"width": 390, "height": 800})
    await page.goto(pages["busy"].as_uri())

    await page.add_style_tag(content="td { white-space: nowrap } h1 { overflow: hidden; white-space: nowrap }")

    assert len(await page.evaluate(CUT_TEXTS)) >= 2
    await page.add_style_tag(content="td { position: absolute; top: 0 } p { color: #999 }")
    assert await page.evaluate(OVERLAPS)
    assert await page.evaluate(CONTRAST) < 4.5
    await page.close()
