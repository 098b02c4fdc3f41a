"""What every process needs: waits, signals, fault points, traces, log files, Ray."""
