"""What every process does: waits, signals, faults, trace, logs, Ray."""
