"""What our source names of vLLM in strings, which mypy does not see, is in the classes that vLLM takes on CUDA.

mypy checks all other uses against vLLM's own types. vLLM's builds for CPUs and for CUDA had the same source in 0.32
(CONTRIBUTING). Modules that may need a GPU are only parsed.
"""

import ast
import dataclasses
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs

from inference.actor import KV_CACHE, WEIGHTS
from inference.following import PACK
from inference.worker import WorkerExtension

SOURCE = Path(__file__).parents[3] / "src" / "inference"
WORKER = "vllm.v1.worker.gpu_worker"


def parsed(module: str) -> ast.Module:
    """Returns the syntax tree of an installed module, which is not imported: it may need a GPU."""
    package, *names = module.split(".")
    spec = find_spec(package)
    return ast.parse(Path(spec.origin).parent.joinpath(*names).with_suffix(".py").read_text())


def function(tree: ast.Module, name: str) -> ast.FunctionDef:
    (definition,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    return definition


def method(module: str, owner: str, name: str) -> ast.FunctionDef:
    (definition,) = (node for node in parsed(module).body if isinstance(node, ast.ClassDef) and node.name == owner)
    return function(ast.Module(definition.body, []), name)


class OnCuda(ast.NodeTransformer):
    """Leaves out what is done on other platforms."""

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if ast.unparse(node.test) in ("current_platform.is_cpu()", "current_platform.is_xpu()"):
            return node.orelse
        return node


def imported(tree: ast.AST) -> set[str]:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {f"{node.module}.{alias.name}" for node in imports for alias in node.names}


def test_the_worker_on_gpus_has_each_runner_and_takes_our_extension() -> None:
    taken = imported(function(parsed(WORKER), "_make_model_runner"))
    encoder = "vllm.v1.worker.mm_encoder_model_runner.MMEncoderModelRunner"  # samples no tokens
    # `inference.adapter.ModelRunner` is the union of all runners, and mypy checks each use against all.
    ours = imported(ast.parse((SOURCE / "adapter.py").read_text()))
    assert {name for name in ours if "model_runner" in name} == taken - {encoder}
    assert f"{WORKER}.Worker" in ast.unparse(parsed("vllm.platforms.cuda"))
    # vLLM refuses an extension with a name that its worker has, and gives it the worker's other attributes.
    theirs = [node for module in (WORKER, "vllm.v1.worker.worker_base") for node in ast.walk(parsed(module))]
    names = {node.name for node in theirs if isinstance(node, ast.FunctionDef)}
    names |= {ast.unparse(node) for node in theirs if isinstance(node, ast.Attribute)}
    assert {"load_model", "self.vllm_config", "self.model_runner"} <= names
    assert {name for name in vars(WorkerExtension) if name in names and not name.startswith("__")} == set()


def test_the_worker_has_each_method_that_is_called_by_name() -> None:
    """The engine calls methods of its ranks by name (`collective_rpc`)."""
    (extension,) = (
        node
        for node in ast.parse((SOURCE / "worker.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "WorkerExtension"
    )
    takes = {node.name: len(node.args.args) - 1 for node in extension.body if isinstance(node, ast.FunctionDef)}
    counts_by_name: dict[str, set[int]] = {}
    for path in SOURCE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("._in_engine"):
                name, *rest = [*node.args, *(keyword.value for keyword in node.keywords)]
                (args,) = rest or [ast.Tuple([])]
                assert isinstance(args, ast.Tuple), f"{path.name}:{node.lineno}: its arguments are no literal tuple"
                counts_by_name.setdefault(ast.literal_eval(name), set()).add(len(args.elts))
    assert {name: counts for name, counts in counts_by_name.items() if counts != {takes.get(name)}} == {}
    assert {"receive_weights", "take_weights", "settle"} <= counts_by_name.keys()


def test_after_a_load_cuda_computes_nothing_from_plain_weights() -> None:
    """What `inference.following.PLAIN` and `derives` take for granted, as updates then only copy."""
    layers = "vllm.model_executor.layers"
    for module, owner in (
        (f"{layers}.linear", "UnquantizedLinearMethod"),
        (f"{layers}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
        ("vllm.v1.attention.backend", "AttentionImplBase"),
    ):
        definition = OnCuda().visit(method(module, owner, PACK))
        assert [ast.unparse(line) for line in definition.body if not isinstance(line, ast.Pass)] == [], owner
    attention = method(f"{layers}.attention.attention", "Attention", PACK)
    calls = {ast.unparse(node.func) for node in ast.walk(attention) if isinstance(node, ast.Call)}
    quantised = {"resolve_quant_method", "should_load_quant_weights", "set_default_quant_scales"}
    assert calls == {"self.impl.process_weights_after_loading", *quantised}


def test_after_a_load_experts_on_cuda_are_changed_in_their_own_memory_only() -> None:
    """A change is seen by the sums; the kernel is made once, before the first update."""
    module = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
    owner = "UnquantizedFusedMoEMethod"
    definitions = [method(module, owner, name) for name in (PACK, "_setup_kernel")]
    nodes = [node for definition in definitions for node in ast.walk(definition)]
    assigned = {ast.unparse(target) for node in nodes if isinstance(node, ast.Assign) for target in node.targets}
    assert {name for name in assigned if "." in name} == {"w13.data", "w2.data"}, "of XPUs"
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    replacements = [ast.unparse(node) for node in calls if ast.unparse(node.func) == "replace_parameter"]
    assert len(replacements) == 2
    assert all("prefer_copy=is_weight_update" in text for text in replacements)
    first = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "not is_weight_update"]
    assert ["self._init_moe_kernel(layer)" in ast.unparse(node) for node in first] == [True]


def test_what_is_set_by_name_in_the_engines_arguments_and_environment_is_read() -> None:
    definition = function(ast.parse((SOURCE / "engine.py").read_text()), "engine_args")
    looked_up = [node.value for node in ast.walk(definition) if isinstance(node, ast.Attribute)]
    tables = [node for node in ast.walk(definition) if isinstance(node, ast.Dict) and node not in looked_up]
    stored = [
        node.slice
        for node in ast.walk(definition)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "args"
    ]
    keys = [*stored, *(key for table in tables for key in table.keys)]
    names = {key.value for key in keys if isinstance(key, ast.Constant)}
    assert {"worker_extension_cls", "gpu_memory_utilization"} <= names
    assert names - {field.name for field in dataclasses.fields(AsyncEngineArgs)} == set()
    text = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    environ = set(re.findall(r'"(VLLM_\w+)"', text))
    (variables,) = (
        node.value
        for node in parsed("vllm.envs").body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "environment_variables"
    )
    assert isinstance(variables, ast.Dict)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" in environ
    assert environ - {ast.literal_eval(key) for key in variables.keys if key} == set()


def test_a_paused_engine_gives_back_the_memory_of_its_kv_cache_and_keeps_its_requests() -> None:
    """What `ReplicaActor.sleep` takes for granted of an engine on CUDA: while it is paused no request counts as
    unfinished, so that the memory may go; and the wake makes it go on by itself, as soon as the memory is there."""
    core = "vllm.v1.engine.core"
    release = ast.unparse(method(core, "EngineCore", "release_kv_cache_memory"))
    assert "self.is_scheduler_paused() and (not self.scheduler.has_requests())" in release
    assert release.index("self._reset_caches()") < release.index(f"self.model_executor.discard(('{KV_CACHE}',))")
    unfinished = ast.unparse(method("vllm.v1.core.sched.scheduler", "Scheduler", "get_num_unfinished_requests"))
    assert unfinished.splitlines()[1].strip() == "if self._pause_state == PauseState.PAUSED_ALL:"
    assert unfinished.splitlines()[2].strip() == "return 0"
    pause = ast.unparse(method(core, "EngineCoreProc", "pause_scheduler"))
    assert "PauseState.PAUSED_ALL if mode == 'keep'" in pause
    wake = ast.unparse(method(core, "EngineCore", "wake_up"))
    assert "if fully_awake:\n        self.resume_scheduler()" in wake


def test_an_engine_that_loses_its_weights_keeps_its_requests_and_its_buffers() -> None:
    """What `ReplicaActor.sleep` takes for granted where an update brings all weights: vLLM drops its own memory, keeps
    the buffers, which no update brings, and gives them back with the memory of the weights."""
    core = ast.unparse(method("vllm.v1.engine.core", "EngineCore", "sleep"))
    assert core.index("self.pause_scheduler(mode=mode, ") < core.index("model_executor.sleep(level)")
    sleep = ast.unparse(method(WORKER, "Worker", "sleep"))
    kept = "self._sleep_saved_buffers = {name: buffer.cpu().clone() for name, buffer in model.named_buffers()}"
    assert sleep.index("if level == 2:") < sleep.index(kept) < sleep.index("self.sleep_mode_backend.suspend(level)")
    wake = ast.unparse(method(WORKER, "Worker", "wake_up"))
    restored = wake.index("buffer.data.copy_(self._sleep_saved_buffers[name].data)")
    assert wake.index("self.sleep_mode_backend.resume(tags)") < restored
    tags = f"SLEEP_TAGS = frozenset(('{WEIGHTS}', '{KV_CACHE}'))"
    assert tags in ast.unparse(parsed("vllm.v1.executor.abstract"))
    backend = ast.unparse(method("vllm.device_allocator.sleep_mode_backend", "CuMemBackend", "suspend"))
    assert "offload_tags: tuple[str, ...] = ('runtime', 'cudagraph')\n    if level == 1:" in backend


def test_on_cuda_the_memory_of_the_kv_cache_is_vllms_own_if_the_engine_may_sleep() -> None:
    assert {"enable_sleep_mode", "kv_cache_memory_bytes"} <= {f.name for f in dataclasses.fields(AsyncEngineArgs)}
    assert "self.enable_cumem_allocator = True" in ast.unparse(
        method("vllm.config.model", "ModelConfig", "__post_init__")
    )
    pools = [
        ast.literal_eval(keyword.value)
        for node in ast.walk(parsed(WORKER))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._maybe_get_memory_pool_context"
        for keyword in node.keywords
    ]
    assert {KV_CACHE, "weights"} <= set(pools)
    discard = ast.unparse(method(WORKER, "Worker", "discard"))
    assert "self.sleep_mode_backend.discard(tags)" in discard


def test_cuda_graphs_leave_with_the_weights_and_come_back_with_them() -> None:
    """Not where the cache alone leaves: `engine_args` then does not ask for it, as ranks would pay for it."""
    asks = ast.unparse(method("vllm.config.vllm", "VllmConfig", "use_cumem_cudagraph_pool"))
    assert "model_config.sleep_mode_offload_cudagraph and model_config.enable_sleep_mode" in asks
    pool = ast.unparse(function(parsed("vllm.compilation.cudagraph_pool"), "capture_pool"))
    assert pool.index("if vllm_config.use_cumem_cudagraph_pool") < pool.index("allocator.cudagraph_pool()")
    for capturing in ("vllm.compilation.cuda_graph", "vllm.v1.worker.gpu.cudagraph_utils"):  # of the two runners
        assert "capture_pool(self." in ast.unparse(parsed(capturing)), capturing
    allocator = "vllm.device_allocator.cumem", "CuMemAllocator"
    assert "self.current_tag = 'cudagraph'" in ast.unparse(method(*allocator, "cudagraph_pool"))
    assert f"DEFERRABLE_TAGS: tuple[str, ...] = ('{WEIGHTS}', '{KV_CACHE}')" in ast.unparse(
        parsed("vllm.device_allocator.__init__")
    )
    assert "data.tag not in DEFERRABLE_TAGS:\n" in ast.unparse(method(*allocator, "wake_up")), "back at any wake"
    assert "if data.tag not in tags:\n" in ast.unparse(method(*allocator, "discard")), "they stay"
    (register,) = (
        node.value
        for node in ast.walk(parsed("vllm.distributed.device_communicators.cuda_communicator"))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "register"
    )
    assert ast.unparse(register) == "config is None or not config.use_cumem_cudagraph_pool"
