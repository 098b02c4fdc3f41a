"""Laws of the code base that no linter knows."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TREES = {str(path.relative_to(ROOT / "src")): ast.parse(path.read_text()) for path in SOURCES}
LONG_FUNCTION = 60
FRAGMENT = re.compile(r"(Of|What|As|Whether|By|Who)\b")
Function = ast.FunctionDef | ast.AsyncFunctionDef
ROOMS = {"trainer", "orchestrator", "inference", "service"}
RAY, VLLM = {"ray"}, {"vllm"}
FORBIDDEN_IMPORTS = {
    **{
        f"trireme.{package}": RAY | VLLM | ROOMS
        for package in ("core", "config", "renderers", "plan", "checkpoint", "run", "train", "sft", "tools", "doctor")
    },
    **{f"trireme.{package}": VLLM | ROOMS for package in ("process", "supervision", "transports")},
    "trireme.launch": VLLM,
    "trireme.cli": VLLM,
    **{room: RAY | VLLM | ROOMS - {room} for room in ("trainer", "orchestrator", "service")},
    "inference": RAY | ROOMS - {"inference"},
}
"""What a new module may not import, by the package in which it lies."""
WITHOUT_MODULE = {
    "inference/test_contract.py": "what all modules name of vLLM in strings",
    "checkpoint/test_crashes.py": "sequences of training, checkpoints, crashes and resumes, over all modules",
    "trainer/test_against_verl.py": "recorded numbers of another implementation, for losses, weighting and advantages",
}
"""Unit tests of a folder as a whole, and why."""
BARE_WAITS = {("ray", "get"), ("ray", "wait")}


def calls(path: Path) -> Iterator[tuple[str, str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)):
                yield module, name, node.lineno


UNSAFE_READERS = {
    **dict.fromkeys(("pickle.load", "pickle.loads", "pickle.Unpickler", "dill.load", "dill.loads"), ""),
    **dict.fromkeys(("cloudpickle.load", "cloudpickle.loads", "yaml.load", "marshal.loads", "eval", "exec"), ""),
    "torch.load": "weights_only=True",
    "np.load": "allow_pickle=False",
    "from_pretrained": "trust_remote_code=False",
    "from_config": "trust_remote_code=False",
}
"""Calls that can run code of whoever wrote what they read, and the argument with which they do not."""
OWN_PICKLES = {
    "orchestrator/worker_process.py": "calls of the orchestrator, in a worker; answers to it are JSON",
    "inference/loaded.py": "what the ranks of this replica's engine have loaded",
    "orchestrator/envs/verifiers.py": "a task that this process pickled",
    "inference/worker.py": "a request of the replica to its own engine",
    "inference/messages.py": "requests of a router to a replica of its run, and the replies",
}
"""Files that unpickle what another process of the same run has just sent."""


def unsafe_reads(source: str) -> Iterator[str]:
    """Yields each call of UNSAFE_READERS without its argument, and each argument that trusts."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, arguments = ast.unparse(node.func), {ast.unparse(keyword) for keyword in node.keywords}
        last = name.rpartition(".")[2]
        reader = name if name in UNSAFE_READERS else last if last in ("from_pretrained", "from_config") else None
        own_method = reader == "from_config" and not name.startswith("Auto")
        fast = name == "PreTrainedTokenizerFast.from_pretrained"  # reads JSON
        if reader and not own_method and not fast and UNSAFE_READERS[reader] not in arguments - {""}:
            yield name
        yield from arguments & {"trust_remote_code=True", "weights_only=False", "allow_pickle=True"}


def test_nothing_is_read_that_can_run_code() -> None:
    """Files of checkpoints, models and data may be somebody else's."""
    calls_by_path = {str(path.relative_to(ROOT / "src")): list(unsafe_reads(path.read_text())) for path in SOURCES}
    assert {path: calls for path, calls in calls_by_path.items() if calls and path not in OWN_PICKLES} == {}
    assert {
        path for path in OWN_PICKLES if set(calls_by_path[path]) <= {"pickle.loads"} and calls_by_path[path]
    } == set(OWN_PICKLES)


def test_only_waits_waits() -> None:
    """Every wait across processes has a deadline and a name: the bare calls live in trireme.process.waits alone."""
    bare = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        if path.name != "waits.py"
        for module, name, line in calls(path)
        if (module, name) in BARE_WAITS
    ]
    assert bare == []
    assert {
        (m, n) for m, n, _ in calls(ROOT / "src/trireme/process/waits.py")
    } >= BARE_WAITS  # the check sees such calls


PASS_MODULES = ("attention", "host_activations", "losses", "logprobs", "passes", "shared_attention", "shared_rows")
"""Modules of the trainer that run in every micro-batch; `trainer.transfers` makes their copies."""
HOST_COPIES = {"cpu", "cuda", "from_numpy", "item", "nonzero", "numpy", "pin_memory", "tensor", "tolist"}
OWN_HOST_COPIES = {
    "attention._try_kernel": "the trial of a kernel, at the start of a shard",
    "logprobs.why_unfused": "the trial of two kernels, at the start of a shard",
    "losses.sum_log_ratios": "columns of the host, after a pass",
    "losses.surrogate": "a custom loss, which is computed where the batch is",
    "shared_attention._groups": "bounds of a CPU",
}
"""Functions that copy by other ways, and why."""


def host_copies(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields function and method of each call that may copy between host and device: HOST_COPIES, and `to` with
    anything but a dtype."""
    for function in ast.walk(tree):
        for node in ast.walk(function) if isinstance(function, Function) else ():
            match node:
                case ast.Call(func=ast.Attribute(attr=name), args=args, keywords=keywords):
                    arguments = [ast.unparse(argument) for argument in (*args, *keywords)]
                    casts = len(arguments) == 1 and arguments[0].endswith("dtype")
                    if name in HOST_COPIES or (name == "to" and not casts):
                        yield function.name, name


def test_passes_copy_in_one_place() -> None:
    """A copy elsewhere would let the host wait for the device in every micro-batch, uncounted."""
    copies = {
        f"{module}.{function}" for module in PASS_MODULES for function, _ in host_copies(TREES[f"trainer/{module}.py"])
    }
    assert copies == set(OWN_HOST_COPIES)
    assert "torch" not in (ROOT / "src/trainer/batching.py").read_text(), "its arrays are in host memory"
    assert set(host_copies(TREES["trainer/transfers.py"])) >= {("to_device", "to"), ("to_host", "cpu")}


def test_no_number_becomes_json_that_is_none() -> None:
    """NaN and infinities become null in one place, `to_json`; other calls refuse them."""
    strict = "allow_nan=False"
    loose = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        for module, name, line in calls(path)
        if module == "json" and name in ("dump", "dumps", "JSONEncoder")
        if strict not in path.read_text().splitlines()[line - 1]
    ]
    assert loose == []


def test_the_rooms_are_ours() -> None:
    """Packages of these names exist on the registry: what is imported must be this repository."""
    files = [Path(__import__(room).__file__).resolve() for room in [*ROOMS, "trireme"]]
    assert [file for file in files if not file.is_relative_to(ROOT / "src")] == []


def test_every_option_has_a_reader() -> None:
    """A key that nothing reads would be a promise without an answer."""
    from trireme.config import schema, sft
    from trireme.config.run import WandbConfig
    from trireme.config.schema import Config, Section
    from trireme.config.trainer import OptimConfig

    def leaves(section: type[Section]) -> Iterator[str]:
        for name, field in section.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from leaves(kind)
            else:
                yield name

    sections = ("section", "run", "trainer", "orchestrator", "inference", "service", "schema", "sft")
    schemas = [ROOT / f"src/trireme/config/{name}.py" for name in sections]
    assert all(path.exists() for path in schemas)
    read = "\n".join(path.read_text() for path in SOURCES if path not in schemas)
    read += "\n".join(line for path in schemas for line in path.read_text().splitlines() if "self." in line)
    dumped = (OptimConfig, schema.SamplingConfig, WandbConfig)
    by_dump = {name for section in dumped for name in section.model_fields}
    unread = [
        name
        for command in (Config, sft.SftConfig)
        for name in leaves(command)
        if name not in by_dump and f".{name}" not in read
    ]
    assert unread == []


def test_no_sentence_names_this_machine() -> None:
    """The repository stands alone: no registry hosts, no absolute home of a build machine."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    # In pieces, so that this file does not name them itself.
    hosts = [".".join((name, "org")) for name in ("pypi", "python" + "hosted", "npmjs")]
    named = [
        name
        for name in tracked
        if (ROOT / name).suffix in {".py", ".md", ".toml", ".sh", ".json"} and (ROOT / name).is_file()
        if any(host in (ROOT / name).read_text(errors="replace") for host in hosts)
    ]
    assert named == []


def test_modules_lie_in_packages_which_contracts_name() -> None:
    assert sorted(path.name for path in (ROOT / "src" / "trireme").glob("*.py")) == ["__init__.py", "api.py"]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    names = [name for contract in contracts for key in ("modules", "source_modules") for name in contract.get(key, [])]
    assert [name for name in names if Path(ROOT, "src", *name.split(".")).with_suffix(".py").exists()] == []


def test_a_stray_import_is_refused_in_every_package(tmp_path: Path) -> None:
    """A new module is checked by where it lies: one of each package that imports all that is forbidden there."""
    shutil.copytree(ROOT / "src", tmp_path / "src")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    packages = {path.parent.name for path in (ROOT / "src" / "trireme").glob("*/__init__.py")}
    assert {f"trireme.{package}" for package in packages} | ROOMS == set(FORBIDDEN_IMPORTS), "the table is complete"
    for package, forbidden in FORBIDDEN_IMPORTS.items():
        stray = Path(tmp_path, "src", *package.split("."), "stray.py")
        stray.write_text("".join(f"import {name}\n" for name in sorted(forbidden)))
    checked = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    strays = {f"{package}.stray -> {name}" for package, names in FORBIDDEN_IMPORTS.items() for name in names}
    assert {stray for stray in strays if stray not in checked.stdout} == set(), checked.stdout + checked.stderr


def test_no_docstring_begins_with_a_fragment() -> None:
    """A docstring says what the thing does, in a sentence."""
    assert [
        f"{file}: {getattr(node, 'name', 'module')}"
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | Function) and FRAGMENT.match(ast.get_docstring(node) or "")
    ] == []


def test_no_public_class_name_stands_twice() -> None:
    classes = [node for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    names = Counter(node.name for node in classes if not node.name.startswith("_"))
    assert [name for name, number in names.items() if number > 1] == []


def test_functions_fit_on_a_screen() -> None:
    assert [
        f"{file}: {node.name}"
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, Function) and node.end_lineno and node.end_lineno - node.lineno >= LONG_FUNCTION
    ] == []


def test_unit_tests_mirror_the_source() -> None:
    """A test_x.py, or test_x_topic.py, below tests/unit has its module x in the same place of the source."""
    unit = ROOT / "tests" / "unit"

    def has_module(test: Path) -> bool:
        place = ROOT / "src" / ("." if test.parts[0] in ROOMS else "trireme") / test.parent
        words = test.stem.split("_")[1:]
        names = ["_".join(words[: count + 1]) for count in range(len(words))]
        return any((place / name).is_dir() or (place / f"{name}.py").exists() for name in names)

    tests = {path.relative_to(unit) for path in unit.rglob("test_*.py") if path.parent not in (unit, unit / "scripts")}
    assert sorted(str(test) for test in tests if not has_module(test)) == sorted(WITHOUT_MODULE)


PATH_ROOMS = ("trireme/checkpoint", "trireme/run", "service")
PATHS_ELSEWHERE = {
    "trireme/run/mirror.py": {
        "path": "what _files has just listed",
        "tree": "a name of TREES",
        "name": "a name of FILES, or one that os.walk has listed",
        "directory": "what os.walk lists",
    },
    "trireme/run/rundir.py": {
        "config.run.directory": "where the user's configuration puts runs",
        "config.resume.dir": "where the user says that another run lies",
        "config.run.name": "checked by the configuration; the directory of a run may be a link of the user",
        "mark": "a name of MARKS",
    },
    "trireme/run/metrics.py": {"n + failed": "a division"},
    "service/guard.py": {"self._per_minute": "a division"},
}
"""The operands from which places are made without `path_in`, and why they name nothing elsewhere."""


def is_constant(node: ast.expr) -> bool:
    """Tells whether an operand is a literal, a constant, or text in which only numbers and constants stand."""
    match node:
        case ast.Constant():
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.isupper() or name == "__file__"
        case ast.FormattedValue(value=value, format_spec=ast.JoinedStr(values=[ast.Constant(value=spec)])):
            return str(spec).endswith("d") or is_constant(value)
        case ast.FormattedValue(value=value):
            return is_constant(value)
        case ast.JoinedStr(values=parts):
            return all(map(is_constant, parts))
        case ast.BinOp(left=left, right=right):
            return is_constant(left) and is_constant(right)
        case ast.Call(func=ast.Name(id="step_name")):
            return True
    return False


def operands_of_places(source: str) -> set[str]:
    """Returns the operands of `/`, `joinpath` and `Path` that are neither literals nor constants nor numbers."""
    operands: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.BinOp(op=ast.Div(), right=right):
                operands.append(right)
            case ast.AugAssign(op=ast.Div(), value=value):
                operands.append(value)
            case ast.Call(func=ast.Name(id="Path") | ast.Attribute(attr="joinpath" | "Path"), args=args):
                operands += args
            case ast.Call(func=ast.Attribute(attr="join", value=ast.Attribute(attr="path")), args=args):
                operands += args
    return {ast.unparse(operand) for operand in operands if not is_constant(operand)}


def test_paths_are_names() -> None:
    """What a manifest, a HEAD, a store or a request names becomes a place in `path_in` alone, which refuses what leaves
    its directory."""
    joined = {
        str(path.relative_to(ROOT / "src")): operands_of_places(path.read_text())
        for room in PATH_ROOMS
        for path in sorted((ROOT / "src" / room).rglob("*.py"))
    }
    assert {path: operands for path, operands in joined.items() if operands} == {
        path: set(reasons) for path, reasons in PATHS_ELSEWHERE.items()
    }


def test_no_text_is_read_as_markup() -> None:
    """A square bracket in an error of a library ("[/src/pair.cc:553]") is text, not a tag that rich refuses."""
    consoles = [line.strip() for path in SOURCES for line in path.read_text().splitlines() if " Console(" in line]
    assert len(consoles) > 5
    assert [line for line in consoles if "markup=False" not in line] == []
