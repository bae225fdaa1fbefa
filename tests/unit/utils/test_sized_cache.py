"""What is kept: what was used last, up to a size."""

from pagemill.utils.sized_cache import SizedCache


def test_values_are_kept_up_to_a_size():
    cache: SizedCache[str, str] = SizedCache(100, lambda key, value: len(value))
    cache.put("small", "a" * 40)
    cache.put("other", "b" * 50)
    assert cache.get("small") == "a" * 40
    large = cache.put("large", "c" * 60)
    assert cache.get("large") is large
    assert cache.get("other") is None and cache.get("small") is not None, "the one used last stays"
    assert cache.size == 100
    cache.put("too large", "d" * 101)
    assert cache.size == 0 == len(cache)


def test_a_value_that_is_put_again_counts_once():
    cache: SizedCache[int, int] = SizedCache(2)
    for number in (1, 1, 2, 1, 3):
        cache.put(number, number)
    assert (cache.size, cache.get(1), cache.get(2), cache.get(3)) == (2, 1, None, 3)
