"""The part that every process uses: waits, signals, fault points, traces, log files, Ray."""
