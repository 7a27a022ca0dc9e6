"""A report: what is gathered for it is exact and bounded, and the page needs nothing else and escapes what it shows."""

import random
from html.parser import HTMLParser

import pytest
from set_clock import Clock

from raydix.actors.cache_service import CacheService
from raydix.actors.report.history import History
from raydix.actors.report.namespace_use import NamespaceUse, namespace_label
from raydix.actors.report.page import render
from raydix.actors.report.treemap import Rect, squarify
from raydix.actors.report.units import short_count, short_time
from raydix.cache_core import KVCache, RadixCache, RadixKey, TokenToKVPoolAllocator
from raydix.cache_core.tree_sample import TreeBox
from raydix.schemas import CacheConfig, CacheReport, EvictionConfig, GhostConfig, PoolConfig, frame_namespace

VOID = {"meta"}  # elements without an end


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def service(clock: Clock) -> CacheService:
    """Four pages of four tokens."""
    config = CacheConfig(
        page_size=4,
        pool=PoolConfig(num_slots=16, device="cpu"),
        eviction=EvictionConfig(high_watermark=1.0),
        ghost=GhostConfig(),
    )
    return CacheService(config, "epoch", clock=clock)


def send(service: CacheService, tokens: list[int], extra_key: str | None = None) -> None:
    service.insight.history.note()
    key = RadixKey(tokens, extra_key)
    service.core.acquire("lease", "session", key)
    service.core.insert("lease", "session", len(key), key[:0])
    service.core.release("lease", "session")
    service.core.leases.ended.__init__(0)  # type: ignore[misc]  # the id is used again


class Page(HTMLParser):
    """The text of a page, the tags that are open, and every attribute that there is."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.open: list[str] = []
        self.attributes: set[str] = set()
        self.tags: set[str] = set()
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] != "style":
            self.text.append(data.strip())


def page_of(service: CacheService, title: str = "kv-0") -> Page:
    return Page(render(service.report(), service.config, title))


def test_an_empty_cache_has_a_page_that_says_so(service: CacheService) -> None:
    text = page_of(service).text

    assert "kv-0" in text
    for sentence in ("No requests yet.", "Nothing is cached yet.", "Nothing was evicted yet."):
        assert sentence in text


def test_the_page_tells_what_the_cache_counted(service: CacheService, clock: Clock) -> None:
    for prompt in ([1] * 16, [2] * 16, [1] * 16, [1] * 8):
        send(service, prompt)
        clock.now += 1

    stats, text = service.stats(), page_of(service).text

    assert (stats.tokens_requested, stats.tokens_reused, stats.tokens_evicted) == (56, 8, 32)
    assert text[text.index("hit rate") + 1] == "14.3 %"
    assert text[text.index("tokens evicted") + 1] == "32"
    assert "cached, evictable: 16" in text
    assert "Twice the pool would give +28.6 points: 42.9 % hits." in text


def test_the_page_tells_of_no_size_that_was_not_followed() -> None:
    config = CacheConfig(pool=PoolConfig(num_slots=16, device="cpu"), ghost=GhostConfig(max_factor=1.5))
    service = CacheService(config, "epoch")
    send(service, [1] * 8)

    assert not any("Twice the pool" in text for text in page_of(service).text)


def test_of_windows_and_states_the_page_says_that_larger_pools_are_told_of_full_kv_alone() -> None:
    config = CacheConfig(
        pool=PoolConfig(num_slots=16, device="cpu"), sliding_window_size=4, ghost=GhostConfig(max_factor=2)
    )
    service = CacheService(config, "epoch")
    send(service, [1] * 8)

    assert any("points: 0.0 % hits. That is of full KV alone" in text for text in page_of(service).text)


def test_the_page_asks_nobody_for_anything(service: CacheService) -> None:
    send(service, [1] * 16)
    html = render(service.report(), service.config, "kv-0")

    page = Page(html)

    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "form", "base"})
    assert page.attributes.isdisjoint({"src", "href", "srcset", "data", "action", "onload", "onclick"})
    assert not any(word in html for word in ("http:", "https:", "@import", "url("))


def test_names_are_shown_as_they_are_and_do_nothing(service: CacheService) -> None:
    name = "<script>alert('x')</script>&"
    send(service, [1] * 16, frame_namespace(name[:20], None, None))

    page = page_of(service, title=name)

    assert "script" not in page.tags
    assert name in page.text
    assert f"extra_key={name[:20]}" in page.text


def test_evicted_tokens_are_as_old_as_their_last_use(service: CacheService, clock: Clock) -> None:
    send(service, [1] * 8)
    send(service, [2] * 8)
    clock.now = 20
    send(service, [1] * 8)
    clock.now = 25
    send(service, [3] * 16)  # 2 goes, unused for 25 s, and 1, for 5 s

    ages = {age.below_s: age.num_tokens for age in service.report().eviction_ages if age.num_tokens}

    assert ages == {10: 8, 30: 8}


def test_what_is_evicted_time_and_again_is_counted_each_time(service: CacheService, clock: Clock) -> None:
    for number in range(30):
        send(service, [number % 3] * 8)  # of which two have room
        clock.now += 2

    report = service.report()

    ages = {age.below_s: age.num_tokens for age in report.eviction_ages if age.num_tokens}
    assert ages == {10: 28 * 8}
    assert report.stats.tokens_evicted == 28 * 8


def test_namespaces_are_counted_apart_and_the_small_ones_together() -> None:
    cache = KVCache(RadixCache(4, None, allocator := TokenToKVPoolAllocator(8_192, 4)), allocator)
    use = NamespaceUse()
    cache.watches.append(use)
    for number in range(1_000):
        key = RadixKey([1] * 8, frame_namespace(f"{number}", None, None))
        for name in ("a", "b") if number == 0 else ("a",):
            cache.acquire(f"{number}{name}", "s", key)
            cache.insert(f"{number}{name}", "s", 8, key[:0])
            cache.release(f"{number}{name}", "s")

    first, second, others = use.stats(2)

    assert (first.label, first.requests, first.tokens_requested, first.tokens_reused) == ("extra_key=0", 2, 16, 8)
    assert second.requests == 1
    assert (others.label, others.requests, others.tokens_requested, others.tokens_reused) == (
        "all others", 998, 998 * 8, 0,
    )  # fmt: skip
    assert len(use._counts) <= 512


def test_requests_without_a_namespace_are_called_what_the_tree_calls_them() -> None:
    assert namespace_label(None) == "no namespace"


def test_history_of_any_length_has_a_bounded_number_of_points_at_equal_distances(
    service: CacheService, clock: Clock
) -> None:
    history = History(service.core, clock)

    for second in range(5_000):
        clock.now = second
        history.note()

    distances = {b.at_s - a.at_s for a, b in zip(history.points, history.points[1:], strict=False)}
    assert history.points[0].at_s == 0
    assert history.points[-1].at_s > 4_980
    assert distances == {16}


def count(boxes: list[TreeBox]) -> int:
    return sum(1 + count(box.boxes) for box in boxes)


def test_a_large_tree_is_judged_by_a_bounded_number_of_its_nodes() -> None:
    cache = RadixCache(1)
    for first in range(20):
        for second in range(400):
            cache.insert(RadixKey([first, second, 0, 0]))
    cache.insert(RadixKey([7] * 100, extra_key="small"))

    all_of_it, some = cache.sample(100_000).boxes, cache.sample(200).boxes

    assert [(box.extra_key, box.num_tokens, box.num_nodes) for box in all_of_it] == [
        (None, 20 + 20 * 400 * 3, 1 + 20 + 20 * 400), ("small", 100, 2),
    ]  # fmt: skip
    assert count(some) <= 200
    assert [box.extra_key for box in some] == [None, "small"]
    assert some[0].num_tokens == pytest.approx(all_of_it[0].num_tokens, rel=0.01)


@pytest.mark.parametrize(("there", "looked_at"), [(50, 50), (100, 100), (101, 51), (1_000, 100)])
def test_of_many_namespaces_an_even_choice_is_looked_at_and_below_each_top(there: int, looked_at: int) -> None:
    cache = RadixCache(1)
    for number in range(there):
        cache.insert(RadixKey([1, 2], extra_key=f"{number}"))

    sample = cache.sample(200)

    assert (len(sample.boxes), sample.num_namespaces) == (looked_at, there)
    assert {box.num_tokens for box in sample.boxes} == {2}


def test_namespaces_that_were_not_looked_at_make_the_others_no_larger() -> None:
    config = CacheConfig(page_size=1, pool=PoolConfig(num_slots=8_192, device="cpu"))
    service = CacheService(config, "epoch")
    for number in range(1_025):
        send(service, [1] * 4, frame_namespace(f"{number}", None, None))

    assert {part.num_tokens for part in service.report().tree} == {4}


def test_a_chain_of_many_nodes_is_one_box() -> None:
    cache = RadixCache(1)
    for stop in range(1, 3_000):
        cache.insert(RadixKey(list(range(stop))))

    (box,) = cache.sample(10_000).boxes

    assert (box.own_tokens, box.num_tokens, box.boxes) == (2_999, 2_999, [])


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_map_gives_each_size_its_area_and_none_to_two(seed: int) -> None:
    rng = random.Random(seed)
    sizes = sorted((rng.expovariate(1) * rng.choice((0, 1, 1)) for _ in range(rng.randrange(2, 40))), reverse=True)
    whole = Rect(10, 20, 160, 100)

    rects = squarify(sizes, whole)

    for size, rect in zip(sizes, rects, strict=True):
        assert rect.width * rect.height == pytest.approx(size / sum(sizes) * 16_000)
        assert rect.x >= 10 - 1e-6 and rect.x + rect.width <= 170 + 1e-6
        assert rect.y >= 20 - 1e-6 and rect.y + rect.height <= 120 + 1e-6
    for place, a in enumerate(rects):
        for b in rects[:place]:
            wide = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
            high = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
            assert min(wide, high) < 1e-6


def test_sizes_of_nothing_have_no_area() -> None:
    assert squarify([], Rect(0, 0, 1, 1)) == []
    assert all(rect.width * rect.height == 0 for rect in squarify([0, 0], Rect(0, 0, 1, 1)))


@pytest.mark.parametrize("sizes", [[1, 0], [1, 1, 0], [4, 2, 0, 0, 0]])
@pytest.mark.parametrize("whole", [Rect(0, 0, 100, 100), Rect(0, 0, 30, 70), Rect(0, 0, 0, 5)])
def test_what_has_no_size_has_no_area_beside_what_has(sizes: list[float], whole: Rect) -> None:
    areas = [rect.width * rect.height for rect in squarify(sizes, whole)]

    assert areas == pytest.approx([size / sum(sizes) * whole.width * whole.height for size in sizes])


def test_prompts_of_one_length_have_a_page(service: CacheService) -> None:
    for prompt in ([1] * 8, [2] * 8):
        send(service, prompt)

    assert "What is cached" in page_of(service).text


@pytest.mark.parametrize(("value", "shown"), [(0, "0"), (950, "950"), (1_234, "1.2k"), (34e6, "34M"), (2e9, "2G")])
def test_counts_are_short(value: float, shown: str) -> None:
    assert short_count(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(0, "0 s"), (59, "59 s"), (90, "1.5 min"), (7200, "2 h"), (9e5, "10 d")])
def test_times_are_short(value: float, shown: str) -> None:
    assert short_time(value) == shown


def test_a_report_travels_as_json(service: CacheService) -> None:
    send(service, [1] * 16)
    report = service.report()

    assert CacheReport.model_validate_json(report.model_dump_json()) == report
