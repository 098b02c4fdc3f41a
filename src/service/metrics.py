"""The metrics of the service, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from service.places import Places
from service.requests import ServiceAnswer

BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class ServiceMetrics:
    """Counts requests and tokens of one service."""

    def __init__(self, places: Places) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "trireme_service_requests", "Requests, by route and status", ["route", "status"], registry=registry
        )
        self._tokens = Counter(
            "trireme_service_tokens", "Tokens of answers and of their prompts", ["kind"], registry=registry
        )
        self._seconds = Histogram(
            "trireme_service_request_seconds",
            "From a request to the end of its answer",
            ["route"],
            registry=registry,
            buckets=BUCKETS_S,
        )
        self._version = Gauge("trireme_service_version", "The newest weights that sampled a token", registry=registry)
        running = Gauge("trireme_service_running", "Answers that are being sampled", registry=registry)
        running.set_function(lambda: places.taken)
        waiting = Gauge("trireme_service_waiting", "Answers that wait for a place", registry=registry)
        waiting.set_function(lambda: places.waiting)
        all_of_them = Gauge("trireme_service_places", "The most answers that are sampled together", registry=registry)
        all_of_them.set_function(lambda: places.places)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Counts a request that has ended, with its HTTP status and its duration in seconds."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def answer(self, answer: ServiceAnswer) -> None:
        """Counts a whole answer and its tokens."""
        self._tokens.labels("prompt").inc(len(answer.prompt))
        self._tokens.labels("answer").inc(len(answer.sequence.tokens))
        self._version.set(answer.versions[1])

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
