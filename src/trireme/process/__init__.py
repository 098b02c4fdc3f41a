"""Serves every process: waits, signals, faults, trace, output, Ray."""
