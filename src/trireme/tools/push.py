"""Uploads an export to a model repository of the hub, with a card that names the run and its weights.

    card alone -> the other files        (`HfApi.upload_folder`)

The card claims the repository for the run, so it goes first. A push that was interrupted is repeated: it uses the
export on disk again, and sends only what the hub lacks. A repository that holds anything else stays unchanged.

Where hf_xet is installed, the hub's client sends large files by Xet, which sends no block twice. With
HF_HUB_DISABLE_XET=1 it sends them by git-lfs, which sends no file twice. If Xet cannot reach its storage, it gives up
after about four minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.checkpoint.store import CheckpointStore, VerifiedCheckpoint
from trireme.config.model_facts import hub_reachable
from trireme.core.errors import BadInput
from trireme.core.redaction import redact
from trireme.core.refusals import Refusal
from trireme.core.tokenizer import looks_like_path
from trireme.tools.export import CARD
from trireme.tools.following import run_config

SILENT_S = 60.0
"""Seconds of the longest silence of the hub within a request. The hub's client has no limit of its own."""
MARK = "trireme"
"""A tag of the card, and the key of its metadata that names the run."""
OF_THE_HUB = {".gitattributes"}
"""Files that the hub itself puts into a new repository."""
STALE = ["*.safetensors", "*.safetensors.index.json"]
"""Files of an earlier push that are removed unless the export has them."""
LOG_IN = "uv run --no-sync hf auth login, or set HF_TOKEN to a token that may write"


def model_card(root: Path, dtype: str | None, checkpoint: VerifiedCheckpoint, kind: str) -> str:
    """Returns the model card for an export of `checkpoint` of the run in `root`: metadata and a text. `dtype`: the
    dtype of the export, None without a cast; `kind`: `adapter` or `whole model`. The card names the model that the run
    started from, and has nothing else of the run's configuration."""
    from huggingface_hub import ModelCardData

    model = run_config(root).get("model", {})
    base = redact(str(model.get("start") or model.get("name") or "unknown"))
    if base == "unknown" or looks_like_path(base):
        base_model = None
    else:
        base_model = base
    identity = checkpoint.manifest.identity
    facts: dict[str, Any] = {
        "run": redact(root.name),
        "run_id": _run_id(root),
        "step": identity.version,
        "digest": identity.digest,
        "weights": f"{kind}, {dtype or 'as trained'}",
    }
    marked: dict[str, Any] = {MARK: facts}
    data = ModelCardData(
        base_model=base_model,
        library_name="peft" if kind == "adapter" else "transformers",
        tags=[MARK, "reinforcement-learning"],
        **marked,
    )
    return (
        f"---\n{data.to_yaml()}\n---\n# {facts['run']}, step {identity.version}\n\n"
        f"Trained with Trireme from `{Path(base).name}`.\n\n| | |\n|---|---|\n"
        f"| run | `{facts['run']}` |\n{_run_row(_run_id(root))}\n| digest of the weights | `{identity.digest}` |\n"
        f"| these files | {facts['weights']} |\n"
    )


@dataclass(frozen=True)
class HubRepository:
    """A model repository of the hub that gets exports of one run."""

    name: str
    """The name of the repository, ORG/NAME."""
    api: Any
    """The client of the hub."""

    @classmethod
    def claim(cls, name: str, root: Path) -> HubRepository:
        """Returns the repository `name` for the run in `root`. Creates it, private, if it does not exist. Raises
        BadInput if the hub refuses, cannot be reached, or has something else under this name."""
        import huggingface_hub as hub
        from huggingface_hub.errors import RepositoryNotFoundError

        if name.count("/") != 1:
            raise Refusal(f"--push {name}", "ORG/NAME, a model repository of the hub", "correct the name")
        if not hub.get_token():
            raise Refusal(f"--push {name} without a token of the hub", "a token that may write", LOG_IN)
        hub.set_client_factory(_client)
        run_id = _run_id(root)
        api = hub.HfApi()
        with hub_errors(name):
            if not hub_reachable(api.endpoint):
                raise ConnectionError(api.endpoint)
            try:
                files = set(api.list_repo_files(name))
            except RepositoryNotFoundError:
                api.create_repo(name, private=True)
                files = set()
            if not _belongs(api, name, files, run_id):
                raise Refusal(
                    f"--push {name}, a repository that holds something else",
                    f"a new name, or a repository with exports of this run ({run_id}): nothing is overwritten",
                    "choose another ORG/NAME",
                )
        return cls(name, api)

    def upload(self, directory: Path, message: str) -> str:
        """Uploads the files of an export, its card first. Returns the address of the repository. Raises BadInput."""
        with hub_errors(self.name):
            for patterns in ([CARD], None):
                self.api.upload_folder(
                    repo_id=self.name,
                    folder_path=directory,
                    commit_message=message,
                    allow_patterns=patterns,
                    delete_patterns=None if patterns else STALE,
                )
        return f"{self.api.endpoint}/{self.name}"


def _run_id(root: Path) -> str:
    """Returns the id of the run in `root`. Raises BadInput if the run has no checkpoint."""
    head = CheckpointStore(root).head()
    if head is None:
        raise Refusal(
            f"{root}, which has no file HEAD",
            "the directory of a run with a checkpoint",
            "correct the directory, or push after the run has written its first checkpoint",
        )
    return head.run_id


def _client() -> Any:
    """Returns the HTTP client of the hub's library, with the time limit SILENT_S."""
    from huggingface_hub.utils._http import default_client_factory  # the public way begins with a bare client

    client = default_client_factory()
    client.timeout = SILENT_S
    return client


def _belongs(api: Any, name: str, files: set[str], run_id: str) -> bool:
    """Returns True if the repository `name`, which has `files`, is new or has a card of the run `run_id`."""
    if CARD not in files:
        return files <= OF_THE_HUB
    return _run_row(run_id) in Path(api.hf_hub_download(name, CARD)).read_text(errors="replace")


def _run_row(run_id: str) -> str:
    """Returns the line of a model card by which a later push recognises the card of the run `run_id`."""
    return f"| run id | `{run_id}` |"


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """A context manager that turns an error of the hub's client in its block into a BadInput, which says what to do.
    `name`: the repository."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    request = f"--push {name}"
    try:
        yield
    except BadInput:
        raise
    except HFValidationError as error:
        raise Refusal(f"{request}: {error}", "ORG/NAME, a model repository of the hub", "correct the name") from None
    except HfHubHTTPError as error:
        raise _answered(request, error) from None
    except (HTTPError, OSError, RuntimeError, ValueError) as error:  # the network, hf_xet, an answer that is no JSON
        raise Refusal(
            f"{request}: the hub cannot be reached, or did not answer as a hub "
            f"({redact(str(error)) or type(error).__name__})",
            "a network connection to the hub until all files are there",
            "push again: files that the hub has are not sent again",
        ) from None


def _answered(request: str, error: Any) -> Refusal:
    """Returns the refusal for `error`, an answer of the hub with an error status. `request`: the request as the user
    wrote it."""
    answer = redact(error.server_message or str(error).splitlines()[0])
    return Refusal(
        f"{request}: the hub answered {error.response.status_code} ({answer})",
        "an answer without an error: a valid token with the right to create and write this repository (401, 403), and "
        "a name that is free (409)",
        f"{LOG_IN}; choose another ORG/NAME; or push again later: files that the hub has are not sent again",
    )
