"""A clock that tests set."""


class ManualClock:
    """Stands for `time.monotonic` or `time.time` where it is called, and for the module `time` where that is read."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
