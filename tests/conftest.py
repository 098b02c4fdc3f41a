"""The environment of all tests, set before Ray is imported."""

import os
import secrets

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
# A token of their own for the tests' clusters: without one Ray writes one into the home directory.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
