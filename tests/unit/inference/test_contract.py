"""What our source and the check of GPUs use of vLLM, and of torch on GPUs, is in the classes that vLLM takes on CUDA.

Uses are collected from the source, and resolved by mypy against the installed packages (`contract_support`). The builds
of vLLM for CPUs and for CUDA had the same source in 0.32 (CONTRIBUTING), and torch has one for all.
"""

import ast
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from contract_support import ROOT, Use, checked, class_of, union_of, uses
from mypy.build import BuildResult

SOURCE = ROOT / "src"
WORKER = SOURCE / "inference" / "worker.py"
ENGINE = SOURCE / "inference" / "engine.py"
TORCH = ("torch.cuda", "torch.accelerator", "torch.backends", "torch.nn.attention")
V1, V2 = "vllm.v1.worker.gpu_model_runner.GPUModelRunner", "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
VARLEN = "torch.nn.attention.varlen.varlen_attn()"
SLEEP = "vllm.entrypoints.llm.LLM.sleep()"
ALLOWED = {
    SLEEP: "the check of GPUs does not look at what it returns",
    "vllm.config.model.ModelConfig.hf_config": "a configuration of transformers",
    "vllm.config.model.ModelConfig.try_get_generation_config()": "values of a JSON file",
    "vllm.config.vllm.set_current_vllm_config()": "a context that yields nothing",
    "vllm.engine.arg_utils.AsyncEngineArgs()": "its keywords are looked up below, where they are collected",
    "vllm.inputs.llm.TokensPrompt()": "images, which it could have, are dicts of anything",
    "vllm.model_executor.layers.attention_layer_base.AttentionLayerBase.impl": "only its class is looked at",
    "vllm.sampling_params.SamplingParams.extra_args": "what `inference.engine.vllm_params` puts there itself",
    "vllm.utils.system_utils.get_mp_context()": "a context of Python's own multiprocessing",
    "vllm.v1.engine.EngineCoreOutput.ec_transfer_params": "only whether it is there",
    "vllm.v1.engine.EngineCoreOutput.kv_transfer_params": "only whether it is there",
    "vllm.v1.engine.EngineCoreOutput.new_logprobs": "arrays of numpy",
    "vllm.v1.engine.EngineCoreOutput.new_sampling_mask": "only whether it is there",
    "vllm.v1.engine.EngineCoreOutput.routed_experts": "only whether it is there",
    "vllm.v1.engine.async_llm.AsyncLLM.collective_rpc()": "answers of our own `WorkerExtension`",
    "vllm.v1.engine.async_llm.AsyncLLM.engine_core": "vLLM decorates what makes it; `_core` declares its type",
    "vllm.v1.outputs.LogprobsLists()": "arrays of numpy",
}
"""Uses to which vLLM gives no type, and why none of its objects escapes there; in our source each is at one place."""
SELECTED = "from vllm.engine.arg_utils import AsyncEngineArgs\nfrom vllm.v1.worker.gpu_worker import Worker\n"
"""A module that imports what our source names in strings."""


def parsed(module: str) -> ast.Module:
    """Returns the syntax tree of an installed module, which is not imported: it may need a GPU."""
    package, *names = module.split(".")
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).parent.joinpath(*names).with_suffix(".py").read_text())


def function(tree: ast.Module, name: str) -> ast.FunctionDef:
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    return found


@pytest.fixture(scope="module")
def source() -> BuildResult:
    return checked({"selected": SELECTED})


def unresolved(found: list[Use]) -> list[str]:
    return [str(use) for use in found if use.problem and use.name not in ALLOWED]


def test_mypy_finds_no_error_beside_vllm(source: BuildResult) -> None:
    assert [error for error in source.errors if error.startswith("src/inference/")] == []


def test_each_use_of_vllm_is_resolved(source: BuildResult) -> None:
    found = uses(source, ["vllm"], closed=True)
    assert unresolved(found) == []
    ours = [use for use in found if not use.file.startswith("scripts/")]
    assert Counter(use.name for use in ours if use.problem) == Counter(set(ALLOWED) - {SLEEP})
    names = {use.name for use in found}
    assert {f"{runner}.reload_weights()" for runner in (V1, V2)} <= names
    assert {"vllm.v1.engine.async_llm.AsyncLLM.add_request()", "vllm.sampling_params.SamplingParams()"} <= names
    assert {SLEEP, "vllm.entrypoints.llm.LLM.wake_up()"} <= names  # of the check of GPUs


def test_each_use_of_torch_on_gpus_is_resolved(source: BuildResult) -> None:
    found = uses(source, TORCH, closed=False)
    assert unresolved(found) == []
    assert {"torch.accelerator.synchronize()", VARLEN} <= {use.name for use in found}


def test_the_runner_is_each_that_vllm_may_take(source: BuildResult) -> None:
    made = function(parsed("vllm.v1.worker.gpu_worker"), "_make_model_runner")
    imports = [node for node in ast.walk(made) if isinstance(node, ast.ImportFrom)]
    taken = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    encoder = "vllm.v1.worker.mm_encoder_model_runner.MMEncoderModelRunner"  # samples no tokens
    assert (
        union_of(class_of(source, "inference.worker.WorkerExtension"), "model_runner") == taken - {encoder} == {V1, V2}
    )
    assert "vllm.v1.worker.gpu_worker.Worker" in ast.unparse(parsed("vllm.platforms.cuda"))


def test_the_worker_on_gpus_takes_our_extension(source: BuildResult) -> None:
    """vLLM refuses one with a name that its worker has, and gives it the worker's other attributes."""
    ours, theirs = (
        class_of(source, name) for name in ("inference.worker.WorkerExtension", "vllm.v1.worker.gpu_worker.Worker")
    )
    added = {node.name for node in ast.walk(ast.parse(WORKER.read_text())) if isinstance(node, ast.FunctionDef)}
    added = {name for name in added if name in ours.names}
    assert {"receive_weights", "take_weights", "free_memory"} <= added
    assert {name for name in added if theirs.get(name)} == set()
    assert {name for name in ("model_runner", "vllm_config") if theirs.get(name) is None} == set()


def test_the_worker_has_each_method_that_is_called_by_name() -> None:
    """The engine calls methods of its ranks by name (`collective_rpc`), which mypy does not see."""
    (extension,) = (
        node
        for node in ast.parse(WORKER.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "WorkerExtension"
    )
    takes = {node.name: len(node.args.args) - 1 for node in extension.body if isinstance(node, ast.FunctionDef)}
    given: dict[str, set[int]] = {}
    for path in (SOURCE / "inference").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("._in_engine"):
                name, *rest = [*node.args, *(keyword.value for keyword in node.keywords)]
                (args,) = rest or [ast.Tuple([])]
                assert isinstance(args, ast.Tuple), f"{path.name}:{node.lineno}: its arguments are no literal tuple"
                given.setdefault(ast.literal_eval(name), set()).add(len(args.elts))
    assert {name: counts for name, counts in given.items() if counts != {takes.get(name)}} == {}
    assert {"receive_weights", "take_weights", "settle"} <= given.keys()


def test_the_engine_has_each_argument_that_is_set_by_name(source: BuildResult) -> None:
    given = function(ast.parse(ENGINE.read_text()), "engine_args")
    looked_up = [node.value for node in ast.walk(given) if isinstance(node, ast.Attribute)]
    tables = [node for node in ast.walk(given) if isinstance(node, ast.Dict) and node not in looked_up]
    stored = [
        node.slice for node in ast.walk(given) if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "args"
    ]
    asked = {
        key.value
        for key in [*stored, *(key for table in tables for key in table.keys)]
        if isinstance(key, ast.Constant)
    }
    assert {"worker_extension_cls", "gpu_memory_utilization"} <= asked
    theirs = class_of(source, "vllm.engine.arg_utils.AsyncEngineArgs")
    assert {name for name in asked if theirs.get(name) is None} == set()


def test_vllm_reads_each_variable_of_its_environment_that_is_set() -> None:
    text = "".join(path.read_text() for path in (SOURCE / "inference").rglob("*.py"))
    asked = set(re.findall(r'"(VLLM_\w+)"', text))
    (known,) = (
        node.value
        for node in parsed("vllm.envs").body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "environment_variables"
    )
    assert isinstance(known, ast.Dict)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" in asked
    assert asked - {ast.literal_eval(key) for key in known.keys if key} == set()
