"""Counts in buckets, as Prometheus wants them."""

from pagemill.observability.histogram import Histogram


def test_a_bound_belongs_to_its_bucket_and_counts_add_up():
    histogram = Histogram((1, 2.5))
    histogram.observe_all([0.5, 1, 2, 2.5, 9])
    assert histogram.buckets() == [("1.0", 2.0), ("2.5", 4.0), ("+Inf", 5.0)]
    assert (histogram.count, histogram.total) == (5, 15.0)
