"""Finds what our source uses of an installed package, and resolves each use by mypy against the package's own source.

mypy reports names and signatures that do not fit, but is silent about values of type Any. So each use must have a type
that is not Any, and modules with uses of vLLM declare nothing as Any: nothing escapes unseen.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from functools import cache
from inspect import isgetsetdescriptor
from pathlib import Path
from tempfile import TemporaryDirectory

from mypy.build import BuildResult, build
from mypy.checkexpr import has_any_type
from mypy.main import process_options
from mypy.modulefinder import BuildSource
from mypy.nodes import (
    ARG_NAMED,
    ARG_POS,
    ARG_STAR2,
    Argument,
    AssignmentStmt,
    CallExpr,
    Expression,
    FuncDef,
    IndexExpr,
    MemberExpr,
    MypyFile,
    NameExpr,
    Node,
    RefExpr,
    Statement,
    TypeInfo,
)
from mypy.types import (
    AnyType,
    CallableType,
    Instance,
    Overloaded,
    ProperType,
    Type,
    TypedDictType,
    TypeType,
    UnionType,
    get_proper_type,
)

ROOT = Path(__file__).parents[3]
GPU_CHECK = {
    ".".join(path.relative_to(ROOT / "scripts").with_suffix("").parts).removesuffix(".__init__"): str(path)
    for path in (ROOT / "scripts" / "gpu_check").glob("*.py")
}
"""The modules of the check that people run on their GPUs, and their files."""
PACKAGES = ("trireme", "trainer", "orchestrator", "inference", "service", "gpu_check")

ELSEWHERE = {"node", "info", "original_def", "expanded", "analyzed", "setter"}
"""Fields of a node that lead to other trees, or to the same one again. (mypy raises an AssertionError for the setter of
overloads that are no property.)"""


@dataclass(frozen=True)
class Use:
    file: str
    line: int
    name: str
    """The full name of what is used, for an attribute that of the class that has it."""
    problem: str | None = None
    """Why it is not resolved; None if it is."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.name}: {self.problem or 'resolved'}"


@cache
def _fill_cache() -> None:
    """Has mypy read all packages that we import, so that `checked` keeps only our own trees, and takes seconds."""
    build(*process_options([]))


def checked(replaced: Mapping[str, str] | None = None) -> BuildResult:
    """Checks our source and the check of GPUs with the settings of pyproject.toml, and keeps trees and types.
    `replaced`: other source text of some modules."""
    with chdir(ROOT), TemporaryDirectory() as directory:  # settings are read there
        _fill_cache()
        sources, options = process_options([])
        options.export_types = options.preserve_asts = True
        copied = shutil.copytree(options.cache_dir, Path(directory, "cache"))  # it must not learn the replaced text
        options.cache_dir = str(copied)
        paths = {source.module: source.path for source in sources if source.path and Path(source.path).is_file()}
        paths |= GPU_CHECK
        texts = {module: Path(path).read_text() for module, path in paths.items()} | dict(replaced or {})
        return build([BuildSource(paths.get(module), module, text) for module, text in texts.items()], options)


def uses(result: BuildResult, roots: Sequence[str], *, closed: bool) -> list[Use]:
    """Returns every use of the modules `roots` in our source. `closed`: nothing that they return, or
    that is declared beside them, may be Any."""
    found = []
    for module, tree in sorted(result.files.items()):
        if module.partition(".")[0] in PACKAGES:
            module_uses = _Uses(tree, result.types, tuple(roots), closed)
            found += module_uses.found + (module_uses.declared if module_uses.found and closed else [])
    return sorted(found, key=lambda use: (use.file, use.line))


def _parts(typ: Type | None) -> Iterator[ProperType]:
    """Yields the members of a union, else the type."""
    proper = get_proper_type(typ)
    if isinstance(proper, UnionType):
        for item in proper.items:
            yield from _parts(item)
    elif proper is not None:
        yield proper


def _class_of(part: ProperType) -> TypeInfo | None:
    if isinstance(part, Instance):
        return part.type
    if isinstance(part, TypeType):
        return _class_of(part.item)
    if isinstance(part, CallableType | Overloaded) and part.is_type_obj():
        return part.type_object()
    return None


def _children(node: Node) -> Iterator[Node]:
    """Yields the parts of a tree right below `node`. (mypy is compiled: Python cannot subclass its visitors.)"""
    left = [getattr(node, name, None) for name in _fields(type(node))]
    while left:
        value = left.pop()
        if isinstance(value, list | tuple):
            left += value
        elif isinstance(value, Expression | Statement | Argument | FuncDef):
            yield value


@cache
def _fields(kind: type) -> list[str]:
    found = {name for base in kind.__mro__ for name, field in vars(base).items() if isgetsetdescriptor(field)}
    return sorted(found - ELSEWHERE)


class _Uses:
    def __init__(self, tree: MypyFile, types: dict[Expression, Type], roots: tuple[str, ...], closed: bool) -> None:
        self._closed = closed
        self.found: list[Use] = []
        self.declared: list[Use] = []  # a vLLM object might come in there
        self._file, self._types, self._roots = str((ROOT / tree.path).relative_to(ROOT)), types, roots
        self._walk(tree)

    def _walk(self, tree: Node) -> None:
        left: list[Node] = [tree]
        while left:
            node = left.pop()
            self._look_at(node)
            left += _children(node)

    def _look_at(self, node: Node) -> None:
        match node:
            case NameExpr():
                self._name(node)
            case MemberExpr():
                self._member(node)
            case CallExpr():
                self._call(node)
            case IndexExpr() if self._holds_theirs(node.base):
                self._note(node, "an item", self._problem(node))
            case AssignmentStmt() if isinstance(get_proper_type(node.type), AnyType):
                self.declared.append(Use(self._file, node.line, "a variable", "it is declared as Any"))
            case FuncDef():
                self._function(node)

    def _is_theirs(self, name: str) -> bool:
        return any(name == root or name.startswith(f"{root}.") for root in self._roots)

    def _their_class(self, part: ProperType) -> TypeInfo | None:
        info = _class_of(part)
        return info if info and any(self._is_theirs(base.module_name) for base in info.mro) else None

    def _holds_theirs(self, node: Expression) -> bool:
        return any(self._their_class(part) for part in _parts(self._types.get(node)))

    def _note(self, node: Expression, name: str, problem: str | None = None) -> None:
        self.found.append(Use(self._file, node.line, name, problem))

    def _problem(self, node: Expression) -> str | None:
        """Returns why the type of an expression does not say what it is; types of functions are looked at in calls."""
        typ = get_proper_type(self._types.get(node))
        if typ is None:
            return "mypy gives it no type"
        if isinstance(typ, CallableType | Overloaded):
            return None
        if isinstance(typ, Instance) and typ.type.fullname == "typing.Coroutine":
            typ = typ.args[-1]
        return f"its type is {typ}" if has_any_type(typ) else None

    def _name(self, node: NameExpr) -> None:
        if self._is_theirs(node.fullname) and not isinstance(node.node, MypyFile):
            self._note(node, node.fullname, None if isinstance(node.node, TypeInfo) else self._problem(node))

    def _member(self, node: MemberExpr) -> None:
        if isinstance(node.expr, RefExpr) and isinstance(node.expr.node, MypyFile):
            if self._is_theirs(node.expr.node.fullname) and not isinstance(node.node, MypyFile):
                known = isinstance(node.node, TypeInfo)
                self._note(node, f"{node.expr.node.fullname}.{node.name}", None if known else self._problem(node))
            return
        for part in _parts(self._types.get(node.expr)):
            if info := self._their_class(part):
                owner = next((base for base in info.mro if node.name in base.names), None)
                problem = self._problem(node) if owner else f"{info.fullname} has no attribute {node.name}"
                self._note(node, f"{(owner or info).fullname}.{node.name}", problem)

    def _call(self, node: CallExpr) -> None:
        names = self._callees(node.callee)
        for name in names:
            result = self._problem(node) if self._closed else None
            self._note(node, f"{name}()", self._call_problem(node) or result)
        if not names and any(self._holds_theirs(arg) for arg in node.args):
            for problem in self._escapes(node):
                self._note(node, "an argument", problem)

    def _callees(self, callee: Expression) -> list[str]:
        """Returns the full names of their functions or classes that a call may call."""
        if isinstance(callee, RefExpr) and self._is_theirs(callee.fullname):
            return [callee.fullname]
        found = []
        if isinstance(callee, MemberExpr):
            for part in _parts(self._types.get(callee.expr)):
                info = self._their_class(part)
                owner = info and next((base for base in info.mro if callee.name in base.names), None)
                if owner and self._is_theirs(owner.module_name):
                    found.append(f"{owner.fullname}.{callee.name}")
        return found

    def _call_problem(self, node: CallExpr) -> str | None:
        """Returns why mypy could not check an argument of a call: it is unpacked, or their function takes any name."""
        for arg, kind in zip(node.args, node.arg_kinds, strict=True):
            if kind == ARG_STAR2 and not isinstance(get_proper_type(self._types.get(arg)), TypedDictType):
                return "its keywords are unpacked from a dict"
        given = {name for name, kind in zip(node.arg_names, node.arg_kinds, strict=True) if kind == ARG_NAMED}
        for part in _parts(self._types.get(node.callee)):
            if isinstance(part, CallableType) and (unknown := given - set(part.arg_names)):
                return f"it takes any keyword, also {', '.join(sorted(map(str, unknown)))}"
        return None

    def _escapes(self, node: CallExpr) -> Iterator[str]:
        """Yields where their objects are handed to a parameter that is declared as Any, or come back as Any."""
        if isinstance(get_proper_type(self._types.get(node)), AnyType):
            yield "what is made of it is Any"
        callee = get_proper_type(self._types.get(node.callee))
        if not isinstance(callee, CallableType):
            return
        for place, (arg, kind, name) in enumerate(zip(node.args, node.arg_kinds, node.arg_names, strict=True)):
            formal = callee.argument_by_name(name) if kind == ARG_NAMED else None
            formal = callee.argument_by_position(place) if kind == ARG_POS else formal
            if self._holds_theirs(arg) and formal and isinstance(get_proper_type(formal.typ), AnyType):
                yield f"it is handed to a parameter of type Any, {formal.name or place}"

    def _function(self, node: FuncDef) -> None:
        typ = get_proper_type(node.type)
        if isinstance(typ, CallableType):
            names = [*(str(name) for name in typ.arg_names), "its result"]
            for name, each in zip(names, [*typ.arg_types, typ.ret_type], strict=True):
                if isinstance(get_proper_type(each), AnyType):
                    what = f"{name} of {node.fullname}"
                    self.declared.append(Use(self._file, node.line, what, "it is declared as Any"))


def class_of(result: BuildResult, name: str) -> TypeInfo:
    """Returns what mypy knows of the class with this full name."""
    module, _, name = name.rpartition(".")
    info = result.files[module].names[name].node
    assert isinstance(info, TypeInfo)
    return info


def union_of(info: TypeInfo, attribute: str) -> set[str]:
    """Returns the full names of the classes that an attribute may have."""
    symbol = info.get(attribute)
    assert symbol is not None
    return {part.type.fullname for part in _parts(symbol.type) if isinstance(part, Instance)}
