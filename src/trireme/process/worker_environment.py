"""Chooses what a run takes to the nodes of a cluster: environment variables, and code that is not installed there.
Ray's runtime environment carries both. Imports no Ray.

Without a runtime environment an actor has the variables with which its node's Ray was started, and can import only
packages installed on that node. A cluster that a run starts for itself needs no runtime environment: its processes
inherit the driver's variables.

Ray logs the variables of a runtime environment on every node, and shows them in its dashboard. So secrets travel in
another way: in a function that Ray keeps as bytes in memory, and calls at the start of each process.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

from trireme.config import CommonConfig, Config
from trireme.config.keys import keys_of
from trireme.config.trust import named_code
from trireme.core.own_packages import ENTRY, OWN_PACKAGES, search
from trireme.core.redaction import is_secret
from trireme.core.refusals import Refusal

PREFIXES = (
    "HF_",
    "WANDB_",
    "NCCL_",
    "GLOO_",
    "FI_",
    "UCX_",
    "VLLM_",
    "TRIREME_",
    "PYTORCH_",
    "TORCH",
    "TRITON_",
    "CUDA_",
)
"""Prefixes of the variables of libraries in actors: hub, W&B, collectives and their networks, vLLM, this project,
PyTorch, CUDA."""
OF_ONE_NODE = ("VLLM_HOST_IP", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH")
"""Variables that do not travel, because they differ between nodes: the address from which vLLM serves, the GPUs that a
process may use (Ray sets them), and where CUDA is installed."""
NAMES = ("PYTHONPATH", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "CUBLAS_WORKSPACE_CONFIG")
"""Further variables that decide which code is found and what it computes."""
STORES = ("AWS_", "GOOGLE_", "AZURE_")
"""The variables of object storage begin like this."""
KEYS = "TRIREME__"
"""Variables of this prefix are keys of the configuration, which travels as an object."""
INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")
"""The directories of installed packages, as `sysconfig` names them."""
PACKAGES = {"site-packages", "dist-packages"}
"""Names of further directories of installed packages: a system's or a user's, which an environment may see too."""
IMPORT_PATH = re.compile(r"([A-Za-z_]\w*)(\.\w+)*:[A-Za-z_]\w*")
"""The form `package.module:name`. Its first group is the top-level module."""
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable in which `ray job submit` gives its driver the runtime environment of the job."""


@dataclass(frozen=True)
class WorkerEnvironment:
    """The variables and the code that actors get from the driver."""

    variables: Mapping[str, str]
    """{name: value} of the variables that are no secrets."""
    secrets: Mapping[str, str] = field(repr=False)
    """{name: value} of the variables that are secrets. The values are neither printed nor written anywhere."""
    modules: tuple[Path, ...] = ()
    """Top-level packages (directories) and modules (files)."""

    @classmethod
    def of(cls, config: CommonConfig, environ: Mapping[str, str]) -> WorkerEnvironment:
        """Returns the variables and the code that a run of `config` takes along. `environ`: the driver's environment
        variables. Raises BadInput if the configuration names a variable that is not set."""
        of_environments = [name for name in config.env_variables if name in environ]  # their check refuses others
        chosen = _chosen([*config.cluster.variables, *of_environments], environ)
        named = named_code(config.model_dump(mode="json"), keys_of(type(config))).values()
        paths = (IMPORT_PATH.fullmatch(value) for value in named if isinstance(value, str))
        secrets = {name: value for name, value in chosen.items() if is_secret(name, value)}
        if config.run.url:
            secrets |= {name: value for name, value in environ.items() if name.startswith(STORES)}
        if isinstance(config, Config):
            search(directory for env in (*config.env, *config.eval_envs) for directory in env.path)
        return cls(
            {name: value for name, value in chosen.items() if name not in secrets},
            secrets,
            modules_not_installed([match[1] for match in paths if match]),
        )

    @property
    def text(self) -> str:
        """The names, for people, of all modules, variables and secrets that travel."""
        parts = [
            ("code of", [module.stem for module in self.modules]),
            ("variables", sorted(self.variables)),
            ("secrets, outside of Ray's logs:", sorted(self.secrets)),
        ]
        return "; ".join(f"{label} {', '.join(names)}" for label, names in parts if names) or "nothing but the run"

    def runtime_env(self, environ: Mapping[str, str]) -> dict[str, object]:
        """Returns the runtime environment for `ray.init`. `environ`: the driver's environment variables. If a submitted
        job started the driver, the runtime environment also holds the Python modules of that job."""
        job = (json.loads(environ.get(JOB_CONFIG) or "{}").get("runtime_env") or {}).get("py_modules") or []
        options: dict[str, object] = {"env_vars": dict(self.variables), "excludes": ["__pycache__"]}
        modules = [*map(str, self.modules), *job]
        if modules:
            options["py_modules"] = modules
        options["worker_process_setup_hook"] = _beginning(dict(self.secrets))
        return options


def travels_text(config: CommonConfig) -> str:
    """Returns a line of the plan: it names everything that a run of `config` takes to the nodes of a cluster."""
    return f"{WorkerEnvironment.of(config, os.environ).text}, from the driver to all nodes"


def _beginning(secrets: Mapping[str, str]) -> Callable[[], None]:
    """Returns the function that Ray calls first in each process. It sets the variables `secrets`, and makes Python find
    the project's packages before a user's modules. It is a nested function, so that Ray sends its code and not only its
    name."""

    def begin() -> None:
        os.environ.update(secrets)
        importlib.import_module(ENTRY)

    return begin


def _chosen(names: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Returns {name: value} of the variables in `environ` that travel to other nodes: the variables `names`, which the
    configuration lists; the variables in the constant NAMES; and variables that begin with one of PREFIXES, except
    OF_ONE_NODE and variables that begin with KEYS. Relative entries of PYTHONPATH become absolute. Raises BadInput if
    one of `names` is not set."""
    for name in names:
        if name not in environ:
            raise Refusal(
                f"cluster.variables names {name}",
                "environment variables that the driver has",
                f"export {name}, or take it out of --cluster.variables",
            )
    usual = [name for name in environ if name.startswith(PREFIXES) and not name.startswith(KEYS)]
    usual = [name for name in usual if name not in OF_ONE_NODE]
    usual += [name for name in NAMES if name in environ]
    variables = {name: environ[name] for name in dict.fromkeys([*usual, *names])}
    paths = variables.get("PYTHONPATH")
    if paths:
        variables["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths.split(os.pathsep) if path)
    return variables


def modules_not_installed(names: Iterable[str]) -> tuple[Path, ...]:
    """Returns the paths (files or directories) of this project's packages, of the top-level modules `names`, and of all
    top-level modules that the modules `names` import, directly or indirectly. Leaves out installed packages, which are
    expected on every node."""
    installed = [Path(sysconfig.get_path(kind)).resolve() for kind in INSTALLED]
    modules: dict[str, Path] = {}
    pending = [ENTRY, *OWN_PACKAGES, *names]
    while pending:
        name = pending.pop(0)
        for place in () if name in modules else _places(name):
            if any(place.resolve().is_relative_to(path) for path in installed) or PACKAGES & {*place.resolve().parts}:
                continue
            modules[name] = place
            pending += [] if name in OWN_PACKAGES else sorted(_imported(place))
    return tuple(modules.values())


def _places(name: str) -> list[Path]:
    """Returns the paths of the top-level module `name`: its file, or the directories of a package. Also searches the
    working directory, as Ray's workers do. Returns an empty list if the module is built in or cannot be found (then
    actors report that)."""
    spec = None
    with suppress(ValueError):  # __main__
        spec = importlib.util.find_spec(name) or PathFinder.find_spec(name, [os.getcwd()])
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(place) for place in spec.submodule_search_locations]
    if spec.has_location and spec.origin:
        return [Path(spec.origin)]
    return []


def _imported(place: Path) -> Iterator[str]:
    """Yields the names of the top-level modules that the Python files at `place` (a file or a directory) import."""
    for file in [place] if place.is_file() else place.rglob("*.py"):
        with suppress(SyntaxError, ValueError):  # it may never be imported
            yield from _imported_by(ast.parse(file.read_bytes(), str(file)))


def _imported_by(source: ast.Module) -> Iterator[str]:
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]
